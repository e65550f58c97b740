package lifecycle_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"berth/pkg/lifecycle"
	"berth/pkg/waittest"
)

// stubbornVariable makes this test binary a process that ignores the end of its context.
const stubbornVariable = "BERTH_LIFECYCLE_TEST_STUBBORN"

func TestMain(m *testing.M) {
	if _, ok := os.LookupEnv(stubbornVariable); ok { //nolint:forbidigo // this binary is its own child here
		_ = lifecycle.Main(func(ctx context.Context) error {
			os.Stdout.WriteString("running\n")
			<-ctx.Done()
			os.Stdout.WriteString("stopping\n")
			select {} // never ends by itself
		})
		return
	}
	goleak.VerifyTestMain(m)
}

// journal records what parts do, in order.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, line)
}

func (j *journal) part(name string) lifecycle.Part {
	return lifecycle.Part{
		Name:  name,
		Start: func(context.Context, func(error)) error { j.add("start " + name); return nil },
		Stop:  func(context.Context) error { j.add("stop " + name); return nil },
	}
}

func TestPartsStopInReverseOfTheirStart(t *testing.T) {
	t.Parallel()
	var j journal
	ctx, cancel := context.WithCancel(t.Context())
	last := j.part("last")
	last.Start = func(context.Context, func(error)) error { j.add("start last"); cancel(); return nil }
	if err := lifecycle.Run(ctx, lifecycle.Options{}, j.part("first"), j.part("second"), last); err != nil {
		t.Fatalf("Run = %v, want nil", err)
	}
	want := []string{"start first", "start second", "start last", "stop last", "stop second", "stop first"}
	if diff := cmp.Diff(want, j.lines); diff != "" {
		t.Errorf("order of starts and stops (-want +got):\n%s", diff)
	}
}

func TestAFailedStartStopsOnlyWhatHadStarted(t *testing.T) {
	t.Parallel()
	var j journal
	broken := errors.New("no such disk")
	bad := lifecycle.Part{
		Name:  "bad",
		Start: func(context.Context, func(error)) error { return broken },
		Stop:  func(context.Context) error { j.add("stop bad"); return nil },
	}
	err := lifecycle.Run(t.Context(), lifecycle.Options{}, j.part("first"), bad, j.part("never"))
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), "start bad") {
		t.Errorf("Run = %v, want an error that names the part and wraps %v", err, broken)
	}
	if diff := cmp.Diff([]string{"start first", "stop first"}, j.lines); diff != "" {
		t.Errorf("order of starts and stops (-want +got):\n%s", diff)
	}
}

func TestALoopThatEndsByItselfEndsTheProcess(t *testing.T) {
	t.Parallel()
	lost := errors.New("connection lost")
	tests := map[string]struct {
		run  func(context.Context) error
		want string
	}{
		"with an error":    {run: func(context.Context) error { return lost }, want: "follow: connection lost"},
		"without an error": {run: func(context.Context) error { return nil }, want: "follow: ended by itself"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var j journal
			err := lifecycle.Run(t.Context(), lifecycle.Options{}, j.part("pool"), lifecycle.Loop("follow", tt.run))
			if err == nil || err.Error() != tt.want {
				t.Errorf("Run = %v, want %q", err, tt.want)
			}
			if diff := cmp.Diff([]string{"start pool", "stop pool"}, j.lines); diff != "" {
				t.Errorf("order of starts and stops (-want +got):\n%s", diff)
			}
		})
	}
}

