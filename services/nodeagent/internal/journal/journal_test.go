package journal_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/sandbox"
	"berth/services/nodeagent/internal/journal"
)

const writerVariable = "BERTH_TEST_JOURNAL"

func TestMain(m *testing.M) {
	if dir := os.Getenv(writerVariable); dir != "" { //nolint:forbidigo // set by the test that starts this process
		writeForever(dir)
	}
	os.Exit(m.Run())
}

// writeForever creates records and prints each id once its write returned, until it is killed.
func writeForever(dir string) {
	j, err := journal.Open(dir)
	if err != nil {
		fmt.Fprintln(os.Stdout, "error", err)
		os.Exit(1)
	}
	for i := 0; ; i++ {
		id := sandbox.ID(fmt.Sprintf("s-%d", i))
		answer := json.RawMessage(`"` + strings.Repeat("x", 1000) + `"`)
		if err := j.Update(id, func(r *journal.Record) error { r.State, r.Answer = json.RawMessage(`{}`), answer; return nil }); err != nil {
			fmt.Fprintln(os.Stdout, "error", err)
			os.Exit(1)
		}
		fmt.Fprintln(os.Stdout, "wrote", id)
	}
}

func open(t testing.TB, dir string) *journal.Journal {
	t.Helper()
	j, err := journal.Open(dir)
	if err != nil {
		t.Fatalf("Open: %v", err)
	}
	t.Cleanup(func() { _ = j.Close() })
	return j
}

func live(r *journal.Record) error { r.State = json.RawMessage(`{"a":1}`); return nil }

func TestWhatWasWrittenIsThereAfterAKill(t *testing.T) {
	t.Parallel()
	for range 5 {
		dir := t.TempDir()
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), writerVariable+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		buf, text := make([]byte, 256), ""
		for strings.Count(text, "\n") < 5 {
			n, err := out.Read(buf)
			text += string(buf[:n])
			if err != nil {
				t.Fatalf("writer ended: %v, %s", err, text)
			}
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		j := open(t, dir)
		for line := range strings.Lines(text) {
			id, said := strings.CutPrefix(strings.TrimSpace(line), "wrote ")
			if !said || !strings.HasSuffix(line, "\n") {
				continue
			}
			if r, found := j.Get(sandbox.ID(id)); !found || len(r.Answer) != 1002 {
				t.Errorf("%s was acknowledged and is lost: %v", id, r)
			}
		}
	}
}

func TestRecordsSurviveAndTombstonesAreForgottenInTime(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j := open(t, dir)
	old, young := time.Now().Add(-2*time.Hour), time.Now()
	for id, deleted := range map[sandbox.ID]*time.Time{"live": nil, "old": &old, "young": &young} {
		if err := j.Update(id, func(r *journal.Record) error { r.Deleted = deleted; return live(r) }); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.ForgetDeleted(time.Now().Add(-time.Hour)); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	again := open(t, dir)
	got := map[sandbox.ID]bool{}
	for _, r := range again.All() {
		got[r.ID] = true
	}
	if diff := cmp.Diff(map[sandbox.ID]bool{"live": true, "young": true}, got); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
}

func TestAChangeThatFailsWritesNothing(t *testing.T) {
	t.Parallel()
	j := open(t, t.TempDir())
	no := errors.New("no")
	if err := j.Update("a", func(r *journal.Record) error { r.State = json.RawMessage(`1`); return no }); !errors.Is(err, no) {
		t.Errorf("Update = %v, want the change's error", err)
	}
	if r, found := j.Get("a"); found {
		t.Errorf("Get = %v, want nothing", r)
	}
}

func TestUpdatesOfOneRecordDoNotGetLost(t *testing.T) {
	t.Parallel()
	j := open(t, t.TempDir())
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if err := j.Update("a", func(r *journal.Record) error { r.Revision++; return live(r) }); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if r, _ := j.Get("a"); r.Revision != 20 {
		t.Errorf("revision %d after 20 raises", r.Revision)
	}
}

func TestASecondAgentIsKeptOut(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	open(t, dir)
	if _, err := journal.Open(dir); !errors.Is(err, journal.ErrInUse) {
		t.Errorf("second Open = %v, want ErrInUse", err)
	}
}

func TestADamagedRecordStopsTheStart(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{"half a record": `{"id":"a"`, "another's record": `{"id":"b"}`, "nothing": ``} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "a.json"), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := journal.Open(dir); err == nil || !strings.Contains(err.Error(), filepath.Join(dir, "a.json")) {
				t.Errorf("Open = %v, want an error that names the file", err)
			}
		})
	}
}

