package dev

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"berth/pkg/waittest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAllMistakesInOptionsAreToldAtOnce(t *testing.T) {
	t.Parallel()
	o := Options{Schedulers: 0, Gateways: 17, Nodes: 65, Domain: ""}
	want := strings.Join([]string{
		"--schedulers 0: 1 to 16 are wanted", "--gateways 17: 1 to 16 are wanted", "--nodes 65: 1 to 64 are wanted",
		"--data: a folder is wanted, or --ephemeral", "--domain: a name like berth.localhost is wanted",
	}, "\n")
	if err := o.Validate(); err == nil || err.Error() != want {
		t.Errorf("Validate = %v, want:\n%s", err, want)
	}
}

func TestAFolderBelongsToOneStackAtATime(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	held, err := lockFolder(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = lockFolder(dir)
	if err == nil || !strings.Contains(err.Error(), "is in use by another berth dev (process ") {
		t.Errorf("second lockFolder = %v, want one that names the process", err)
	}
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := lockFolder(dir)
	if err != nil {
		t.Fatalf("lockFolder once it is free = %v, want nil", err)
	}
	_ = again.Close()
}

func TestAFolderThatCannotBeTakenSaysWhatToDo(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	closed := filepath.Join(dir, "closed")
	if err := os.Mkdir(closed, 0o500); err != nil {
		t.Fatal(err)
	}
	cases := map[string]string{"a folder below a file": filepath.Join(dir, "file", "data")}
	if os.Geteuid() != 0 { // for root no folder is closed
		cases["somebody else's folder"] = closed
	}
	for name, data := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := Start(t.Context(), Options{Schedulers: 1, Gateways: 1, Nodes: 1, Data: data, Domain: "berth.localhost"})
			if err == nil || !strings.Contains(err.Error(), "choose another") || !strings.Contains(err.Error(), "--data") {
				t.Errorf("Start on %s = %v, want one that says what to do", data, err)
			}
		})
	}
}

func TestSecretsAndPortsSurviveARestartAndAreNobodyElsesToRead(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "state.json")
	first, err := openState(path)
	if err != nil {
		t.Fatal(err)
	}
	address, err := first.address("gateway-1 public")
	if err != nil {
		t.Fatal(err)
	}
	password := first.password("berth_gateway")
	if err := first.save(); err != nil {
		t.Fatal(err)
	}
	second, err := openState(path)
	if err != nil {
		t.Fatal(err)
	}
	again, err := second.address("gateway-1 public")
	if err != nil || again != address {
		t.Errorf("address after a restart = %q, %v, want %q", again, err, address)
	}
	if second.password("berth_gateway") != password {
		t.Error("the password changed")
	}
	if diff := cmp.Diff(first, second, cmp.AllowUnexported(state{})); diff != "" {
		t.Errorf("state (-first +second):\n%s", diff)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of %s = %v, %v, want 0600", path, info.Mode().Perm(), err)
	}
	if len(first.APIKey) != 64 || !strings.HasPrefix(first.APIKey, "e2b_") || len(first.ClusterSecret) < 32 {
		t.Errorf("API key %q, cluster secret of %d bytes: want e2b_ and 60 hex digits, at least 32", first.APIKey, len(first.ClusterSecret))
	}
}

func TestATakenPortIsLeftToItsOwner(t *testing.T) {
	t.Parallel()
	s, err := openState(filepath.Join(t.TempDir(), "state.json"))
	if err != nil {
		t.Fatal(err)
	}
	address, err := s.address("gateway-1 public")
	if err != nil {
		t.Fatal(err)
	}
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	other, err := s.address("gateway-1 public")
	if err != nil || other == address {
		t.Errorf("address while %s is taken = %q, %v, want another", address, other, err)
	}
}

func TestADamagedStateSaysWhatToDo(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "state.json")
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := openState(path); err == nil || !strings.Contains(err.Error(), "is damaged") {
		t.Errorf("openState = %v, want one that says it is damaged", err)
	}
}

func TestADatabaseURLGetsAnotherLogin(t *testing.T) {
	t.Parallel()
	for from, want := range map[string]string{
		"postgres://postgres@localhost:5432/berth?sslmode=disable": "postgres://l:p@localhost:5432/berth?sslmode=disable",
		"postgres://a:b@h/berth":                                   "postgres://l:p@h/berth",
		"postgres:///berth?host=%2Frun&user=postgres":              "postgres://l:p@/berth?host=%2Frun",
		"host=/run dbname=berth user=postgres":                     "host=/run dbname=berth user=postgres user=l password=p",
	} {
		if got, err := withLogin(from, "l", "p"); err != nil || got != want {
			t.Errorf("withLogin(%q) = %q, %v, want %q", from, got, err, want)
		}
	}
}

