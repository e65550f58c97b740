package bindings

import (
	"errors"
	"testing"
	"time"

	"berth/services/internal/sandbox"
)

func TestReleaseEndsABindingOnce(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	bound := c.mustRecord(on("a", "s1"))

	if _, err := c.Release(t.Context(), "s1", bound.Revision+1); !errors.Is(err, sandbox.ErrChanged) {
		t.Errorf("Release with another revision = %v, want %v", err, sandbox.ErrChanged)
	}
	if got := c.row("s1").State; got != sandbox.Bound {
		t.Fatalf("state after a refused release = %s, want bound", got)
	}
	ended, err := c.Release(t.Context(), "s1", bound.Revision)
	if err != nil || ended <= bound.Revision {
		t.Fatalf("Release = %d, %v, want a revision above %d", ended, err, bound.Revision)
	}
	if got := c.row("s1"); got.State != sandbox.Gone || got.EndedBy != "deleted" {
		t.Errorf("binding = %+v, want it gone by deleted", got)
	}
	if got := c.holds("a"); got != 0 {
		t.Errorf("holds = %d, want 0", got)
	}
	if _, err := c.Lookup(t.Context(), "s1"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("Lookup = %v, want %v", err, sandbox.ErrNotFound)
	}
	for _, revision := range []sandbox.Revision{0, bound.Revision, ended + 100} {
		again, err := c.Release(t.Context(), "s1", revision)
		if err != nil || again != ended {
			t.Errorf("Release(%d) of what is gone = %d, %v, want %d and no error", revision, again, err, ended)
		}
	}
	if got := c.feed(); got != 2 {
		t.Errorf("feed rows = %d, want 2", got)
	}
	if unknown, err := c.Release(t.Context(), "never", 0); err != nil || unknown != 0 {
		t.Errorf("Release of an unknown id = %d, %v, want 0 and no error", unknown, err)
	}
}

// A node may forget a sandbox before its gateway is told that the delete succeeded. Then the roster
// has ended the binding, and a later roster must not bring back what the client deleted.
func TestWhatARosterEndedFirstIsDeletedAllTheSame(t *testing.T) {
	t.Parallel()
	cfg := DefaultConfig()
	cfg.Grace, cfg.TombstoneGrace = 0, 0
	c := newCellWith(t, cfg)
	c.listNode("a", time.Hour)
	c.mustRecord(on("a", "s1"))
	c.mustReconcile("a")
	if got := c.row("s1"); got.State != sandbox.Gone || got.EndedBy != "roster" {
		t.Fatalf("binding = %+v, want it gone by the roster", got)
	}
	if _, err := c.Release(t.Context(), "s1", 0); err != nil {
		t.Fatal(err)
	}
	out := c.mustReconcile("a", "s1")
	if len(out.Orphans) != 1 || c.row("s1").State != sandbox.Gone {
		t.Errorf("a later roster: orphans %v, binding %+v, want an orphan that stays gone", out.Orphans, c.row("s1"))
	}
}
