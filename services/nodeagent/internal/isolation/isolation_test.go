package isolation

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/pkg/waittest"
)

// userVariable marks a run of this test binary as an ordinary user.
const userVariable = "BERTH_TEST_ORDINARY_USER"

func asOrdinaryUser() bool { return os.Getenv(userVariable) != "" } //nolint:forbidigo // set by the parent test

const nobody = 65534

func needBubblewrap(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("bwrap"); err != nil {
		t.Skip("bubblewrap is not installed on this machine; .ci/run installs it")
	}
}

// newBackend returns a backend of its own for t: own folder, own cgroups.
func newBackend(t testing.TB, change ...func(*Config)) *Backend {
	t.Helper()
	needBubblewrap(t)
	cfg := Config{
		Mode: "bubblewrap", Dir: t.TempDir(), Name: "berth-test-" + strconv.Itoa(os.Getpid()) + "-" + strings.ToLower(t.Name()[4:min(len(t.Name()), 20)]),
		UID: nobody, GID: nobody, MaxOpenFiles: 256, MaxProcesses: 100, Log: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for _, f := range change {
		f(&cfg)
	}
	b, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	t.Cleanup(b.Close)
	return b
}

// output collects what a sandbox prints, and lets a test wait for it.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
	grew chan struct{}
}

func newOutput() *output { return &output{grew: make(chan struct{}, 1)} }

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case o.grew <- struct{}{}:
	default:
	}
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

func (o *output) wait(t testing.TB, want string) {
	t.Helper()
	limit := time.After(20 * time.Second)
	for !strings.Contains(o.String(), want) {
		select {
		case <-o.grew:
		case <-limit:
			t.Fatalf("output never had %q; it is %q", want, o.String())
		}
	}
}

func start(t testing.TB, b *Backend, spec Spec) *Sandbox {
	t.Helper()
	spec.Dir = t.TempDir()
	spec.Workspace = filepath.Join(spec.Dir, "workspace")
	if spec.Output == nil {
		spec.Output = io.Discard
	}
	s, err := b.Start(t.Context(), spec)
	if err != nil {
		t.Fatalf("Start(%s): %v", spec.ID, err)
	}
	t.Cleanup(func() {
		if err := s.Kill(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("Kill(%s): %v", spec.ID, err)
		}
	})
	return s
}

// get asks the sandbox's port and waits for the server to come up.
func get(t testing.TB, s *Sandbox, port int, target string) string {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		conn, err := s.Dial(t.Context(), port)
		if errors.Is(err, ErrRefused) && time.Now().Before(deadline) {
			continue // still starting
		}
		if err != nil {
			t.Fatalf("Dial(%d): %v", port, err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", target)
		answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatalf("read answer: %v", err)
		}
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatalf("read body: %v", err)
		}
		return string(body)
	}
}

func TestTwoSandboxesListenOnOnePort(t *testing.T) {
	b := newBackend(t)
	one, two := start(t, b, Spec{ID: "one", Builtin: "echo"}), start(t, b, Spec{ID: "two", Builtin: "echo"})
	for id, s := range map[string]*Sandbox{"one": one, "two": two} {
		var dump struct{ Sandbox, Target string }
		if err := json.Unmarshal([]byte(get(t, s, 3000, "/a%2fb?x")), &dump); err != nil {
			t.Fatalf("decode: %v", err)
		}
		if dump.Sandbox != id || dump.Target != "/a%2fb?x" {
			t.Errorf("port 3000 of %s answered as %+v", id, dump)
		}
	}
}

func TestAPortNobodyListensOnIsRefused(t *testing.T) {
	b := newBackend(t)
	s := start(t, b, Spec{ID: "quiet", Builtin: "shell"})
	if _, err := s.Dial(t.Context(), 4444); !errors.Is(err, ErrRefused) {
		t.Errorf("Dial(4444) = %v, want ErrRefused", err)
	}
}