func TestReadinessGoesOffBeforeThePartsStop(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		health := lifecycle.NewHealth()
		ctx, cancel := context.WithCancel(t.Context())
		var stoppedAfter time.Duration
		var asked time.Time
		part := lifecycle.Part{
			Name: "server",
			Start: func(context.Context, func(error)) error {
				if err := health.Ready(ctx); err == nil {
					t.Error("Ready while parts start = nil, want an error")
				}
				return nil
			},
			Stop: func(context.Context) error { stoppedAfter = time.Since(asked); return nil },
		}
		result := make(chan error, 1)
		go func() {
			result <- lifecycle.Run(ctx, lifecycle.Options{Health: health, DrainDelay: 5 * time.Second}, part)
		}()
		synctest.Wait()
		if err := health.Ready(ctx); err != nil {
			t.Errorf("Ready once started = %v, want nil", err)
		}
		asked = time.Now()
		cancel()
		synctest.Wait()
		if err := health.Ready(t.Context()); err == nil || !health.Draining() {
			t.Errorf("Ready, Draining during the drain delay = %v, %t, want an error and true", err, health.Draining())
		}
		if err := <-result; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
		if stoppedAfter != 5*time.Second {
			t.Errorf("part stopped %v after the signal, want 5s", stoppedAfter)
		}
	})
}

func TestAPartThatDoesNotStopCostsAnErrorAndNotTheOthersStop(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var j journal
		ctx, cancel := context.WithCancel(t.Context())
		release := make(chan struct{})
		stuck := lifecycle.Loop("stuck", func(context.Context) error { <-release; return nil })
		cancel()
		err := lifecycle.Run(ctx, lifecycle.Options{StopTimeout: time.Second}, stuck)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "stop stuck") {
			t.Errorf("Run = %v, want one that names the stuck part and is DeadlineExceeded", err)
		}

		ctx, cancel = context.WithCancel(t.Context())
		result := make(chan error, 1)
		go func() {
			result <- lifecycle.Run(ctx, lifecycle.Options{StopTimeout: time.Second}, j.part("pool"),
				lifecycle.Loop("stuck", func(context.Context) error { <-release; return nil }))
		}()
		synctest.Wait()
		cancel()
		if err := <-result; !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Run = %v, want DeadlineExceeded", err)
		}
		if diff := cmp.Diff([]string{"start pool", "stop pool"}, j.lines); diff != "" {
			t.Errorf("order of starts and stops (-want +got):\n%s", diff)
		}
		close(release)
	})
}

func TestAnOccupiedPortIsNamedWithItsPartAndWhatToDo(t *testing.T) {
	t.Parallel()
	occupied := listen(t)
	err := lifecycle.Run(t.Context(), lifecycle.Options{},
		lifecycle.HTTP("ops", occupied.Addr().String(), http.NotFoundHandler()))
	if !errors.Is(err, syscall.EADDRINUSE) {
		t.Fatalf("Run = %v, want EADDRINUSE", err)
	}
	want := fmt.Sprintf("start ops: ops cannot listen on %s: address already in use; "+
		"end the process that has it or choose another address", occupied.Addr())
	if err.Error() != want {
		t.Errorf("Run = %q, want %q", err, want)
	}
}

func TestAnHTTPPartFinishesOpenExchangesWhenItStops(t *testing.T) {
	t.Parallel()
	entered, finish := make(chan struct{}), make(chan struct{})
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(entered)
		<-finish
		_, _ = io.WriteString(w, "done")
	})
	addr := freeAddr(t)
	ctx, cancel := context.WithCancel(t.Context())
	ready := lifecycle.Part{Name: "ready", Start: func(context.Context, func(error)) error { return nil }}
	started := make(chan struct{})
	ready.Start = func(context.Context, func(error)) error { close(started); return nil }
	result := make(chan error, 1)
	go func() {
		result <- lifecycle.Run(ctx, lifecycle.Options{}, lifecycle.HTTP("public", addr, handler), ready)
	}()
	waittest.Receive(t, "the start", started)

	type answer struct {
		body string
		err  error
	}
	got := make(chan answer, 1)
	go func() {
		body, err := get(t.Context(), "http://"+addr+"/")
		got <- answer{body, err}
	}()
	waittest.Receive(t, "the exchange to be open", entered)
	cancel()
	// The listener closes first; only then may the open exchange end.
	waitRefused(t, addr)
	close(finish)
	if a := waittest.Receive(t, "the answer", got); a.err != nil || a.body != "done" {
		t.Errorf("open exchange = %q, %v, want %q", a.body, a.err, "done")
	}
	if err := <-result; err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
}