func TestLinesOfProcessesDoNotMix(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	l, err := newLogs(t.TempDir(), &out, false)
	if err != nil {
		t.Fatal(err)
	}
	a, errA := l.writer(gateway, "gateway-1")
	b, errB := l.writer(nodeagent, "node-1")
	if err := errors.Join(errA, errB); err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"one ", "two\nthree", "\n", "last"} {
		_, _ = a.Write([]byte(part))
		_, _ = b.Write([]byte("x\n"))
	}
	a.flush()
	if err := l.close(); err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		if rest, ok := strings.CutPrefix(line, "gateway-1   | "); ok {
			got = append(got, strings.TrimSuffix(rest, "\n"))
		} else if line != "node-1      | x\n" {
			t.Errorf("line %q is of neither", line)
		}
	}
	if diff := cmp.Diff([]string{"one two", "three", "last"}, got); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
	file, err := os.ReadFile(filepath.Join(l.dir, "gateway-1.log"))
	if err != nil || string(file) != "one two\nthree\nlast\n" {
		t.Errorf("log file = %q, %v", file, err)
	}
	if got := l.tailOf("gateway-1"); got != "  one two\n  three\n  last" {
		t.Errorf("tail = %q", got)
	}
}

// shell returns a stack whose processes are shell scripts, and the lines they write.
func shell(t *testing.T, noRestart bool) (*Stack, *lines) {
	t.Helper()
	out := &lines{arrived: make(chan string, 100)}
	l, err := newLogs(t.TempDir(), out, false)
	if err != nil {
		t.Fatal(err)
	}
	s := &Stack{
		o:    Options{Binary: "/bin/sh", NoRestart: noRestart, Log: slog.New(slog.DiscardHandler)},
		logs: l, spawn: newSpawner(),
	}
	t.Cleanup(func() {
		if err := s.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("Stop: %v", err)
		}
	})
	return s, out
}

type lines struct {
	mu      sync.Mutex
	arrived chan string
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.arrived <- strings.TrimSpace(string(p))
	return len(p), nil
}

func (l *lines) next(t *testing.T) string {
	t.Helper()
	select {
	case line := <-l.arrived:
		return line
	case <-time.After(20 * time.Second):
		t.Fatal("no line in 20 s")
		return ""
	}
}

// patient is a script that says its name and waits for a signal.
const patient = `trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.1 & wait $!; done`

func TestAProcessThatIsKilledIsStartedAgain(t *testing.T) {
	t.Parallel()
	s, out := shell(t, false)
	p := &process{kind: gateway, name: "gateway-1", args: []string{"-c", patient}}
	if err := s.launch(p); err != nil {
		t.Fatal(err)
	}
	pids := map[int]bool{}
	for range 3 {
		if line := out.next(t); line != "gateway-1   | up" {
			t.Fatalf("line = %q, want up", line)
		}
		pid, ended := p.present()
		if pid == 0 || pids[pid] {
			t.Fatalf("pid = %d after %v, want a new one", pid, pids)
		}
		pids[pid] = true
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		waittest.Receive(t, "the end of the killed process", ended)
	}
}

func TestWithNoRestartADeadProcessStaysDead(t *testing.T) {
	t.Parallel()
	s, out := shell(t, true)
	p := &process{kind: gateway, name: "gateway-1", args: []string{"-c", patient}}
	if err := s.launch(p); err != nil {
		t.Fatal(err)
	}
	out.next(t)
	pid, _ := p.present()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waittest.Receive(t, "the end of the killed process", p.over)
	if pid, _ := p.present(); pid != 0 {
		t.Errorf("pid after the kill = %d, want 0", pid)
	}
}

func TestStoppingAsksPolitelyAndEndsRestarts(t *testing.T) {
	t.Parallel()
	s, out := shell(t, false)
	polite := &process{kind: scheduler, name: "scheduler-1", args: []string{"-c", patient}}
	if err := s.launch(polite); err != nil {
		t.Fatal(err)
	}
	out.next(t)
	if err := s.stopAll(t.Context(), scheduler); err != nil {
		t.Errorf("stopAll = %v, want nil", err)
	}
	if line := out.next(t); line != "scheduler-1 | bye" {
		t.Errorf("last line = %q, want bye", line)
	}
	crashing := &process{kind: gateway, name: "gateway-1", args: []string{"-c", "exit 3"}}
	if err := s.launch(crashing); err != nil {
		t.Fatal(err)
	}
	if err := s.stopAll(t.Context(), gateway); err != nil {
		t.Errorf("stopAll of one that crashes again and again = %v, want nil", err)
	}
}

func TestWhatDoesNotStopIsKilledAndTold(t *testing.T) {
	t.Parallel()
	s, out := shell(t, false)
	stubborn := &process{kind: nodeagent, name: "node-1", args: []string{"-c", `trap '' TERM; echo up; while :; do sleep 0.1; done`}}
	if err := s.launch(stubborn); err != nil {
		t.Fatal(err)
	}
	out.next(t)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := s.stopAll(ctx, nodeagent); err == nil || !strings.Contains(err.Error(), "node-1 did not stop") {
		t.Errorf("stopAll = %v, want one that names the process", err)
	}
}

func TestAProcessThatEndsWhileItStartsIsAnErrorWithItsLastLines(t *testing.T) {
	t.Parallel()
	s, _ := shell(t, true)
	p := &process{kind: gateway, name: "gateway-1", ops: "127.0.0.1:1", args: []string{"-c", "echo no database >&2; exit 1"}}
	err := s.launchAll(t.Context(), []*process{p})
	if err == nil || err.Error() != "gateway-1 ended while it started:\n  no database" {
		t.Errorf("launchAll = %v, want one with the last line", err)
	}
}