func TestAnEndedSandboxIsGone(t *testing.T) {
	b := newBackend(t)
	s := start(t, b, Spec{ID: "gone", Builtin: "echo"})
	if err := s.Kill(t.Context()); err != nil {
		t.Fatalf("Kill: %v", err)
	}
	if _, err := s.Dial(t.Context(), 3000); !errors.Is(err, ErrGone) {
		t.Errorf("Dial = %v, want ErrGone", err)
	}
}

// inside runs a shell script in a sandbox and returns what it printed.
func inside(t testing.TB, b *Backend, script string) string {
	t.Helper()
	out := newOutput()
	s := start(t, b, Spec{ID: "script", Argv: []string{"sh", "-c", script}, Output: out})
	select {
	case <-s.Exited():
	case <-time.After(30 * time.Second):
		t.Fatalf("script did not end; it printed %q", out)
	}
	if err := s.Kill(t.Context()); err != nil { // which also flushes what it printed
		t.Fatalf("Kill: %v", err)
	}
	return out.String()
}

func TestWhatASandboxSees(t *testing.T) {
	b := newBackend(t)
	cases := map[string]struct{ script, want string }{
		"it is an ordinary user":                      {`id -u`, "1000\n"},
		"it has no capability":                        {`grep CapEff /proc/self/status | tr -d '\t'`, "CapEff:0000000000000000\n"},
		"it gains no capability by running programs":  {`grep NoNewPrivs /proc/self/status | tr -d '\t'`, "NoNewPrivs:1\n"},
		"its network is a loopback and nothing else":  {`grep -c : /proc/net/dev`, "1\n"},
		"it sees its own processes only":              {`ls /proc | grep -c '^[0-9]' | { read n; [ $n -lt 10 ] && echo few; }`, "few\n"},
		"the init is pid 1":                           {`tr '\0' ' ' < /proc/1/cmdline`, "/.berth/berth berth-sandbox-init "},
		"it starts in its workspace and may write it": {`pwd; echo x > f && cat f`, "/workspace\nx\n"},
		"system folders are read-only":                {`touch /usr/x 2>/dev/null || echo no; touch /x 2>/dev/null || echo no`, "no\nno\n"},
		"it has a place for temporary files":          {`touch /tmp/x /var/tmp/x /dev/shm/x && echo yes`, "yes\n"},
		"the machine's secrets are not there":         {`ls /root /home /etc/shadow 2>/dev/null; ls /etc | grep -c shadow`, "0\n"},
		"its open files are limited":                  {`ulimit -n; ulimit -Hn`, "256\n256\n"},
		"it has a name of its own":                    {`cat /proc/sys/kernel/hostname`, "script\n"},
		"it inherits no descriptor of the agent":      {`ls /proc/$$/fd; :`, "0\n1\n2\n"}, // no pipe, no redirection: the shell holds their ends for a moment
		"its environment is its own":                  {`env | cut -d= -f1 | sort | tr '\n' ' '`, "HOME LANG PATH PWD SANDBOX_ID USER "},
		"it cannot trace the init":                    {`cat /proc/1/environ 2>/dev/null || echo no`, "no\n"},
		"its processes end when they are asked to":    {`exec 2>&-; sleep 100 & kill $!; wait $!; echo $?; sleep 100 & kill -HUP $!; wait $!; echo $?`, "143\n129\n"},
		"it cannot signal the init to death":          {`kill -9 1 2>/dev/null; echo here`, "here\n"},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			if got := inside(t, b, tt.script); got != tt.want {
				t.Errorf("%s printed %q, want %q", tt.script, got, tt.want)
			}
		})
	}
}

func TestTheAgentsGroupsStayOutside(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can join groups, and only root can leave them")
	}
	before, err := syscall.Getgroups()
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setgroups([]int{4, 42}); err != nil { // adm and shadow
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Setgroups(before); err != nil {
			t.Error(err)
		}
	})
	b := newBackend(t)
	if b.mode != Root {
		t.Skipf("sandboxes run in %s mode on this machine", b.mode)
	}
	if got := inside(t, b, `id -G; grep Groups /proc/1/status | tr -d '\t '`); got != "1000\nGroups:\n" {
		t.Errorf("a sandbox of an agent with groups 4 and 42 has %q", got)
	}
}

