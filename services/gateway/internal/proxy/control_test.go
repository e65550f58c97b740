package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"berth/services/gateway/internal/routecache"
)

// control serves one control-plane call of s1 as an API handler would.
func (s *stack) control(r *http.Request, c ControlCall) *httptest.ResponseRecorder {
	s.t.Helper()
	w := httptest.NewRecorder()
	c.Target.Kind, c.Target.Plane, c.Target.Source, c.Target.Sandbox = KindSandbox, Control, SourcePath, "s1"
	if c.Target.Raw == "" {
		c.Target.Raw, c.Target.Path, c.Target.Route = "/sandboxes/s1", "/sandboxes/s1", "/sandboxes/{sandbox_id}"
	}
	s.forward.ServeControl(w, r, c)
	return w
}

func TestTheCallerOfAControlCallSeesTheAnswerFirst(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.app(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		w.Header().Set("X-Saw", string(b)+r.Header.Get("X-Set"))
		w.WriteHeader(http.StatusNoContent)
	})
	for name, tt := range map[string]struct {
		fails  error
		status int
		code   string
	}{
		"and lets it pass":                     {nil, 204, ""},
		"and may tell something else":          {&Error{Status: 503, Code: "unrecorded", Message: "m"}, 503, "unrecorded"},
		"and its own failure stays inside":     {errors.New("secret text"), 500, "internal"},
		"and a wrapped error is told as it is": {fmt.Errorf("x: %w", &Error{Status: 409, Code: "c", Message: "m"}), 409, "c"},
	} {
		var saw string
		w := s.control(httptest.NewRequest(http.MethodDelete, "/sandboxes/s1", nil), ControlCall{
			Body: []byte("given"), Header: http.Header{"X-Set": {"+set"}},
			Answered: func(_ context.Context, f routecache.Found, resp *http.Response) error {
				saw = fmt.Sprintf("%d %d %s", f.Revision, resp.StatusCode, resp.Header.Get("X-Saw"))
				return tt.fails
			},
		})
		if w.Code != tt.status || w.Header().Get("Berth-Error") != tt.code || saw != "7 204 given+set" || strings.Contains(w.Body.String(), "secret") {
			t.Errorf("%s: %d %q %s after seeing %q", name, w.Code, w.Header().Get("Berth-Error"), w.Body, saw)
		}
	}
}

func TestControlBodiesHaveALimit(t *testing.T) {
	t.Parallel()
	s := newStack(t, func(c *Config) { c.MaxControlBody = 1000 })
	s.app(func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })
	for name, tt := range map[string]struct {
		size   int
		length string // "" is chunked
		status int
	}{
		"at the limit":          {1000, "Content-Length: 1000\r\n", 200},
		"chunked, at the limit": {1000, "", 200},
		"over it":               {1001, "Content-Length: 1001\r\n", 413},
		"chunked, over it":      {1001, "", 413},
	} {
		content := strings.Repeat("b", tt.size)
		if tt.length == "" {
			tt.length, content = "Transfer-Encoding: chunked\r\n", fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", tt.size, content)
		}
		resp, text := s.ask("POST /sandboxes/s1/pause HTTP/1.1\r\nHost: h\r\n" + tt.length + "\r\n" + content)
		if resp.StatusCode != tt.status {
			t.Errorf("%s: %d %s, want %d", name, resp.StatusCode, text, tt.status)
		}
	}
}

func TestANodeThatRefusesTheFirstKeyIsAskedWithTheNext(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.forward.deps.NodeKeys = []string{"old", "new"}
	s.app(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		if r.Header.Get("X-Api-Key") != "new" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		_, _ = w.Write(b)
	})
	if resp, got := s.ask("POST /sandboxes/s1/pause HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody"); resp.StatusCode != 200 || got != "body" {
		t.Errorf("%d %q", resp.StatusCode, got)
	}
}

func TestDoMakesOneCallWithTheNodeKey(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	server := s.app(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Berth-Node", "full")
		w.Header().Set("Connection", "x-hop")
		w.Header().Set("X-Hop", "1")
		w.WriteHeader(http.StatusServiceUnavailable)
		dump(w, r)
	})
	client := httptest.NewRequest(http.MethodPost, "/v2/sandboxes?x", strings.NewReader("{}"))
	for name, value := range map[string]string{
		"X-API-Key": validKey, "Idempotency-Key": "k", "Expect": "100-continue", "E2b-Sandbox-Id": "other", "Berth-Reservation": "forged",
		"User-Agent": "sdk/1",
	} {
		client.Header.Set(name, value)
	}
	for capability, full := range map[string]bool{"create_key": true, "route_revision": false} {
		answer, err := s.forward.Do(t.Context(), NodeCall{
			Node: testNode(t, server.Listener.Addr().String(), capability), Method: http.MethodPost, Target: "/v2/sandboxes?x", Raw: "/v2/sandboxes?x",
			Client: client, Body: []byte(`{"a":1}`), Header: http.Header{"Berth-Sandbox-Id": {"s9"}},
		})
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil || answer.Full != full || answer.StatusCode != 503 || answer.Header.Get("Berth-Node") != "" || answer.Header.Get("X-Hop") != "" {
			t.Errorf("%s: full %v, %d %v, %v", capability, answer.Full, answer.StatusCode, answer.Header, err)
		}
		for _, want := range []string{"POST /v2/sandboxes?x ", "X-Api-Key: " + nodeKey + "\r\n", "Berth-Sandbox-Id: s9\r\n", "User-Agent: sdk/1\r\n", "\n{\"a\":1}"} {
			if !strings.Contains(string(got), want) {
				t.Errorf("the node did not see %q in:\n%s", want, got)
			}
		}
		for _, unwanted := range []string{validKey, "dempotency", "Expect", "other", "forged"} {
			if strings.Contains(string(got), unwanted) {
				t.Errorf("the node saw %q in:\n%s", unwanted, got)
			}
		}
	}
}

func TestDoSaysWhetherAnythingWasSent(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	gone, _ := listen(t, func(c net.Conn) { _, _ = readHead(bufio.NewReader(c)) })
	silent, _ := listen(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	call := func(address string) error {
		answer, err := s.forward.Do(t.Context(), NodeCall{
			Node: testNode(t, address), Method: http.MethodPost, Target: "/sandboxes", Body: []byte("{}"), Within: 300 * time.Millisecond,
		})
		if err == nil {
			answer.Body.Close()
		}
		return err
	}
	if err := call(refused(t)); !NothingSent(err) {
		t.Errorf("a refused dial: %v", err)
	}
	if err := call("8.8.8.8:80"); !NothingSent(err) {
		t.Errorf("an address outside the guard: %v", err)
	}
	if err := call(gone); err == nil || NothingSent(err) {
		t.Errorf("a node that hung up: %v", err)
	}
	if err := call(silent); !errors.Is(err, context.DeadlineExceeded) || NothingSent(err) {
		t.Errorf("a silent node: %v", err)
	}
}

func TestC27HalfARequestHeadIsClosed(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	c := s.dial()
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	c.send("GET /x HTTP/1.1\r\nHost: h\r\n")
	began := time.Now()
	drip := time.NewTicker(2 * time.Second)
	defer drip.Stop()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, c.r)
	}()
	for {
		select {
		case <-drip.C:
			_, _ = io.WriteString(c.Conn, "X-A: 1\r\n")
		case <-ended:
			if took := time.Since(began); took < 9*time.Second || took > 15*time.Second {
				t.Errorf("closed after %s, want 10 s", took)
			}
			return
		}
	}
}
