package placement

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/node"
)

func TestATenantNeverExceedsItsQuotaThroughFourReplicas(t *testing.T) {
	t.Parallel()
	// Many nodes, so that replicas place at once and only the tenant's lock keeps them apart.
	const replicas, callers, tries, most = 4, 24, 3, 40
	db := newDB(t, 60, 100)
	if _, err := db.Exec(t.Context(), "INSERT INTO tenant_quotas (tenant_id, max_sandboxes) VALUES ('small', $1)", most); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(t.Context(), `INSERT INTO bindings (sandbox_id, state, node_id, origin, tenant_id) VALUES ('old', 'bound', 'node-0', 'recorded', 'small')`); err != nil {
		t.Fatal(err)
	}
	placers := make([]*Placer, replicas)
	for i := range placers {
		placers[i] = startPlacer(t, db, DefaultConfig())
	}
	var placed atomic.Int64
	var done sync.WaitGroup
	for caller := range callers {
		done.Go(func() {
			for range tries {
				r := request()
				r.Tenant = "small"
				_, err := placers[caller%replicas].Schedule(t.Context(), r)
				if err == nil {
					placed.Add(1)
				} else if !errors.Is(err, node.ErrQuota) {
					t.Errorf("Schedule = %v, want a placement or %v", err, node.ErrQuota)
				}
			}
			if _, err := placers[caller%replicas].Schedule(t.Context(), request()); err != nil {
				t.Errorf("another tenant: Schedule = %v", err)
			}
		})
	}
	done.Wait()
	if placed.Load() != most-1 {
		t.Errorf("%d placed beside one that is bound, want %d of %d", placed.Load(), most-1, most)
	}
	if got := one[int](t, db.DB, "SELECT count(*) FROM reservations WHERE tenant_id = 'small'"); got != most-1 {
		t.Errorf("%d holds, want %d", got, most-1)
	}
}

func TestTheQuotaOfAllTenantsSparesThoseWithARow(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 100)
	if _, err := db.Exec(t.Context(), "UPDATE tenant_quotas SET max_cpu_millis = 500 WHERE tenant_id = '*'"); err != nil {
		t.Fatal(err)
	}
	p := startPlacer(t, db, DefaultConfig())
	r := request()
	r.Tenant = "unknown"
	if _, err := p.Schedule(t.Context(), r); !errors.Is(err, node.ErrQuota) {
		t.Errorf("a tenant without a row: Schedule = %v, want %v", err, node.ErrQuota)
	}
	r.DryRun = true
	if _, err := p.Schedule(t.Context(), r); !errors.Is(err, node.ErrQuota) {
		t.Errorf("a dry run of it: Schedule = %v, want %v", err, node.ErrQuota)
	}
	for _, tenant := range []string{"default", ""} {
		r := request()
		r.Tenant = tenant
		if _, err := p.Schedule(t.Context(), r); err != nil {
			t.Errorf("tenant %q: Schedule = %v, want a placement", tenant, err)
		}
	}
}

func TestMaxPerNodeHoldsUnderConcurrency(t *testing.T) {
	t.Parallel()
	db := newDB(t, 3, 100)
	placers := []*Placer{startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())}
	var placed atomic.Int64
	var done sync.WaitGroup
	for caller := range 20 {
		done.Go(func() {
			r := request()
			r.Constraints.SpreadKey, r.Constraints.MaxPerNode = "app", 2
			_, err := placers[caller%2].Schedule(t.Context(), r)
			if err == nil {
				placed.Add(1)
			} else if !errors.Is(err, node.ErrConstraints) {
				t.Errorf("Schedule = %v, want a placement or %v", err, node.ErrConstraints)
			}
		})
	}
	done.Wait()
	if diff := cmp.Diff(map[node.ID]int{"node-0": 2, "node-1": 2, "node-2": 2}, heldOn(t, db.DB)); diff != "" || placed.Load() != 6 {
		t.Errorf("%d placed; holds (-want +got):\n%s", placed.Load(), diff)
	}
}
