package nodes

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// log returns the scheduler's own events as kind, effect, node and sandbox, in order.
func (c *cell) log() []string {
	c.t.Helper()
	return all[string](c, `SELECT concat_ws(' ', kind, nullif(effect, ''), node_id, nullif(sandbox_id, ''), detail ->> 'from_node_id') FROM sandbox_events
		WHERE source = 'scheduler' ORDER BY event_id`)
}

func TestTheLogTellsWhatTheSchedulerDid(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	cfg, routeCfg := patient()
	routeCfg.Grace, routeCfg.TombstoneGrace = 0, 0
	r := c.replicaWith(cfg, routeCfg)
	r.must(t, beatOf("a", "i1", endpointA, "s", "u", "v"))
	r.must(t, beatOf("b", "i1", endpointB, "u"))
	r.must(t, beatOf("a", "i1", endpointA, "s", "u"))
	r.must(t, beatOf("a", "i1", endpointA, "s", "u", "v"))
	if err := r.Unregister(t.Context(), "a", "i1"); err != nil {
		t.Fatal(err)
	}
	if err := r.Unregister(t.Context(), "a", "i1"); err != nil { // told once
		t.Fatal(err)
	}
	c.exec(`UPDATE node_leases SET reconcile_due = '-infinity'`)
	r.must(t, beatOf("b", "i1", endpointB, "s", "u"))
	if _, err := r.routes.Release(t.Context(), "s", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := r.routes.Release(t.Context(), "s", 0); err != nil { // gone already
		t.Fatal(err)
	}
	want := []string{
		"adopted a s", "adopted a u", "adopted a v",
		"orphan held_elsewhere b u",
		"gone roster a v",
		"revived a v",
		"parked unregistered a s", "parked unregistered a u", "parked unregistered a v", "node_unregistered a",
		"moved b s a", "moved b u a",
		"gone deleted b s",
	}
	if diff := cmp.Diff(want, c.log()); diff != "" {
		t.Errorf("the log (-want +got):\n%s", diff)
	}
	if got := value[int64](c, `SELECT count(*) FROM sandbox_events WHERE cluster_id <> 'c1'`); got != 0 {
		t.Errorf("%d events are of another cluster than their node", got)
	}
	if got := value[int64](c, `SELECT count(*) FROM orphans`); got != 0 {
		t.Errorf("%d orphans, want none: u is where it was listed", got)
	}
}

// Each replica is asked by one of the claimants; together they tell once a minute.
func TestAConflictIsOneEventWhicheverReplicaSeesIt(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	replicas := []*replica{c.replica(), c.replica(), c.replica()}
	replicas[0].must(t, beatOf("a", "i1", endpointA, "s"))
	for range 2 {
		for _, r := range replicas {
			if _, err := r.Heartbeat(t.Context(), beatOf("a", "i2", endpointB, "s")); !errors.Is(err, node.ErrIDInUse) {
				t.Errorf("Heartbeat = %v, want %v", err, node.ErrIDInUse)
			}
		}
	}
	if diff := cmp.Diff([]string{"adopted a s", "node_conflict a"}, c.log()); diff != "" {
		t.Errorf("the log (-want +got):\n%s", diff)
	}
	for i, r := range replicas {
		if got := testutil.ToFloat64(r.metrics.conflicts); got != 2 {
			t.Errorf("replica %d counted %v conflicts, want 2", i, got)
		}
	}
	want := bindingRow{ID: "s", State: sandbox.Bound, Node: "a", Incarnation: 1}
	if got := c.bindings()["s"]; got != want {
		t.Errorf("binding of s = %+v, want %+v", got, want)
	}
}
