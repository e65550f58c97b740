package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	readyLimit = 2 * time.Minute
	stopLimit  = time.Minute
	readyPoll  = 50 * time.Millisecond
)

// stack is a running `berth dev`: what its ready file says, and the tokens from its data folder.
type stack struct {
	Gateways   []string `json:"gateways"`
	Schedulers []struct {
		Twirp string `json:"twirp"`
		GRPC  string `json:"grpc"`
		PID   int    `json:"pid"`
	} `json:"schedulers"`
	DatabaseURL string         `json:"database_url"`
	APIKey      string         `json:"api_key"`
	PIDs        map[string]int `json:"pids"`

	NodeToken    string `json:"-"`
	GatewayToken string `json:"-"`
}

// start runs bin/berth dev with args until b ends. Its database is durable, for a benchmark of commits
// without flushes says nothing.
func start(b *testing.B, args ...string) *stack {
	b.Helper()
	binary, err := filepath.Abs("../../../bin/berth")
	if err != nil {
		b.Fatal(err)
	}
	if _, err := os.Stat(binary); err != nil {
		b.Fatalf("%v; make build first", err)
	}
	dir := b.TempDir()
	openFor(b, dir)
	data, ready := filepath.Join(dir, "data"), filepath.Join(dir, "ready.json")
	cmd := exec.Command(binary, append([]string{"dev", "--data", data, "--ready-file", ready, "--log-level", "warn"}, args...)...)
	var log syncBuffer
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	b.Cleanup(func() {
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil && !errors.Is(err, os.ErrProcessDone) {
			b.Errorf("stop the stack: %v", err)
		}
		select {
		case err := <-ended:
			if err != nil {
				b.Errorf("the stack ended with %v:\n%s", err, &log)
			}
		case <-time.After(stopLimit):
			b.Errorf("the stack did not end within %s", stopLimit)
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			<-ended
		}
	})

	ctx, cancel := context.WithTimeout(b.Context(), readyLimit)
	defer cancel()
	ticker := time.NewTicker(readyPoll)
	defer ticker.Stop()
	for {
		if _, err := os.Stat(ready); err == nil {
			break
		} else if !errors.Is(err, fs.ErrNotExist) {
			b.Fatal(err)
		}
		select {
		case err := <-ended:
			ended <- nil // told here
			b.Fatalf("the stack ended before it was ready: %v\n%s", err, &log)
		case <-ctx.Done():
			b.Fatalf("the stack was not ready within %s:\n%s", readyLimit, &log)
		case <-ticker.C:
		}
	}
	var s stack
	readJSON(b, ready, &s)
	var secrets struct {
		NodeToken    string `json:"node_token"`
		GatewayToken string `json:"gateway_token"`
	}
	readJSON(b, filepath.Join(data, "state.json"), &secrets)
	s.NodeToken, s.GatewayToken = secrets.NodeToken, secrets.GatewayToken
	return &s
}

// openFor lets the user that PostgreSQL runs as, where this is root, through the folders of the test.
func openFor(b *testing.B, dir string) {
	b.Helper()
	for at := dir; at != filepath.Dir(at) && at != os.TempDir(); at = filepath.Dir(at) {
		if err := os.Chmod(at, 0o755); err != nil {
			b.Fatal(err)
		}
	}
}

func readJSON(b *testing.B, name string, into any) {
	b.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		b.Fatal(err)
	}
	if err := json.Unmarshal(text, into); err != nil {
		b.Fatalf("%s: %v", name, err)
	}
}

// syncBuffer is a log that two streams write.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// quantile returns the value below which the share q of the values lies. It sorts them.
func quantile(values []time.Duration, q float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[min(int(float64(len(values))*q), len(values)-1)]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// median returns the middle of a few rates. It sorts them.
func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

// number returns the number that follows before in the output of another program.
func number(text, before string) (float64, bool) {
	_, rest, found := strings.Cut(text, before)
	if !found {
		return 0, false
	}
	word, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
	n, err := strconv.ParseFloat(word, 64)
	return n, err == nil
}
