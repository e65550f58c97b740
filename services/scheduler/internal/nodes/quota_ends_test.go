package nodes

import (
	"context"
	"errors"
	"testing"
	"time"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/placement"
)

// Whatever ends a tenant's sandbox, or the hold of one, frees its quota: at a maximum of one, another replica
// places the next after the end and not before. What merely falls silent frees nothing.
func TestEachEndFreesTheQuotaThroughAnotherReplica(t *testing.T) {
	t.Parallel()
	const older = `UPDATE bindings SET bound_at = bound_at - interval '1 hour'`
	type world struct {
		*cell
		r      *replica
		p      *placement.Placer
		placed placement.Placement
	}
	tests := map[string]struct {
		held  bool // the end is of a hold that nobody confirmed
		end   func(t *testing.T, w world) error
		keeps bool // it is no end
	}{
		"its placement is released": {held: true, end: func(t *testing.T, w world) error {
			released, err := w.p.Release(t.Context(), w.placed.ID, w.placed.Reservation, placement.Canceled)
			if !released {
				t.Error("Release = false, want the hold ended")
			}
			return err
		}},
		"its hold expires": {held: true, end: func(t *testing.T, w world) error {
			w.exec(`UPDATE reservations SET expires_at = clock_timestamp() - interval '1 second'`)
			ctx, stop := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- w.p.ExpireLoop(ctx) }()
			until(t, func() bool { return value[int64](w.cell, `SELECT count(*) FROM reservations`) == 0 })
			stop()
			return <-ended
		}},
		"its sandbox is released": {end: func(t *testing.T, w world) error {
			_, err := w.r.routes.Release(t.Context(), "s", 0)
			return err
		}},
		"a roster ends it": {end: func(t *testing.T, w world) error {
			w.exec(older)
			w.exec(`UPDATE node_leases SET reconcile_due = '-infinity'`)
			w.r.must(t, beatOf("a", "i1", endpointA))
			return nil
		}},
		"its node tells that it was deleted": {end: func(t *testing.T, w world) error {
			return w.r.Tell(t.Context(), tellingOf("a", "i1", told(bindings.KindDelete, "s")))
		}},
		"its node unregisters": {end: func(t *testing.T, w world) error { return w.r.Unregister(t.Context(), "a", "i1") }},
		"its node falls silent": {keeps: true, end: func(_ *testing.T, w world) error {
			w.exec(`UPDATE node_leases SET expires_at = now() - interval '1 hour' WHERE node_id = 'a'`)
			return nil
		}},
		"its roster shows it": {keeps: true, end: func(t *testing.T, w world) error {
			w.r.must(t, beatOf("a", "i1", endpointA, "s"))
			return nil
		}},
		"its hold is extended": {held: true, keeps: true, end: func(t *testing.T, w world) error {
			return w.p.Extend(t.Context(), w.placed.ID, w.placed.Reservation, time.Hour)
		}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			r := c.replica()
			r.must(t, beatOf("a", "i1", endpointA))
			c.exec(`INSERT INTO tenant_quotas (tenant_id, max_sandboxes, max_cpu_millis, max_memory_bytes) VALUES ('small', 1, 1, 1)`)
			one, other := c.placer(), c.placer()
			ask := placement.Request{Tenant: "small", Size: sandbox.Size{CPUMillis: 1, MemoryBytes: 1}, Count: 1, Named: true, TTL: time.Hour}
			placed, err := one.Schedule(t.Context(), ask)
			if err != nil {
				t.Fatalf("Schedule = %v, want the one that is allowed", err)
			}
			if !tt.held {
				a := assignmentOf(placed, "s")
				a.Tenant, a.Size = "small", ask.Size
				if _, err := r.routes.Record(t.Context(), a); err != nil {
					t.Fatalf("Record = %v", err)
				}
			}
			r.must(t, beatOf("b", "i1", endpointB)) // where the next one goes
			if _, err := other.Schedule(t.Context(), ask); !errors.Is(err, node.ErrQuota) {
				t.Fatalf("a second at the maximum = %v, want %v", err, node.ErrQuota)
			}
			free := ask
			free.Tenant = "another"
			if _, err := other.Schedule(t.Context(), free); err != nil {
				t.Errorf("another tenant beside it = %v, want a placement", err)
			}
			if err := tt.end(t, world{c, r, one, placed}); err != nil {
				t.Fatalf("the end = %v", err)
			}
			_, err = other.Schedule(t.Context(), ask)
			if tt.keeps && !errors.Is(err, node.ErrQuota) || !tt.keeps && err != nil {
				t.Errorf("after it Schedule = %v, want the quota kept: %t", err, tt.keeps)
			}
			if _, err := one.Schedule(t.Context(), ask); !errors.Is(err, node.ErrQuota) {
				t.Errorf("and one more = %v, want %v", err, node.ErrQuota)
			}
			if got := value[int64](c, `SELECT (SELECT count(*) FROM bindings WHERE tenant_id = 'small' AND state = 'bound')
			        + (SELECT count(*) FROM reservations WHERE tenant_id = 'small' AND sandbox_id IS NULL)`); got != 1 {
				t.Errorf("%d sandboxes and open holds of the tenant, want 1", got)
			}
		})
	}
}