func TestHealthAnswersInJSON(t *testing.T) {
	t.Parallel()
	health := lifecycle.NewHealth()
	health.Check("database", func(context.Context) error { return nil })
	server := serve(t, health.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "metric 1\n")
	})))

	expect := func(path string, status int, want map[string]any) {
		t.Helper()
		gotStatus, body := fetch(t, server+path)
		var got map[string]any
		if err := json.Unmarshal([]byte(body), &got); err != nil {
			t.Fatalf("GET %s: body %q is not JSON: %v", path, body, err)
		}
		if gotStatus != status {
			t.Errorf("GET %s = %d, want %d", path, gotStatus, status)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("GET %s (-want +got):\n%s", path, diff)
		}
	}
	expect("/healthz", 200, map[string]any{"status": "ok"})
	expect("/readyz", 200, map[string]any{"status": "ok"})

	health.Check("feed", func(context.Context) error { return errors.New("not read to its end") })
	expect("/healthz", 200, map[string]any{"status": "ok"})
	expect("/readyz", 503, map[string]any{
		"status": "not ready", "checks": map[string]any{"feed": "not read to its end"},
	})

	health.Drain()
	expect("/healthz", 503, map[string]any{"status": "draining"})
	expect("/readyz", 503, map[string]any{"status": "not ready", "checks": map[string]any{"process": "draining"}})

	if status, body := fetch(t, server+"/metrics"); status != 200 || body != "metric 1\n" {
		t.Errorf("GET /metrics = %d %q, want 200 and the metrics", status, body)
	}
}

func TestACheckThatHangsMakesTheProcessUnreadyInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		health := lifecycle.NewHealth()
		release := make(chan struct{})
		health.Check("database", func(context.Context) error { <-release; return nil })
		begun := time.Now()
		err := health.Ready(t.Context())
		if err == nil || !strings.Contains(err.Error(), "database: no answer in time") {
			t.Errorf("Ready = %v, want one that names the hanging check", err)
		}
		if took := time.Since(begun); took != 2*time.Second {
			t.Errorf("Ready took %v, want 2s", took)
		}
		close(release)
	})
}

func TestASecondSignalEndsTheProcessAtOnce(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), stubbornVariable+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for _, want := range []string{"running", "stopping"} {
		if !lines.Scan() || lines.Text() != want {
			t.Fatalf("child said %q, want %q", lines.Text(), want)
		}
		if want == "running" {
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
		}
	}
	// Whether the handler is already gone is not visible from outside: repeat until it is.
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			_ = cmd.Process.Signal(syscall.SIGTERM)
		case err := <-ended:
			exit, ok := errors.AsType[*exec.ExitError](err)
			if !ok {
				t.Fatalf("child ended with %v, want an exit error", err)
			}
			if status := exit.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGTERM {
				t.Errorf("child ended with %v, want SIGTERM", err)
			}
			return
		}
	}
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func freeAddr(t *testing.T) string {
	t.Helper()
	l := listen(t)
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

// serve serves h through the package itself and returns the base URL.
func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	addr := freeAddr(t)
	ctx, cancel := context.WithCancel(t.Context())
	started := make(chan struct{})
	last := lifecycle.Part{Name: "started", Start: func(context.Context, func(error)) error { close(started); return nil }}
	result := make(chan error, 1)
	go func() { result <- lifecycle.Run(ctx, lifecycle.Options{}, lifecycle.HTTP("test", addr, h), last) }()
	select {
	case <-started:
	case err := <-result:
		t.Fatalf("serve: %v", err)
	}
	t.Cleanup(func() {
		cancel()
		if err := <-result; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
	return "http://" + addr
}

func fetch(t *testing.T, url string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// client keeps no connection open, which would count as a leak.
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

func get(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

func waitRefused(t *testing.T, addr string) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr)
		if errors.Is(err, syscall.ECONNREFUSED) {
			return
		}
		if err == nil {
			_ = conn.Close()
		} else if !errors.Is(err, syscall.ECONNRESET) { // reset: it closed while we were in its queue
			t.Fatalf("dial %s: %v", addr, err)
		}
		<-tick.C
	}
}
