package proxy

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"berth/pkg/waittest"
	"berth/services/gateway/internal/routecache"
	"berth/services/internal/sandbox"
)

// errorOf reads one of our own errors.
func errorOf(t *testing.T, resp *http.Response, text string) errorBody {
	t.Helper()
	var e errorBody
	if err := json.Unmarshal([]byte(text), &e); err != nil {
		t.Fatalf("%d is no JSON error: %q", resp.StatusCode, text)
	}
	if e.Code != resp.StatusCode || resp.Header.Get("Berth-Error") != e.ErrorCode || e.RequestID == "" || resp.Header.Get("X-Request-Id") != e.RequestID ||
		resp.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("error %+v does not agree with its header %v", e, resp.Header)
	}
	return e
}

// refused returns an address where nothing listens.
func refused(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

const plainGet = "GET /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "\r\n"

func TestFailuresOfRouteAndNode(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		prepare    func(t *testing.T, s *stack)
		path       string
		status     int
		code       string
		retryAfter string
	}{
		"an unknown sandbox is 502 on the data plane": {func(*testing.T, *stack) {}, "", 502, "unknown_sandbox", ""},
		"and 404 on the control plane":                {func(*testing.T, *stack) {}, "/sandboxes/s1", 404, "unknown_sandbox", ""},
		"routes that cannot be read are 503, never 404": {func(_ *testing.T, s *stack) {
			s.routes.err = fmt.Errorf("%w: connection refused", routecache.ErrUnavailable)
		}, "", 503, "routes_unavailable", "1"},
		"a refused dial is 502": {func(t *testing.T, s *stack) {
			s.routes.set("s1", testNode(t, refused(t)), 7)
		}, "", 502, "node_unreachable", ""},
		"a refused dial of a node without a lease is 503": {func(t *testing.T, s *stack) {
			s.routes.set("s1", testNode(t, refused(t)), 7)
			s.routes.lost = true
		}, "", 503, "node_lost", "5"},
		"an address outside the guard is never dialled": {func(t *testing.T, s *stack) {
			s.routes.set("s1", testNode(t, "8.8.8.8:80"), 7)
		}, "", 502, "node_unreachable", ""},
		"a node that hangs up before it answers is 502": {func(_ *testing.T, s *stack) {
			s.rawNode(func(c net.Conn) { _, _ = readHead(bufio.NewReader(c)) })
		}, "", 502, "node_unreachable", ""},
		"a node that talks nonsense is 502": {func(_ *testing.T, s *stack) {
			s.rawNode(func(c net.Conn) {
				_, _ = readHead(bufio.NewReader(c))
				_, _ = io.WriteString(c, "nonsense\r\n\r\n")
			})
		}, "", 502, "node_unreachable", ""},
		"a node that refuses the node key is our fault": {func(_ *testing.T, s *stack) {
			s.app(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) })
		}, "/sandboxes/s1", 502, "scheduler_error", ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStack(t, nil)
			tt.prepare(t, s)
			request := plainGet
			if tt.path != "" {
				request = "GET " + tt.path + " HTTP/1.1\r\nHost: h\r\n\r\n"
			}
			resp, text := s.ask(request)
			e := errorOf(t, resp, text)
			if e.Code != tt.status || e.ErrorCode != tt.code || resp.Header.Get("Retry-After") != tt.retryAfter {
				t.Errorf("got %+v, Retry-After %q; want %d %s %q", e, resp.Header.Get("Retry-After"), tt.status, tt.code, tt.retryAfter)
			}
			if tt.path == "" && (e.Sandbox != "s1" || e.Port != 3000) {
				t.Errorf("the error names %q port %d", e.Sandbox, e.Port)
			}
			for _, internal := range []string{"127.0.0.1", "8.8.8.8", "refused", "dial", "EOF"} {
				if strings.Contains(text, internal) {
					t.Errorf("internal text %q in %s", internal, text)
				}
			}
		})
	}
}

func TestAFailedDialLooksAgainAndTriesOnce(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	moved, hits := listen(t, func(c net.Conn) {
		req, err := http.ReadRequest(bufio.NewReader(c))
		if err == nil {
			b, _ := io.ReadAll(req.Body)
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(b), b)
		}
	})
	s.routes.set("s1", testNode(t, refused(t)), 7)
	s.routes.onAgain = func(r *routes) { r.put("s1", testNode(t, moved), 8) }
	resp, got := s.ask("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Content-Length: 4\r\n\r\nbody")
	if resp.StatusCode != http.StatusOK || got != "body" || hits.Load() != 1 || s.routes.suspects != 1 {
		t.Errorf("%d %q after %d hits and %d looks", resp.StatusCode, got, hits.Load(), s.routes.suspects)
	}
}

