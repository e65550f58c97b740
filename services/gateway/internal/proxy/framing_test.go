package proxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"berth/pkg/waittest"
)

func TestC12BadFramingIsTheClients(t *testing.T) {
	t.Parallel()
	for name, chunks := range map[string]string{
		"a bare LF in a chunk size":        "1\na\r\n0\r\n\r\n",
		"an extension with a bare LF":      "1;\na\r\n0\r\n\r\n",
		"a hexadecimal prefix":             "0x1\r\na\r\n0\r\n\r\n",
		"a plus":                           "+1\r\na\r\n0\r\n\r\n",
		"a minus":                          "-1\r\na\r\n0\r\n\r\n",
		"a size of 17 digits":              "00000000000000001\r\na\r\n0\r\n\r\n",
		"a chunk without its closing CRLF": "1\r\nab0\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStack(t, nil)
			var complete atomic.Int32
			s.rawNode(func(c net.Conn) {
				req, err := http.ReadRequest(bufio.NewReader(c))
				if err != nil {
					return
				}
				if _, err := io.Copy(io.Discard, req.Body); err == nil {
					complete.Add(1)
				}
			})
			c := s.dial()
			c.send("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Transfer-Encoding: chunked\r\n\r\n" + chunks)
			resp := c.answer("POST")
			text := body(t, resp)
			if e := errorOf(t, resp, text); e.Code != 400 || e.Message != "failed to read request body" {
				t.Errorf("%+v", e)
			}
			if _, err := c.r.ReadByte(); !errors.Is(err, io.EOF) {
				t.Errorf("the connection is not closed: %v", err)
			}
			if complete.Load() != 0 || s.routes.suspects != 0 {
				t.Errorf("the node got %d whole requests, %d looks at the route", complete.Load(), s.routes.suspects)
			}
		})
	}
}

func TestC13ContradictoryLengths(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	var bodies atomic.Value
	s.app(func(_ http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		bodies.Store(fmt.Sprintf("%s %q %v %s", r.Method, b, r.Header["Content-Length"], r.RequestURI))
	})
	for name, tt := range map[string]struct {
		lines    string
		statuses []int
	}{
		"both":                 {"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", []int{400, 200}},
		"two lengths":          {"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", []int{400}},
		"a list of lengths":    {"Content-Length: 3, 4\r\n\r\nabcd", []int{400}},
		"a signed length":      {"Content-Length: +3\r\n\r\nabc", []int{400}},
		"a negative length":    {"Content-Length: -1\r\n\r\n", []int{400}},
		"a length with blanks": {"Content-Length: 3 3\r\n\r\nabc", []int{400}},
		"20 digits":            {"Content-Length: 99999999999999999999\r\n\r\nabc", []int{400}},
		"an unknown coding":    {"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", []int{400, 501}},
		"two codings":          {"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", []int{400, 501}},
		"a blank in the name":  {"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", []int{400}},
	} {
		bodies.Store("")
		resp, _ := s.ask("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + tt.lines)
		if seen := bodies.Load(); !slices.Contains(tt.statuses, resp.StatusCode) || resp.StatusCode != 200 && seen != "" || resp.StatusCode == 200 && seen != `POST "" [] /proxy/x` {
			t.Errorf("%s: %d, the node saw %s", name, resp.StatusCode, seen)
		}
	}
}

func TestC14AnEarlyAnswerToAnExpectedBody(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.app(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			w.WriteHeader(http.StatusUnauthorized) // without reading the body, so without a 100
			_, _ = io.WriteString(w, "no")
			return
		}
		_, _ = io.WriteString(w, r.URL.Path)
	})
	done := make(chan string, 2)
	for kind := range 2 {
		go func() {
			for i := range 50 {
				if kind == 0 {
					resp, got := s.ask("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Expect: 100-continue\r\nContent-Length: 1000000\r\n\r\n")
					if resp.StatusCode != 401 || got != "no" {
						done <- fmt.Sprintf("POST: %d %q", resp.StatusCode, got)
						return
					}
					continue
				}
				if resp, got := s.ask(fmt.Sprintf("GET /ok%d HTTP/1.1\r\nHost: h\r\n%s\r\n", i, pairOfS1)); resp.StatusCode != 200 || got != fmt.Sprintf("/proxy/ok%d", i) {
					done <- fmt.Sprintf("GET: %d %q", resp.StatusCode, got)
					return
				}
			}
			done <- ""
		}()
	}
	for range 2 {
		if wrong := waittest.Receive(t, "the verdict of the app", done); wrong != "" {
			t.Error(wrong)
		}
	}
}

func TestC14ABodyThatIsAskedForArrivesWhole(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.app(func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body) // sends 100
		fmt.Fprint(w, n, err)
	})
	c := s.dial()
	c.send("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Expect: 100-continue\r\nContent-Length: 100000\r\n\r\n")
	if resp := c.answer("POST"); resp.StatusCode != http.StatusContinue {
		t.Fatalf("first answer %d, want 100", resp.StatusCode)
	}
	c.send(strings.Repeat("b", 100000))
	resp := c.answer("POST")
	if got := body(t, resp); resp.StatusCode != 200 || got != "100000 <nil>" {
		t.Errorf("%d %q", resp.StatusCode, got)
	}
}

func TestC14ANodeThatNeverAsksGetsTheBodyAfterASecond(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.rawNode(func(c net.Conn) {
		r := bufio.NewReader(c)
		if _, err := readHead(r); err != nil {
			return
		}
		if _, err := io.ReadFull(r, make([]byte, 5)); err == nil { // it does not know Expect
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		}
	})
	c := s.dial()
	c.send("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
	if resp := c.answer("POST"); resp.StatusCode != http.StatusContinue {
		t.Fatalf("first answer %d, want 100", resp.StatusCode)
	}
	c.send("12345")
	if got := body(t, c.answer("POST")); got != "ok" {
		t.Errorf("got %q", got)
	}
}
