package nodeagent_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"

	"berth/pkg/telemetry"
	"berth/services/nodeagent"
)

const (
	nodeKey   = "node-key-of-tests"
	nodeToken = "node-token-of-tests"
	nobody    = 65534
)

func needBubblewrap(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("bwrap"); err != nil {
		t.Skip("bubblewrap is not installed on this machine; .ci/run installs it")
	}
}

func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// agent is a node agent under test, and a client with its key.
type agent struct {
	t         testing.TB
	cfg       nodeagent.Config
	scheduler *fakeScheduler
	base      string
	client    *http.Client
	tracers   trace.TracerProvider // nil: as configured
}

// newAgent returns a configured agent that does not run yet.
func newAgent(t testing.TB, change ...func(*nodeagent.Config)) *agent {
	t.Helper()
	needBubblewrap(t)
	f := newFakeScheduler()
	cfg := nodeagent.DefaultConfig()
	cfg.NodeID, cfg.ClusterID, cfg.Data = "node-a", "test", filepath.Join(t.TempDir(), "data")
	cfg.Listen, cfg.OpsListen, cfg.AdminListen = freeAddress(t), freeAddress(t), freeAddress(t)
	cfg.Endpoint = "http://" + cfg.Listen
	cfg.SchedulerGRPC, cfg.SchedulerToken, cfg.NodeKeys = []string{serveGRPC(t, f)}, nodeToken, []string{nodeKey}
	for _, c := range change {
		c(&cfg)
	}
	transport := &http.Transport{DisableKeepAlives: true, DisableCompression: true}
	t.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport, Timeout: 30 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return &agent{t: t, cfg: cfg, scheduler: f, base: cfg.Endpoint, client: client}
}

// run runs the agent in this process and returns what stops it cleanly.
func (a *agent) run() (stop func()) {
	a.t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(a.t.Context()))
	tel, err := telemetry.New(ctx, telemetry.Config{Service: "nodeagent", Version: "test", LogLevel: "debug", Output: a.t.Output()})
	if err != nil {
		a.t.Fatal(err)
	}
	if a.tracers != nil {
		tel.Tracers = a.tracers
	}
	done := make(chan error, 1)
	go func() { done <- nodeagent.Run(ctx, a.cfg, tel, "test") }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			a.t.Errorf("Run: %v", err)
		}
		if err := tel.Close(context.WithoutCancel(ctx)); err != nil {
			a.t.Errorf("close telemetry: %v", err)
		}
	}
	a.t.Cleanup(stop)
	a.waitReady(done)
	return stop
}

// process runs the agent as a process of its own, as uid when it is not 0, and returns it.
func (a *agent) process(uid int) *exec.Cmd {
	a.t.Helper()
	binary := a.binary()
	cmd := exec.Command(binary,
		"--node-id", a.cfg.NodeID, "--data", a.cfg.Data, "--listen", a.cfg.Listen, "--ops-listen", a.cfg.OpsListen, "--admin-listen", a.cfg.AdminListen,
		"--endpoint", a.cfg.Endpoint, "--scheduler-grpc", strings.Join(a.cfg.SchedulerGRPC, ","), "--log-level", "debug")
	cmd.Env = []string{agentVariable + "=1", "BERTH_NODE_KEY=" + nodeKey, "BERTH_SCHEDULER_TOKEN=" + nodeToken, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Stdout, cmd.Stderr = a.t.Output(), a.t.Output()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if uid != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}
	}
	if err := cmd.Start(); err != nil {
		a.t.Fatalf("start agent: %v", err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	a.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // a clean stop takes its cgroups away
		select {
		case <-done:
		case <-time.After(30 * time.Second):
			_ = cmd.Process.Kill()
			<-done
			a.t.Error("the agent did not stop on SIGTERM")
		}
	})
	a.waitReady(done)
	cmd.Cancel = func() error { // wait for the end, once
		err := <-done
		done <- err
		return err
	}
	return cmd
}

