package bindings

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// observed takes the sizes of batches.
type observed struct {
	mu    sync.Mutex
	sizes []float64
}

// Observe keeps size.
func (o *observed) Observe(size float64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sizes = append(o.sizes, size)
}

func TestLookupsThatWaitShareAStatement(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.listNode("silent", -time.Second)
	for _, id := range []sandbox.ID{"s1", "s2", "s3", "ended"} {
		n := node.ID("a")
		if id == "s2" {
			n = "silent"
		}
		c.mustRecord(on(n, id))
	}
	c.exec(`UPDATE bindings SET state = 'parked', ended_by = 'unregistered', ended_at = now() WHERE sandbox_id = 's3'`)
	if _, err := c.Release(t.Context(), "ended", 0); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		id     sandbox.ID
		want   node.ID
		status node.Status
	}{
		{"s1", "a", node.Ready}, {"s2", "silent", node.Unhealthy}, {"s3", "", 0}, {"ended", "", 0}, {"unknown", "", 0}, {"s1", "a", node.Ready},
	}
	type heard struct {
		found Found
		err   error
	}
	all := make([]heard, len(tests))
	calls := make([]func(), len(tests))
	for i, tt := range tests {
		calls[i] = func() { all[i].found, all[i].err = c.Lookup(t.Context(), tt.id) }
	}
	sizes := &observed{}
	c.sizes.lookups = sizes
	c.lookups.together(t, c.LookupLoop, calls...)
	for i, tt := range tests {
		got := all[i]
		switch {
		case tt.want == "" && !errors.Is(got.err, sandbox.ErrNotFound):
			t.Errorf("Lookup(%s) = %+v, %v, want %v", tt.id, got.found, got.err, sandbox.ErrNotFound)
		case tt.want != "" && (got.err != nil || got.found.Node != tt.want || got.found.Endpoint != endpointOf(tt.want) ||
			got.found.Status != tt.status || int64(got.found.Revision) != c.row(tt.id).Revision || got.found.Incarnation != 1):
			t.Errorf("Lookup(%s) = %+v, %v, want it on %s, %v", tt.id, got.found, got.err, tt.want, tt.status)
		}
		alone, err := c.Lookup(t.Context(), tt.id) // nobody serves any more
		if alone != got.found || errors.Is(err, sandbox.ErrNotFound) != (tt.want == "") {
			t.Errorf("Lookup(%s) alone = %+v, %v, want the same: %+v", tt.id, alone, err, got.found)
		}
	}
	if diff := cmp.Diff([]float64{float64(len(tests))}, sizes.sizes); diff != "" {
		t.Errorf("lookups of each statement (-want +got):\n%s", diff)
	}
}

// A statement that hangs costs each caller its own time, and what comes after it is not lost.
func TestALookupWaitsNoLongerThanItsCaller(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.mustRecord(on("a", "s1"))
	c.serve(c.Bindings)
	other, err := c.owner.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Rollback(context.WithoutCancel(t.Context())) }() // after a commit it has nothing to do
	if _, err := other.Exec(t.Context(), `LOCK TABLE bindings IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	var callers sync.WaitGroup
	for range 2 * lookupsAtOnce { // some are in a statement, some in the line
		callers.Go(func() {
			limited, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if _, err := c.Lookup(limited, "s1"); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Lookup while the table is locked = %v, want the caller's own deadline", err)
			}
		})
	}
	callers.Wait()
	if err := other.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The statements that hung end by the lock's release or by the role's lock_timeout.
	for {
		found, err := c.Lookup(t.Context(), "s1")
		if err == nil && found.Node == "a" {
			break
		}
		if t.Context().Err() != nil {
			t.Fatalf("Lookup after the lock = %+v, %v", found, err)
		}
	}
}
