package nodes

import (
	"context"
	"testing"

	"berth/services/internal/node"
)

// measured returns the value of a counter, or the count of a histogram, with one label.
func (r *replica) measured(t *testing.T, name, label string) float64 {
	t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			if len(m.GetLabel()) == 1 && m.GetLabel()[0].GetValue() == label {
				return m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return 0
}

func TestLocksPassesAndFailuresAreMeasured(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, templated(1, "i1", "c1", configOf("1")))
	for lock, want := range map[string]float64{"node": 1, "template": 1} {
		if got := r.measured(t, "berth_scheduler_lock_wait_seconds", lock); got != want {
			t.Errorf("lock_wait_seconds{lock=%s} counts %v, want %v", lock, got, want)
		}
	}
	if err := r.store.Pass(loopDue, r.due)(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := r.measured(t, "berth_scheduler_loop_seconds", loopDue); got != 1 {
		t.Errorf("loop_seconds{loop=%s} counts %v, want 1", loopDue, got)
	}

	// What a node is refused is not the store's failure, nor is a caller who left.
	if _, err := r.Heartbeat(t.Context(), beatOf("n01", "i2", endpointB)); err == nil {
		t.Fatal("a second claimant was accepted")
	}
	gone, leave := context.WithCancel(t.Context())
	leave()
	if _, err := r.Heartbeat(gone, templated(1, "i1", "c1", "")); err == nil {
		t.Fatal("a caller who left was answered")
	}
	c.exec(`REVOKE UPDATE ON node_leases FROM berth_scheduler`)
	if _, err := r.Heartbeat(t.Context(), templated(1, "i1", "c1", configOf("1"))); err == nil {
		t.Fatal("a lease was renewed without the right to")
	}
	if err := r.Unregister(t.Context(), node.ID("n01"), "i1"); err == nil {
		t.Fatal("a lease was ended without the right to")
	}
	for op, want := range map[string]float64{"renew leases": 1, "unregister": 1, "heartbeat": 0} {
		if got := r.measured(t, "berth_scheduler_store_errors_total", op); got != want {
			t.Errorf("store_errors_total{op=%s} = %v, want %v", op, got, want)
		}
	}
}
