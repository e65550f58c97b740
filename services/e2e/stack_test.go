package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	readyLimit = 2 * time.Minute
	stopLimit  = time.Minute
	goneLimit  = 10 * time.Second
	pollPause  = 50 * time.Millisecond
)

// info is the ready file, as the documentation has it.
type info struct {
	Gateways   []string `json:"gateways"`
	Schedulers []struct {
		Twirp string `json:"twirp"`
		GRPC  string `json:"grpc"`
		PID   int    `json:"pid"`
	} `json:"schedulers"`
	Nodes []struct {
		ID       string `json:"id"`
		Endpoint string `json:"endpoint"`
		PID      int    `json:"pid"`
	} `json:"nodes"`
	DatabaseURL string         `json:"database_url"`
	APIKey      string         `json:"api_key"`
	Domain      string         `json:"domain"`
	PIDs        map[string]int `json:"pids"`
}

// stack is one running "berth dev".
type stack struct {
	info
	t         *testing.T
	cmd       *exec.Cmd
	ready     string // the ready file
	data      string // the data folder; "" if ephemeral
	temporary string // where an ephemeral one is
	out       *buffer
	ended     chan error
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

// start runs "berth dev" with args until it is ready, and stops it at the end of the test.
func start(t *testing.T, args ...string) *stack {
	t.Helper()
	s := &stack{t: t, ready: filepath.Join(t.TempDir(), "ready.json"), out: &buffer{}, ended: make(chan error, 1)}
	env := environment()
	if i := slices.Index(args, "--data"); i >= 0 {
		s.data = args[i+1]
	} else {
		args = append(args, "--ephemeral")
		s.temporary = dataFolder(t)
		if err := os.Mkdir(s.temporary, 0o755); err != nil {
			t.Fatal(err)
		}
		env = append(env, "TMPDIR="+s.temporary)
	}
	s.cmd = exec.Command(binary, append([]string{"dev", "--ready-file", s.ready}, args...)...)
	s.cmd.Stdout, s.cmd.Stderr = s.out, s.out
	s.cmd.Env = env
	// Should this test die, nothing of its stack stays: the services die with their parent.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func(cmd *exec.Cmd) { s.ended <- cmd.Wait(); close(s.ended) }(s.cmd)
	t.Cleanup(func() {
		s.stop()
		if t.Failed() {
			t.Logf("berth dev wrote:\n%s", s.out)
		}
	})
	s.readInfo()
	return s
}

// environment is this process's, without what would reach a Berth elsewhere.
func environment(more ...string) []string {
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "BERTH_") })
	return append(env, more...)
}

// readInfo waits for the ready file.
func (s *stack) readInfo() {
	s.t.Helper()
	deadline := time.After(readyLimit)
	tick := time.NewTicker(pollPause)
	defer tick.Stop()
	for {
		text, err := os.ReadFile(s.ready)
		if err == nil {
			s.info = info{}
			if err := json.Unmarshal(text, &s.info); err != nil {
				s.t.Fatalf("ready file %s: %v", text, err)
			}
			return
		}
		select {
		case err := <-s.ended:
			s.t.Fatalf("berth dev ended before it was ready: %v\n%s", err, s.out)
		case <-deadline:
			s.t.Fatalf("berth dev was not ready within %v:\n%s", readyLimit, s.out)
		case <-tick.C:
		}
	}
}

// stop ends the stack as Ctrl-C does. It must exit with code 0 and leave no process; a second call
// does nothing.
func (s *stack) stop() {
	s.t.Helper()
	if s.cmd == nil {
		return
	}
	cmd := s.cmd
	s.cmd = nil
	_ = cmd.Process.Signal(os.Interrupt) // it may have ended, which the wait tells
	select {
	case err := <-s.ended:
		if err != nil {
			s.t.Errorf("berth dev ended with %v", err)
		}
	case <-time.After(stopLimit):
		_ = cmd.Process.Kill()
		s.t.Errorf("berth dev did not stop within %v", stopLimit)
	}
	s.nothingLeft()
	if s.temporary == "" {
		return
	}
	if left, err := os.ReadDir(s.temporary); err != nil || len(left) > 0 {
		s.t.Errorf("an ephemeral stack leaves files: %v, %v", left, err)
	}
}

// nothingLeft waits until no process of the stack is left, sandboxes included.
func (s *stack) nothingLeft() {
	s.t.Helper()
	eventually(s.t, goneLimit, func() error {
		var left []string
		for name, pid := range s.PIDs {
			if pid != 0 && alive(pid) {
				left = append(left, fmt.Sprintf("%s (%d)", name, pid))
			}
		}
		left = append(left, s.sandboxProcesses()...)
		if len(left) > 0 {
			slices.Sort(left)
			return fmt.Errorf("still running: %v", left)
		}
		return nil
	})
}

// sandboxProcesses returns the processes that name this stack's folder: node agents and sandboxes.
func (s *stack) sandboxProcesses() []string {
	s.t.Helper()
	if s.data != "" {
		return processesNaming(s.t, s.data+"/nodes/")
	}
	return processesNaming(s.t, s.temporary)
}

func alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	// A zombie has ended; whoever adopted it has not looked yet.
	_, rest, _ := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')'):]), " ")
	return !strings.HasPrefix(rest, "Z")
}

// kill ends one process of the stack as kill -9 does, and waits until it is gone.
func (s *stack) kill(name string) int {
	s.t.Helper()
	pid := s.PIDs[name]
	if pid == 0 {
		s.t.Fatalf("no process %q in %v", name, s.PIDs)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		s.t.Fatalf("kill %s: %v", name, err)
	}
	eventually(s.t, goneLimit, func() error {
		if alive(pid) {
			return fmt.Errorf("%s (%d) lives", name, pid)
		}
		return nil
	})
	return pid
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

// dataFolder returns a folder that PostgreSQL's own user can get into.
func dataFolder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	// Where this is root, the server runs as another user, for whom the test's folder is closed.
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "data")
}

// berth runs one command of the binary against this stack.
func (s *stack) berth(args ...string) result {
	s.t.Helper()
	return run(s.t, []string{"BERTH_GATEWAY_URL=" + s.Gateways[0], "BERTH_API_KEY=" + s.APIKey}, args...)
}

// result is how a command ended.
type result struct {
	code           int
	stdout, stderr string
}

// run runs one command of the binary to its end.
func run(t *testing.T, env []string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.Env = environment(env...)
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		t.Fatalf("berth %q did not end within a minute:\n%s", args, &stderr)
	}
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		t.Fatalf("berth %q: %v", args, err)
	}
	return result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// sql returns what psql prints for a query, a line a row, with | between columns.
func (s *stack) sql(query string) string {
	s.t.Helper()
	cmd := exec.CommandContext(s.t.Context(), "psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", s.DatabaseURL, "-c", query)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		s.t.Fatalf("psql %s: %v: %s", query, err, &stderr)
	}
	return strings.TrimSpace(string(out))
}