func TestWhatADyingWriteLeftIsRemoved(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	left := filepath.Join(dir, "a.json.new")
	if err := os.WriteFile(left, []byte(`{"id`), 0o600); err != nil {
		t.Fatal(err)
	}
	open(t, dir)
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the half-written file is still there: %v", err)
	}
}

func TestFences(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j := open(t, dir)
	if err := j.Update("a", live); err != nil {
		t.Fatal(err)
	}
	f := journal.NewFences(j, time.Second)
	steps := []struct {
		what     string
		pass     func(sandbox.ID, sandbox.Revision) error
		revision sandbox.Revision
		stale    sandbox.Revision // 0: passes
		onDisk   sandbox.Revision
	}{
		{"a first revision", f.Pass, 3, 0, 0},
		{"the same again", f.Pass, 3, 0, 0},
		{"an older one", f.Pass, 2, 3, 0},
		{"an older mutation", f.PassMutation, 2, 3, 0},
		{"a mutation is written first", f.PassMutation, 3, 0, 3},
		{"a newer read is not", f.Pass, 5, 0, 3},
		{"a mutation of before that read is stale", f.PassMutation, 4, 5, 3},
		{"who knows none passes", f.PassMutation, 0, 0, 3},
	}
	for _, step := range steps {
		err := step.pass("a", step.revision)
		stale, _ := errors.AsType[*journal.StaleError](err)
		switch {
		case step.stale == 0 && err != nil:
			t.Errorf("%s: %v", step.what, err)
		case step.stale != 0 && (stale == nil || stale.Revision != step.stale):
			t.Errorf("%s: %v, want stale with %d", step.what, err, step.stale)
		}
		if r, _ := j.Get("a"); r.Revision != step.onDisk {
			t.Errorf("%s: %d is on disk, want %d", step.what, r.Revision, step.onDisk)
		}
	}
	if err := f.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	again := journal.NewFences(open(t, dir), time.Second)
	if err := again.Pass("a", 4); err == nil {
		t.Error("after a restart revision 4 passes, though 5 was seen")
	}
}

func TestFencesOfUnknownSandboxesAreNotWritten(t *testing.T) {
	t.Parallel()
	j := open(t, t.TempDir())
	f := journal.NewFences(j, time.Second)
	if err := f.PassMutation("never", 3); err != nil {
		t.Fatal(err)
	}
	if all := j.All(); len(all) != 0 {
		t.Errorf("records are %v", all)
	}
}

func TestFencesAreWrittenNowAndThenAndAtTheEnd(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		j := open(t, dir)
		if err := j.Update("a", live); err != nil {
			t.Fatal(err)
		}
		f := journal.NewFences(j, time.Second)
		done := make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			defer close(done)
			f.Run(ctx, func(err error) { t.Error(err) })
		}()
		_ = f.Pass("a", 7)
		time.Sleep(1500 * time.Millisecond) //nolint:forbidigo // in a bubble it passes at once
		synctest.Wait()
		if r, _ := j.Get("a"); r.Revision != 7 {
			t.Errorf("after a flush %d is on disk, want 7", r.Revision)
		}
		_ = f.Pass("a", 8)
		cancel()
		<-done
		if r, _ := j.Get("a"); r.Revision != 8 {
			t.Errorf("after the end %d is on disk, want 8", r.Revision)
		}
	})
}