func TestAStaleRouteIsReadAgainAndTheRequestSentOnceMore(t *testing.T) {
	t.Parallel()
	small, large := strings.Repeat("s", 60<<10), strings.Repeat("l", 70<<10)
	tests := map[string]struct {
		capabilities []string
		answer, body string
		status       int
		rechecks     int
		code         string
	}{
		"with a body that was kept":                 {[]string{"route_revision"}, "stale; revision=9", small, 200, 1, ""},
		"without a body":                            {[]string{"route_revision"}, "stale; revision=9", "", 200, 1, ""},
		"but not with more than is kept":            {[]string{"route_revision"}, "stale; revision=9", large, 503, 0, "routes_unavailable"},
		"but not where the node cannot know":        {nil, "stale; revision=9", small, 421, 0, ""},
		"but not on a 421 of the application's own": {[]string{"route_revision"}, "", small, 421, 0, ""},
		"but not on a mark without a number":        {[]string{"route_revision"}, "stale; revision=x", small, 421, 0, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStack(t, nil)
			var seen atomic.Value
			fresh, _ := listen(t, func(c net.Conn) {
				if req, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
					b, _ := io.ReadAll(req.Body)
					seen.Store(req.Header.Get("Berth-Route-Revision") + " " + string(b))
					_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
				}
			})
			old := s.app(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				if tt.answer != "" {
					w.Header().Set("Berth-Node", tt.answer)
				}
				w.WriteHeader(http.StatusMisdirectedRequest)
			}, tt.capabilities...)
			_ = old
			s.routes.onAgain = func(r *routes) { r.put("s1", testNode(t, fresh, "route_revision"), 9) }
			resp, text := s.ask(fmt.Sprintf("PUT /x HTTP/1.1\r\nHost: h\r\n%sContent-Length: %d\r\n\r\n%s", pairOfS1, len(tt.body), tt.body))
			if resp.StatusCode != tt.status || len(s.routes.rechecks) != tt.rechecks {
				t.Fatalf("%d %q after rechecks %v; want %d after %d", resp.StatusCode, text, s.routes.rechecks, tt.status, tt.rechecks)
			}
			if tt.status == 200 && seen.Load() != "9 "+tt.body {
				t.Errorf("the second node saw %.40q", seen.Load())
			}
			if tt.rechecks > 0 && s.routes.rechecks[0] != sandbox.Revision(9) {
				t.Errorf("looked again for revision %d, want 9", s.routes.rechecks[0])
			}
			if tt.code != "" {
				if e := errorOf(t, resp, text); e.ErrorCode != tt.code || resp.Header.Get("Retry-After") != "1" {
					t.Errorf("%+v %v", e, resp.Header)
				}
			}
		})
	}
}

func TestAStaleAnswerBeforeTheBodysEndLosesNothingOfIt(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	var seen atomic.Value
	fresh, _ := listen(t, func(c net.Conn) {
		if req, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
			b, _ := io.ReadAll(req.Body)
			seen.Store(string(b))
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		}
	})
	refusedOnce := make(chan struct{})
	s.rawNode(func(c net.Conn) {
		if _, err := readHead(bufio.NewReader(c)); err == nil {
			_, _ = io.WriteString(c, "HTTP/1.1 421 No\r\nBerth-Node: stale; revision=9\r\nContent-Length: 0\r\n\r\n")
			close(refusedOnce)
		}
	}, "route_revision")
	again := make(chan struct{})
	s.routes.onAgain = func(r *routes) {
		r.put("s1", testNode(t, fresh, "route_revision"), 9)
		close(again)
	}
	c := s.dial()
	c.send("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Content-Length: 10\r\n\r\nfirst")
	waittest.Receive(t, "the first refusal", refusedOnce)
	waittest.Receive(t, "the second look-up", again) // the first attempt is given up, and still waits for the client
	c.send("other")
	resp := c.answer("POST")
	if got := body(t, resp); resp.StatusCode != 200 || got != "ok" || seen.Load() != "firstother" {
		t.Errorf("%d %q, the second node saw %q", resp.StatusCode, got, seen.Load())
	}
}