func TestOfAVariableTheLastValueCounts(t *testing.T) {
	b := newBackend(t)
	out := newOutput()
	s := start(t, b, Spec{
		ID: "env", Argv: []string{"cat", "/proc/self/environ"}, Output: out,
		Env: []string{"A=template", "HOME=/tmp", "A=client"},
	})
	select {
	case <-s.Exited():
	case <-time.After(30 * time.Second):
		t.Fatalf("cat did not end; it printed %q", out)
	}
	if err := s.Kill(t.Context()); err != nil { // which also flushes what it printed
		t.Fatalf("Kill: %v", err)
	}
	want := []string{"PATH=" + defaultPath, "HOME=/tmp", "USER=user", "LANG=C.UTF-8", "SANDBOX_ID=env", "A=client"}
	got := strings.Split(strings.TrimSuffix(out.String(), "\x00"), "\x00")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("environment (-want +got):\n%s", diff)
	}
}

func TestProcessesAreLimited(t *testing.T) {
	script := `i=0; while [ $i -lt 300 ]; do sleep 60 & i=$((i+1)); done 2>/dev/null; ls /proc | grep -c '^[0-9]'`
	ways := map[string]func(*Backend){
		"by what the machine offers": func(*Backend) {},
		"by rlimit":                  func(b *Backend) { b.pids = hierarchy{} },
	}
	for name, choose := range ways {
		t.Run(name, func(t *testing.T) {
			b := newBackend(t)
			choose(b)
			out := newOutput()
			s := start(t, b, Spec{ID: "forks", Argv: []string{"sh", "-c", script}, Output: out})
			select {
			case <-s.Exited():
			case <-time.After(30 * time.Second):
				// A shell that cannot fork at all may give up without its last command; then it has exited.
				t.Fatal("the shell did not end")
			}
			all, err := processes()
			if err != nil {
				t.Fatal(err)
			}
			if got := len(family(s.PID(), all)); got > 100 || got < 20 {
				t.Errorf("%d processes run inside, want up to 100 and most of them", got)
			}
		})
	}
}

func TestPauseFreezesEverythingAndResumeThaws(t *testing.T) {
	ways := map[string]func(*Backend){
		"with what the machine offers": func(*Backend) {},
		"with signals":                 func(b *Backend) { b.freezer = hierarchy{} },
	}
	for name, choose := range ways {
		t.Run(name, func(t *testing.T) {
			b := newBackend(t)
			choose(b)
			out := newOutput()
			s := start(t, b, Spec{
				ID:     "ticks",
				Argv:   []string{"sh", "-c", `(while :; do echo tick >> log; sleep 0.01; done) & for i in 1 2 3; do (while :; do /bin/true; done) & done; echo up; wait`},
				Output: out,
			})
			out.wait(t, "up")
			for range 3 {
				if err := s.Pause(t.Context()); err != nil {
					t.Fatalf("Pause: %v", err)
				}
				before := cpuTicks(t, s)
				if err := s.Pause(t.Context()); err != nil {
					t.Fatalf("second Pause: %v", err)
				}
				if after := cpuTicks(t, s); !cmp.Equal(before, after) {
					t.Errorf("processes ran while paused (-before +after):\n%s", cmp.Diff(before, after))
				}
				if err := s.Resume(t.Context()); err != nil {
					t.Fatalf("Resume: %v", err)
				}
				waitRunning(t, s, before)
			}
		})
	}
}

