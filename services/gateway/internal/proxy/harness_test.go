package proxy

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"berth/services/gateway/internal/routecache"
	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(benchRole); role != "" { //nolint:forbidigo // as above all tests: a child of the benchmark
		playBenchRole(role)
		return
	}
	goleak.VerifyTestMain(m)
}

const (
	domain   = "sbx.test"
	nodeKey  = "node-key"
	validKey = "e2b_valid"
	pairOfS1 = "e2b-sandbox-id: s1\r\ne2b-sandbox-port: 3000\r\n"
)

// routes is a resolver that tests fill and change.
type routes struct {
	mu       sync.Mutex
	known    map[sandbox.ID]routecache.Found
	err      error
	lost     bool
	suspects int
	rechecks []sandbox.Revision
	onAgain  func(r *routes) // what a second look finds; mu is held
}

func (r *routes) set(id sandbox.ID, n *routecache.Node, revision sandbox.Revision) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.put(id, n, revision)
}

func (r *routes) put(id sandbox.ID, n *routecache.Node, revision sandbox.Revision) {
	r.known[id] = routecache.Found{Node: n, Route: route.Route{
		Sandbox: id, Node: n.ID, Revision: revision, Incarnation: 1, State: sandbox.Bound,
	}}
}

func (r *routes) get(id sandbox.ID) (routecache.Found, error) {
	if r.err != nil {
		return routecache.Found{}, r.err
	}
	f, ok := r.known[id]
	if !ok {
		return f, sandbox.ErrNotFound
	}
	return f, nil
}

func (r *routes) Lookup(_ context.Context, id sandbox.ID) (routecache.Found, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.get(id)
}

func (r *routes) Suspect(_ context.Context, f routecache.Found) (routecache.Found, bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.suspects++
	if r.onAgain != nil {
		r.onAgain(r)
	}
	f, err := r.get(f.Sandbox)
	return f, r.lost, err
}

func (r *routes) Recheck(_ context.Context, id sandbox.ID, atLeast sandbox.Revision) (routecache.Found, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rechecks = append(r.rechecks, atLeast)
	if r.onAgain != nil {
		r.onAgain(r)
	}
	return r.get(id)
}

func (r *routes) Trusted(string) bool { return false }

// stack is a gateway before one node, as a client meets it.
type stack struct {
	t       *testing.T
	routes  *routes
	forward *Forwarder
	addr    string // of the gateway
	log     *syncBuffer
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func newStack(t *testing.T, change func(*Config)) *stack {
	t.Helper()
	guard, err := route.NewGuard(route.GuardConfig{Schemes: route.DefaultSchemes, Loopback: true})
	if err != nil {
		t.Fatal(err)
	}
	cfg := DefaultConfig()
	if change != nil {
		change(&cfg)
	}
	s := &stack{t: t, routes: &routes{known: map[sandbox.ID]routecache.Found{}}, log: &syncBuffer{}}
	s.forward = New(Deps{
		Routes: s.routes, Guard: guard, NodeKeys: []string{nodeKey}, Log: slog.New(slog.NewTextHandler(s.log, nil)),
		IsKey: func(_ context.Context, key string) bool { return key == validKey },
	}, cfg)
	domains, err := ParseDomains(domain)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		target, err := ParseTarget(r, domains)
		if told, ok := errors.AsType[*Error](err); ok {
			WriteError(w, r, Data, *told)
			return
		}
		switch target.Kind {
		case KindData:
			s.forward.ServeData(w, r, target)
		case KindSandbox:
			s.forward.ServeControl(w, r, ControlCall{Target: target})
		default:
			WriteError(w, r, Control, target.Refusal(r.Method))
		}
	}), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	Configure(server, 128<<10)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.addr = listener.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = server.Serve(listener) })
	running.Go(func() { _ = s.forward.Run(ctx) })
	t.Cleanup(func() {
		closing, end := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Second)
		defer end()
		_ = server.Close()
		_ = s.forward.Close(closing)
		cancel()
		running.Wait()
	})
	return s
}

func testNode(t *testing.T, address string, capabilities ...string) *routecache.Node {
	t.Helper()
	n, err := routecache.NewNode(node.ID("n-"+strings.NewReplacer(".", "-", ":", "-").Replace(address)), "http://"+address, capabilities, false, 1)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// app makes s1 live on a node whose HTTP server is h.
func (s *stack) app(h http.HandlerFunc, capabilities ...string) *httptest.Server {
	s.t.Helper()
	server := httptest.NewServer(h)
	s.t.Cleanup(server.Close)
	s.routes.set("s1", testNode(s.t, server.Listener.Addr().String(), capabilities...), 7)
	return server
}

// rawNode makes s1 live on a node that handles each connection itself. It returns how many there were.
func (s *stack) rawNode(handle func(c net.Conn), capabilities ...string) *atomic.Int32 {
	s.t.Helper()
	address, count := listen(s.t, handle)
	s.routes.set("s1", testNode(s.t, address, capabilities...), 7)
	return count
}

func listen(t *testing.T, handle func(c net.Conn)) (string, *atomic.Int32) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	count := &atomic.Int32{}
	var running sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	closed := false
	running.Go(func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			count.Add(1)
			mu.Lock()
			conns = append(conns, c)
			if closed { // accepted while the rest was being closed: a spare dial of the transport
				c.Close()
			}
			mu.Unlock()
			running.Go(func() { defer c.Close(); handle(c) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		mu.Lock()
		closed = true
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		running.Wait()
	})
	return listener.Addr().String(), count
}

// dial opens a connection to the gateway on which nothing may take longer than ten seconds.
func (s *stack) dial() *client {
	s.t.Helper()
	c, err := net.Dial("tcp", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		s.t.Fatal(err)
	}
	return &client{Conn: c, t: s.t, r: bufio.NewReader(c)}
}

// client writes and reads the socket itself: a library would repair what is under test.
type client struct {
	net.Conn
	t *testing.T
	r *bufio.Reader
}

func (c *client) send(text string) {
	c.t.Helper()
	if _, err := io.WriteString(c.Conn, text); err != nil {
		c.t.Fatal(err)
	}
}

// answer reads one answer's head; its body is read by the caller.
func (c *client) answer(method string) *http.Response {
	c.t.Helper()
	resp, err := http.ReadResponse(c.r, &http.Request{Method: method})
	if err != nil {
		c.t.Fatalf("read the answer: %v", err)
	}
	return resp
}

func body(t *testing.T, resp *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("read the body after %q: %v", b, err)
	}
	return string(b)
}

// ask sends one raw request and returns its whole answer.
func (s *stack) ask(request string) (*http.Response, string) {
	s.t.Helper()
	c := s.dial()
	c.send(request)
	method, _, _ := strings.Cut(request, " ")
	resp := c.answer(method)
	return resp, body(s.t, resp)
}

// readHead reads one request head from a raw node's connection.
func readHead(r *bufio.Reader) (string, error) {
	var head strings.Builder
	for {
		line, err := r.ReadString('\n')
		head.WriteString(line)
		if err != nil || line == "\r\n" {
			return head.String(), err
		}
	}
}

// dump answers with the request as the node saw it.
func dump(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	fmt.Fprintf(w, "%s %s %s\n", r.Method, r.RequestURI, r.Proto)
	fmt.Fprintf(w, "Host: %s\n", r.Host)
	_ = r.Header.Write(w)
	fmt.Fprintf(w, "\n%s", b)
}

func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !holds() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 10 s: %s", what)
		}
		<-tick.C
	}
}