func TestANodeThatStaysStaleIsAskedTwice(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	var asked atomic.Int32
	s.app(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.Header().Set("Berth-Node", "stale; revision=9")
		w.WriteHeader(http.StatusMisdirectedRequest)
	}, "route_revision")
	resp, text := s.ask(plainGet)
	if e := errorOf(t, resp, text); e.ErrorCode != "routes_unavailable" || asked.Load() != 2 {
		t.Errorf("%+v after %d requests", e, asked.Load())
	}
}

// TestC08APooledConnectionThatDied counts what a node executes whose connections die under reuse.
func TestC08APooledConnectionThatDied(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	var executed atomic.Int32
	// The node answers the first request of a connection and hangs up on the second, unanswered.
	s.rawNode(func(c net.Conn) {
		r := bufio.NewReader(c)
		for answered := false; ; answered = true {
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, req.Body)
			executed.Add(1)
			if answered {
				return
			}
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		}
	})
	c := s.dial()
	ask := func(request string) int {
		c.send(request)
		resp := c.answer("POST")
		_ = body(t, resp)
		return resp.StatusCode
	}
	if got := ask(plainGet); got != 200 {
		t.Fatalf("first GET: %d", got)
	}
	executed.Store(0)
	if got := ask(plainGet); got != 200 || executed.Load() != 2 {
		t.Errorf("a GET on a connection that died: %d after %d tries, want 200 after 2", got, executed.Load())
	}
	// The retry left a connection that has answered once: the next request on it dies.
	for _, header := range []string{"", "Idempotency-Key: k\r\n", "X-Idempotency-Key: k\r\n"} {
		for _, length := range []string{"Content-Length: 0\r\n\r\n", "Content-Length: 1\r\n\r\nx"} {
			if got := ask(plainGet); got != 200 { // a connection in the pool, used once
				t.Fatalf("GET: %d", got)
			}
			executed.Store(0)
			got := ask("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + header + length)
			if executed.Load() != 1 || got != 502 && got != 200 {
				t.Errorf("POST with %q %q: %d after %d executions, want one", header, length, got, executed.Load())
			}
		}
	}
}

func TestANodeGoneMidAnswerIsAVisibleCut(t *testing.T) {
	t.Parallel()
	for name, head := range map[string]string{
		"chunked":       "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
		"with a length": "Content-Length: 100\r\n\r\nhello",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStack(t, nil)
			s.rawNode(func(c net.Conn) {
				if _, err := readHead(bufio.NewReader(c)); err == nil {
					_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n"+head)
				}
			})
			c := s.dial()
			c.send(plainGet)
			resp := c.answer("GET")
			got, err := io.ReadAll(resp.Body)
			if string(got) != "hello" || !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("the client read %q, %v; want what came and a cut", got, err)
			}
		})
	}
}

func TestANodeGoneDuringAnUploadDoesNotWaitForTheClient(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.rawNode(func(c net.Conn) { _, _ = readHead(bufio.NewReader(c)) })
	c := s.dial()
	began := time.Now()
	c.send("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Content-Length: 100\r\n\r\nsome") // and no more
	resp := c.answer("POST")
	if e := errorOf(t, resp, body(t, resp)); e.ErrorCode != "node_unreachable" {
		t.Errorf("%+v", e)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("told after %s", took)
	}
	if _, err := c.r.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("the connection is not closed: %v", err)
	}
}

func TestAClientThatLeavesEndsTheNodesSide(t *testing.T) {
	t.Parallel()
	for name, request := range map[string]string{
		"before an answer":       plainGet,
		"in the answer":          "GET /begin HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "\r\n",
		"in the upload":          "POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Content-Length: 100\r\n\r\nsome",
		"after the whole upload": "POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Content-Length: 4\r\n\r\nsome",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStack(t, nil)
			began, ended := make(chan struct{}), make(chan time.Time, 1)
			s.rawNode(func(c net.Conn) {
				r := bufio.NewReader(c)
				head, err := readHead(r)
				if err != nil {
					return
				}
				if strings.Contains(head, "/begin") {
					_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
				}
				close(began)
				_, _ = io.Copy(io.Discard, r)
				ended <- time.Now()
			})
			c := s.dial()
			c.send(request)
			waittest.Receive(t, "the exchange to begin", began)
			if strings.Contains(request, "/begin") {
				c.answer("GET")
			}
			left := time.Now()
			c.Close()
			select {
			case at := <-ended:
				if took := at.Sub(left); took > time.Second {
					t.Errorf("the node's side ended after %s", took)
				}
			case <-time.After(5 * time.Second):
				t.Error("the node's side stayed open")
			}
			eventually(t, "the exchange is over", func() bool { return s.forward.open.len() == 0 })
		})
	}
}

