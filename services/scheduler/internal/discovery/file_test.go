package discovery

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"berth/services/internal/node"
	"berth/services/scheduler/internal/nodes"
)

// follower follows a file whose lines are node ids; a line "bad" is a mistake.
type follower struct {
	*File
	t       *testing.T
	dir     string
	mu      sync.Mutex // guards the next four
	applied []string   // lists, in order
	broken  error      // of applying
	beside  error      // of loading, for a reason that is not in the file
	meeting func()     // called before the file is loaded; nil: nothing
	logs    *logs
}

func newFollower(t *testing.T, text string) *follower {
	t.Helper()
	f := &follower{t: t, dir: t.TempDir(), logs: &logs{}}
	f.write(text)
	path := filepath.Join(f.dir, "nodes")
	load := func() ([]nodes.StaticNode, error) {
		var beside error
		meet := func() {}
		f.locked(func() {
			beside = f.beside
			if f.meeting != nil {
				meet, f.meeting = f.meeting, nil
			}
		})
		if beside != nil {
			return nil, beside
		}
		meet()
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		var list []nodes.StaticNode
		for id := range strings.FieldsSeq(string(text)) {
			if id == "bad" {
				return nil, errors.New("line 7: bad")
			}
			list = append(list, nodes.StaticNode{ID: node.ID(id), Endpoint: "http://" + id})
		}
		return list, nil
	}
	before, err := load()
	if err != nil {
		t.Fatal(err)
	}
	f.File = NewFile(path, Reloading{Applied: before, Load: load, Apply: func(_ context.Context, list []nodes.StaticNode) error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.broken != nil {
			return f.broken
		}
		ids := make([]string, len(list))
		for i, n := range list {
			ids[i] = string(n.ID)
		}
		f.applied = append(f.applied, strings.Join(ids, " "))
		return nil
	}}, slog.New(slog.NewTextHandler(f.logs, nil)), NewMetrics(prometheus.NewRegistry(), len(before)))
	return f
}

// locked lets the test and the follower's own goroutine take turns.
func (f *follower) locked(turn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	turn()
}

// write changes the file as a ConfigMap changes: the name is a link into a folder, which is a link.
func (f *follower) write(text string) {
	f.t.Helper()
	must := func(err error) {
		f.t.Helper()
		if err != nil {
			f.t.Fatal(err)
		}
	}
	version, err := os.MkdirTemp(f.dir, "..version")
	must(err)
	must(os.WriteFile(filepath.Join(version, "nodes"), []byte(text), 0o600))
	data, next := filepath.Join(f.dir, "..data"), filepath.Join(f.dir, "..next")
	must(os.Symlink(version, next))
	must(os.Rename(next, data))
	if _, err := os.Lstat(filepath.Join(f.dir, "nodes")); err != nil {
		must(os.Symlink(filepath.Join("..data", "nodes"), filepath.Join(f.dir, "nodes")))
	}
}

// after lets the time of two looks pass, and compares what was applied, what fails, and what was logged as an error.
func (f *follower) after(what string, applied []string, failing float64, errs int) {
	f.t.Helper()
	for range 2 {
		if sleep(f.t.Context(), fileEvery) != nil {
			f.t.Fatal("the test ended")
		}
	}
	synctest.Wait()
	f.locked(func() {
		if diff := cmp.Diff(applied, f.applied); diff != "" {
			f.t.Errorf("applied after %s (-want +got):\n%s", what, diff)
		}
	})
	if got := testutil.ToFloat64(f.metrics.failing.WithLabelValues(sourceStatic)); got != failing {
		f.t.Errorf("failing after %s = %v, want %v", what, got, failing)
	}
	if got := f.logs.count("level=ERROR"); got != errs {
		f.t.Errorf("%d errors after %s, want %d:\n%s", got, what, errs, &f.logs.text)
	}
}

func TestAChangedFileIsAppliedAndABadOneIsNot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFollower(t, "a b")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- f.Run(ctx) }()

		f.after("nothing", nil, 0, 0)
		f.write("a b\n")
		f.after("a change that leaves the nodes", nil, 0, 0)
		f.write("a c")
		f.after("a change", []string{"a c"}, 0, 0)
		f.write("a bad d")
		f.after("a mistake", []string{"a c"}, 1, 1)
		if !strings.Contains(f.logs.text.String(), "line 7: bad") || !strings.Contains(f.logs.text.String(), "kept=2") {
			t.Errorf("the log does not say what is wrong and what is kept:\n%s", &f.logs.text)
		}
		f.write("a c")
		f.after("the former text", []string{"a c"}, 0, 1)

		f.locked(func() { f.broken = errors.New("no database") })
		f.write("d")
		f.after("a change without a database", []string{"a c"}, 0, 1)
		f.locked(func() { f.broken = nil })
		f.after("the database came back", []string{"a c", "d"}, 0, 1)

		gone := filepath.Join(f.dir, "..data")
		if err := os.Remove(gone); err != nil {
			t.Fatal(err)
		}
		f.after("the file went", []string{"a c", "d"}, 1, 2)
		f.write("d e")
		f.after("it came back", []string{"a c", "d", "d e"}, 0, 2)
		if got := testutil.ToFloat64(f.metrics.nodes.WithLabelValues(sourceStatic)); got != 2 {
			t.Errorf("nodes = %v, want 2", got)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
}

func TestWhatOtherFilesOrHalfAWriteSpoiltIsLoadedAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFollower(t, "a")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- f.Run(ctx) }()

		f.locked(func() { f.beside = errors.New("tls-cert: no such file") })
		f.write("b")
		f.after("a change while a certificate is away", nil, 1, 1)
		f.locked(func() { f.beside = nil })
		f.after("the certificate came back, and the file is as it was", []string{"b"}, 0, 1)

		f.write("c")
		f.locked(func() {
			f.meeting = func() {
				f.write("bad")
				f.locked(func() { f.meeting = func() { f.write("c") } })
			}
		})
		f.after("a write in two halves that ended as it began", []string{"b", "c"}, 0, 2)

		f.locked(func() { f.meeting = func() { f.write("e") } })
		f.write("d")
		if sleep(ctx, fileEvery) != nil {
			t.Fatal("the test ended")
		}
		synctest.Wait()
		f.write("d")
		f.after("a change that was taken back while it was loaded", []string{"b", "c", "e", "d"}, 0, 2)

		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
}

func TestAFileWithoutEndIsNotReadToItsEnd(t *testing.T) {
	t.Parallel()
	f := &File{path: "/dev/zero"}
	if _, err := f.sum(); err != nil {
		t.Errorf("sum = %v, want the sum of the beginning", err)
	}
}
