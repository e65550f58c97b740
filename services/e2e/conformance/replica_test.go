package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"berth/pkg/migrate"
	"berth/pkg/pgtest"
	"berth/pkg/waittest"
)

const (
	readyLimit = 2 * time.Minute
	stopLimit  = time.Minute
	pollPause  = 50 * time.Millisecond

	// settleLimit is for what a few heartbeats settle, on a slow machine.
	settleLimit = time.Minute
)

// replica is one scheduler process.
type replica struct {
	grpc, twirpURL, ops string

	t     *testing.T
	cmd   *exec.Cmd
	out   *buffer
	ended chan struct{} // closed when the process is gone; err says how
	err   error
}

// buffer takes what a process writes while others read it.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// agentENVFile writes AgentENV's configuration file with a static list of nodes.
func agentENVFile(t *testing.T, ids ...string) string {
	t.Helper()
	nodes := make([]map[string]string, len(ids))
	for i, id := range ids {
		nodes[i] = map[string]string{"id": id, "endpoint": endpoint(id)}
	}
	text, err := json.Marshal(map[string]any{
		"log_level": "warn", "log_format": "json",
		"scheduler": map[string]any{
			"strategy": "round_robin", "report_ttl": "30s", "binding_ttl": "24h", "redis_addr": "redis:6379", "nodes": nodes,
			"node_resource_limit": map[string]any{"max_sandbox_count": 20, "max_cpu_used_percent": nil},
			"discovery":           map[string]any{"mode": "static"},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(name, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// endpoint is where the node of an id would serve HTTP. Nobody dials it here.
func endpoint(id string) string {
	var last byte
	for _, c := range []byte(id) {
		last = last*31 + c
	}
	return fmt.Sprintf("http://10.0.0.%d:8000", last)
}

// login returns db as a login in role berth_scheduler, with that role's rights and timeouts.
func login(t *testing.T, db *pgtest.Database) string {
	t.Helper()
	const name = "berth_scheduler_test"
	if err := migrate.EnsureLogin(t.Context(), db.URL, name, "secret", "berth_scheduler"); err != nil {
		t.Fatalf("make a login: %v", err)
	}
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(name, "secret")
	return u.String()
}

// freeAddress is a loopback address that nobody listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

// serve starts a scheduler process with flags and returns once it is ready. It is stopped at the end
// of the test, and must then end well unless it was killed.
func serve(t *testing.T, databaseURL string, flags ...string) *replica {
	t.Helper()
	r := &replica{grpc: freeAddress(t), ops: "http://" + freeAddress(t), t: t, out: &buffer{}, ended: make(chan struct{})}
	twirp := freeAddress(t)
	r.twirpURL = "http://" + twirp
	args := append([]string{
		"scheduler", "serve", "--grpc-listen", r.grpc, "--twirp-listen", twirp, "--ops-listen", strings.TrimPrefix(r.ops, "http://"),
		"--admin-listen", "", "--drain-delay", "0s",
	}, flags...)
	r.cmd = exec.Command(program, args...)
	r.cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "BERTH_") }),
		"BERTH_DATABASE_URL="+databaseURL)
	r.cmd.Stdout, r.cmd.Stderr = r.out, r.out
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		r.err = r.cmd.Wait()
		close(r.ended)
	}()
	t.Cleanup(func() {
		r.stop()
		if t.Failed() {
			t.Logf("a scheduler wrote:\n%s", r.out)
		}
	})
	eventually(t, readyLimit, func() error {
		select {
		case <-r.ended:
			t.Fatalf("the scheduler ended before it was ready: %v", r.err)
		default:
		}
		code, text, err := get(t.Context(), r.ops+"/readyz")
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("HTTP %d: %s", code, text)
		}
		return err
	})
	return r
}

// stop ends the process as an orchestrator does; a second call, or one after a kill, does nothing.
func (r *replica) stop() {
	r.t.Helper()
	select {
	case <-r.ended:
		return
	default:
	}
	_ = r.cmd.Process.Signal(syscall.SIGTERM) // it may just have ended, which the wait tells
	select {
	case <-r.ended:
		if r.err != nil {
			r.t.Errorf("a scheduler ended with %v", r.err)
		}
	case <-time.After(stopLimit):
		_ = r.cmd.Process.Kill()
		<-r.ended
		r.t.Errorf("a scheduler did not stop within %v", stopLimit)
	}
}

// kill ends the process as kill -9 does.
func (r *replica) kill() {
	r.t.Helper()
	if err := r.cmd.Process.Kill(); err != nil {
		r.t.Fatal(err)
	}
	waittest.Receive(r.t, "the end of the killed scheduler", r.ended)
}

// eventually calls f until it returns nil, and fails with its last error after limit.
func eventually(t *testing.T, limit time.Duration, f func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), limit)
	defer cancel()
	tick := time.NewTicker(pollPause)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("not within %v: %v", limit, err)
		case <-tick.C:
		}
	}
}

func get(ctx context.Context, url string) (int, string, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return 0, "", err
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(text), err
}

// service is a fixed address in front of replicas, as a Kubernetes Service is: it forwards each new
// connection to one of them and knows nothing of calls.
type service struct {
	address string
	mu      sync.Mutex
	next    int
	behind  []string
	open    map[net.Conn]bool
}

func newService(t *testing.T, behind ...string) *service {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &service{address: l.Addr().String(), behind: behind, open: map[net.Conn]bool{}}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // closed
			}
			running.Go(func() { s.forward(conn) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		s.cut()
		running.Wait()
	})
	return s
}

// dial connects to the next replica that takes a connection.
func (s *service) dial() (net.Conn, error) {
	s.mu.Lock()
	first, behind := s.next, slices.Clone(s.behind)
	s.next++
	s.mu.Unlock()
	err := fmt.Errorf("nothing is behind %s", s.address)
	for i := range behind {
		var conn net.Conn
		if conn, err = net.DialTimeout("tcp", behind[(first+i)%len(behind)], callLimit); err == nil {
			return conn, nil
		}
	}
	return nil, err
}

func (s *service) forward(client net.Conn) {
	s.keep(client)
	defer s.close(client)
	server, err := s.dial()
	if err != nil {
		return
	}
	s.keep(server)
	defer s.close(server)
	var back sync.WaitGroup
	back.Go(func() {
		_, _ = io.Copy(client, server) // ends with either connection
		_ = client.Close()
	})
	_, _ = io.Copy(server, client) // likewise
	_ = server.Close()
	back.Wait()
}

func (s *service) keep(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[conn] = true
}

func (s *service) close(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, conn)
	_ = conn.Close()
}

// cut closes every connection.
func (s *service) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for conn := range s.open {
		_ = conn.Close()
	}
}