// cpuTicks returns the context switches of every process inside: a frozen process has none.
func cpuTicks(t testing.TB, s *Sandbox) map[int]string {
	t.Helper()
	all, err := processes()
	if err != nil {
		t.Fatal(err)
	}
	ticks := make(map[int]string)
	for _, p := range family(s.PID(), all) {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.pid))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(status)) {
			if strings.HasPrefix(line, "voluntary_ctxt_switches") {
				ticks[p.pid] = strings.TrimSpace(line)
			}
		}
	}
	return ticks
}

func waitRunning(t testing.TB, s *Sandbox, frozen map[int]string) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for cmp.Equal(frozen, cpuTicks(t, s)) {
		if time.Now().After(deadline) {
			t.Fatal("nothing runs after Resume")
		}
	}
}

func TestAPausedSandboxCanBeKilled(t *testing.T) {
	for name, choose := range map[string]func(*Backend){
		"frozen by a cgroup": func(*Backend) {},
		"stopped by signals": func(b *Backend) { b.freezer = hierarchy{} },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBackend(t)
			choose(b)
			s := start(t, b, Spec{ID: "paused", Builtin: "echo"})
			if err := s.Pause(t.Context()); err != nil {
				t.Fatalf("Pause: %v", err)
			}
			if err := s.Kill(t.Context()); err != nil {
				t.Fatalf("Kill: %v", err)
			}
			if err := syscall.Kill(s.PID(), 0); err != syscall.ESRCH {
				t.Errorf("init is still there: %v", err)
			}
		})
	}
}

func TestACommandThatIsNotThereIsAnError(t *testing.T) {
	b := newBackend(t)
	dir := t.TempDir()
	_, err := b.Start(t.Context(), Spec{ID: "none", Dir: dir, Workspace: filepath.Join(dir, "w"), Argv: []string{"no-such-program"}, Output: io.Discard})
	if err == nil || !strings.Contains(err.Error(), "no-such-program: not found in") {
		t.Errorf("Start = %v, want an error that names the program", err)
	}
}

func TestTheCommandsEndIsTold(t *testing.T) {
	b := newBackend(t)
	s := start(t, b, Spec{ID: "ends", Argv: []string{"sh", "-c", "exit 7"}})
	waittest.Receive(t, "the end of the command", s.Exited())
	if s.Status() != 7 {
		t.Errorf("Status() = %d, want 7", s.Status())
	}
	select {
	case <-s.Done():
		t.Error("the sandbox ended with its command")
	default:
	}
}

func TestAClosedBackendLeavesNoCgroup(t *testing.T) {
	b := newBackend(t)
	s := start(t, b, Spec{ID: "one", Builtin: "shell"})
	if err := s.Kill(t.Context()); err != nil {
		t.Fatalf("Kill: %v", err)
	}
	b.Close()
	for _, m := range readCgroupMounts() {
		if left := filepath.Join(m.own, b.cfg.Name); exists(left) {
			t.Errorf("%s is left", left)
		}
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func TestAMissingBubblewrapNamesThePackage(t *testing.T) {
	_, err := New(t.Context(), Config{Mode: "bubblewrap", Bubblewrap: "no-such-bwrap", Dir: t.TempDir(), Name: "x", Log: slog.New(slog.DiscardHandler)})
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "apt-get install bubblewrap") {
		t.Errorf("New = %v, want ErrUnavailable that names the package", err)
	}
}

// TestAsAnOrdinaryUser runs the tests above again without root.
func TestAsAnOrdinaryUser(t *testing.T) {
	needBubblewrap(t)
	if asOrdinaryUser() || os.Getuid() != 0 {
		t.Skip("this run is an ordinary user's already")
	}
	dir, err := os.MkdirTemp("", "berth-user-") //nolint:usetesting // the parent of t.TempDir only root may enter
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	binary, err := copySelf(dir)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), binary, "-test.run", "^Test", "-test.count=1")
	cmd.Dir = dir
	cmd.Env = []string{userVariable + "=1", "PATH=" + defaultPath, "TMPDIR=" + dir, "HOME=" + dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("as uid %d: %v\n%s", nobody, err, out)
	}
}
