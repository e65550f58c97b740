package sandboxes

import (
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/services/nodeagent/internal/journal"
)

func TestLimitsSayWhatThereIsNoRoomFor(t *testing.T) {
	t.Parallel()
	limits := Limits{Sandboxes: 3, CPUMillis: 1000, MemoryBytes: 100}
	cases := map[string]struct {
		usage Usage
		asked State
		want  string // "" fits
	}{
		"an empty node":                 {Usage{}, State{CPUMillis: 1000, MemoryBytes: 100}, ""},
		"one more than its sandboxes":   {Usage{Running: 1, Paused: 1, Starting: 1}, State{}, "3 of 3 sandboxes"},
		"more cores than are left":      {Usage{Running: 1, CPUMillis: 500}, State{CPUMillis: 501}, "500 of 1000 thousandths of a core, 501 more are asked for"},
		"paused ones keep their cores":  {Usage{Paused: 1, PausedCPUMillis: 1000}, State{CPUMillis: 1}, "1000 of 1000 thousandths of a core, 1 more are asked for"},
		"more memory than is left":      {Usage{Running: 1, MemoryBytes: 60, PausedMemoryBytes: 40}, State{MemoryBytes: 1}, "100 of 100 bytes of memory, 1 more are asked for"},
		"exactly what is left":          {Usage{Running: 1, CPUMillis: 500, MemoryBytes: 50}, State{CPUMillis: 500, MemoryBytes: 50}, ""},
		"a limit of nothing limits not": {Usage{}, State{CPUMillis: 1}, ""},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := limits.refuses(tt.usage, tt.asked); got != tt.want {
				t.Errorf("refuses(%+v, %+v) = %q, want %q", tt.usage, tt.asked, got, tt.want)
			}
		})
	}
	if got := (Limits{}).refuses(Usage{Running: 1000, CPUMillis: 1 << 40}, State{CPUMillis: 1 << 40}); got != "" {
		t.Errorf("no limits refuse: %q", got)
	}
}

func TestACreateThatTheStopOvertookComesToNothing(t *testing.T) {
	t.Parallel()
	j, err := journal.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	m := New(Deps{
		Dir: t.TempDir(), Journal: j, Fences: journal.NewFences(j, time.Hour), Log: slog.New(slog.DiscardHandler),
		Answer: func(View) (json.RawMessage, error) { return json.RawMessage(`{}`), nil },
	})
	if err := m.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := m.make(t.Context(), &entry{id: "late", created: make(chan struct{})}); !errors.Is(err, ErrClosing) {
		t.Errorf("make after Close = %v, want ErrClosing", err)
	}
	if r, found := j.Get("late"); found {
		t.Errorf("the journal has %+v", r)
	}
}

func TestOutputIsKeptWithinItsSize(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "output.log")
	out, err := openOutput(path)
	if err != nil {
		t.Fatal(err)
	}
	line := strings.Repeat("x", 1000) + "\n"
	for range 5000 {
		if n, err := out.Write([]byte(line)); n != len(line) || err != nil {
			t.Fatalf("Write = %d, %v", n, err)
		}
	}
	if _, err := out.Write([]byte("the last line\n")); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	var total int64
	for _, p := range []string{path, path + ".1"} {
		info, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		total += info.Size()
	}
	if total > 2*maxOutputBytes || total < maxOutputBytes {
		t.Errorf("%d bytes are kept, want up to %d", total, 2*maxOutputBytes)
	}
	text, err := os.ReadFile(path)
	if err != nil || !strings.HasSuffix(string(text), "the last line\n") {
		t.Errorf("the file does not end with the last line: %v", err)
	}
	if n, err := out.Write([]byte("after the end")); n != 13 || err != nil {
		t.Errorf("Write after Close = %d, %v; a command must not die of it", n, err)
	}
}

func TestFoldersTheirOwnerClosedAreRemoved(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "a")
	if err := os.MkdirAll(filepath.Join(dir, "b", "c"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(dir, "b"), 0); err != nil {
		t.Fatal(err)
	}
	if err := removeAll(dir); err != nil {
		t.Errorf("removeAll: %v", err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("it is still there: %v", err)
	}
}