func TestAnEarlyAnswerMayBeginBeforeTheBodyEnds(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.rawNode(func(c net.Conn) {
		r := bufio.NewReader(c)
		if _, err := readHead(r); err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
		for {
			line, err := r.ReadString('\n') // chunk sizes, all below 10
			if err != nil {
				return
			}
			chunk, err := r.ReadString('\n')
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, line+chunk)
			if strings.HasPrefix(line, "0") {
				return
			}
		}
	})
	c := s.dial()
	c.send("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Transfer-Encoding: chunked\r\n\r\n")
	for _, word := range []string{"one", "two", "three"} {
		c.send(fmt.Sprintf("%x\r\n%s\r\n", len(word), word))
		if word == "one" {
			resp := c.answer("POST")
			defer resp.Body.Close()
			defer func() { _, _ = io.Copy(io.Discard, resp.Body) }()
			c.r = bufio.NewReader(resp.Body)
		}
		got := make([]byte, len(word))
		if _, err := io.ReadFull(c.r, got); err != nil || string(got) != word {
			t.Fatalf("sent %q, %q came back, %v", word, got, err)
		}
	}
	c.send("0\r\n\r\n")
	if rest, err := io.ReadAll(c.r); len(rest) != 0 || err != nil {
		t.Errorf("the end came as %q, %v", rest, err)
	}
}

func TestWhatIsLeftOfABodyIsNeverAnotherRequest(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	var evil atomic.Int32
	s.rawNode(func(c net.Conn) {
		head, err := readHead(bufio.NewReader(c))
		if err != nil {
			return
		}
		if strings.Contains(head, "/evil") {
			evil.Add(1)
		}
		_, _ = io.WriteString(c, "HTTP/1.1 413 No\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
	})
	c := s.dial()
	smuggled := "GET /evil HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "\r\n"
	c.send("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Content-Length: 400000\r\n\r\n")
	if resp := c.answer("POST"); body(t, resp) != "no" {
		t.Error("the early answer did not come")
	}
	_, _ = io.WriteString(c.Conn, smuggled) // may fail: the gateway has closed
	if _, err := c.r.ReadByte(); err == nil {
		t.Error("the connection went on")
	}
	if evil.Load() != 0 {
		t.Error("the rest of a body reached the node as a request")
	}
}

func TestAStatusThatIsNoneIsABadAnswer(t *testing.T) {
	t.Parallel()
	for status, want := range map[string]int{"099": http.StatusBadGateway, "000": http.StatusBadGateway, "599": 599, "999": 999} {
		s := newStack(t, nil)
		s.rawNode(func(c net.Conn) {
			if _, err := readHead(bufio.NewReader(c)); err == nil {
				_, _ = io.WriteString(c, "HTTP/1.1 "+status+" Odd\r\nContent-Length: 2\r\n\r\nhi")
			}
		})
		resp, got := s.ask("GET /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Connection: close\r\n\r\n")
		if resp.StatusCode != want || (want == http.StatusBadGateway) != strings.Contains(got, "bad_answer") {
			t.Errorf("%s: %d %q, want %d", status, resp.StatusCode, got, want)
		}
	}
}

func TestAClientThatNeverSendsTheRestOfItsBodyIsLetGo(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.rawNode(func(c net.Conn) {
		r := bufio.NewReader(c)
		if _, err := readHead(r); err != nil {
			return
		}
		_, _ = r.Peek(3) // the attempt now waits for more of the body
		_, _ = io.WriteString(c, "HTTP/1.1 409 Conflict\r\nContent-Length: 2\r\n\r\nno")
		_, _ = io.Copy(io.Discard, r)
	})
	c := s.dial()
	c.send("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Content-Length: 100\r\n\r\nabc")
	resp := c.answer("POST")
	if got := body(t, resp); resp.StatusCode != http.StatusConflict || got != "no" {
		t.Fatalf("the client got %d %q", resp.StatusCode, got)
	}
	if _, err := c.r.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("the connection stays open: %v", err)
	}
}