func kill9(t testing.TB, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatalf("kill agent: %v", err)
	}
	if err := cmd.Cancel(); err == nil {
		t.Fatal("a killed agent ended well")
	}
}

// binary is this test binary where any user can run it.
func (a *agent) binary() string {
	a.t.Helper()
	path := filepath.Join(filepath.Dir(a.cfg.Data), "agent")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	text, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		a.t.Fatal(err)
	}
	syscall.ForkLock.RLock() // a child forked meanwhile would have it open for writing, and nobody could run it
	defer syscall.ForkLock.RUnlock()
	if err := os.WriteFile(path, text, 0o755); err != nil {
		a.t.Fatal(err)
	}
	return path
}

func (a *agent) waitReady(done <-chan error) {
	a.t.Helper()
	limit := time.After(60 * time.Second)
	for {
		resp, err := a.client.Get("http://" + a.cfg.OpsListen + "/readyz")
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return
			}
		}
		select {
		case err := <-done:
			a.t.Fatalf("the agent ended: %v", err)
		case <-limit:
			a.t.Fatal("the agent is not ready")
		case <-time.After(10 * time.Millisecond): // polls another process
		}
	}
}

// answer is a whole HTTP answer.
type answer struct {
	status int
	header http.Header
	body   string
}

func (r answer) json(t testing.TB) map[string]any {
	t.Helper()
	var v map[string]any
	if err := json.Unmarshal([]byte(r.body), &v); err != nil {
		t.Fatalf("%d %q is not JSON: %v", r.status, r.body, err)
	}
	return v
}

type headers map[string]string

// call calls the control plane.
func (a *agent) call(method, path, body string, h ...headers) answer {
	a.t.Helper()
	r, err := a.try(method, path, body, h...)
	if err != nil {
		a.t.Fatalf("%s %s: %v", method, path, err)
	}
	return r
}

func (a *agent) try(method, path, body string, h ...headers) (answer, error) {
	req, err := http.NewRequestWithContext(context.WithoutCancel(a.t.Context()), method, a.base+path, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("X-API-Key", nodeKey)
	for _, set := range h {
		for name, value := range set {
			req.Header.Set(name, value)
		}
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return answer{status: resp.StatusCode, header: resp.Header, body: string(text)}, err
}

// create makes a sandbox of the template under the id and returns its answer.
func (a *agent) create(id, template, more string) answer {
	a.t.Helper()
	r := a.call("POST", "/v2/sandboxes", `{"templateID":"`+template+`"`+more+`}`, headers{"Berth-Sandbox-Id": id, "Berth-Reservation": "r-" + id})
	if r.status != http.StatusCreated {
		a.t.Fatalf("create %s: %d %s", id, r.status, r.body)
	}
	return r
}

func pair(id string, port int) headers {
	return headers{"x-agentenv-sandbox-id": id, "x-agentenv-target-port": strconv.Itoa(port)}
}

// ask asks a port of a sandbox and waits while nobody listens yet.
func (a *agent) ask(id string, port int, target string, h ...headers) answer {
	a.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		r := a.call("GET", "/proxy"+target, "", append(h, pair(id, port))...)
		if r.status != http.StatusBadGateway || time.Now().After(deadline) {
			return r
		}
	}
}

// raw sends bytes to the agent's port and returns the answer's bytes up to the end of the connection.
func (a *agent) raw(text string) string {
	a.t.Helper()
	conn, err := net.Dial("tcp", a.cfg.Listen)
	if err != nil {
		a.t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.WriteString(conn, text); err != nil {
		a.t.Fatal(err)
	}
	var all bytes.Buffer
	if _, err := io.Copy(&all, conn); err != nil && !errors.Is(err, net.ErrClosed) {
		a.t.Fatalf("read raw answer: %v (so far %q)", err, all.String())
	}
	return all.String()
}
