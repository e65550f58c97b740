package nodes

import (
	"errors"
	"fmt"
	"testing"

	"berth/services/internal/node"
	"berth/services/scheduler/internal/bindings"
)

func manyIDs(from, to int) []string {
	ids := make([]string, 0, to-from)
	for i := from; i < to; i++ {
		ids = append(ids, fmt.Sprintf("018f3d1e-0000-7000-8000-%012d", i))
	}
	return ids
}

func TestRostersWorkUpToTheLimitAndAreRefusedAboveIt(t *testing.T) {
	t.Parallel()
	for _, size := range []int{5_000, node.MaxRoster} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			r, other := c.replica(), c.replica()
			bound := func() int64 {
				t.Helper()
				return value[int64](c, `SELECT count(*) FROM bindings WHERE state = 'bound' AND node_id = 'a'`)
			}
			all := beatOf("a", "i1", endpointA, manyIDs(0, size)...)
			// Never more at once than a busy database writes before the caller's time is over; the node hears
			// when to go on, though its roster stays the same, and any replica does.
			for want := 0; want < size; r, other = other, r {
				want = min(want+bindings.ChangesAtOnce, size)
				answer := r.must(t, all)
				if got := bound(); got != int64(want) {
					t.Fatalf("%d are bound, want %d of %d", got, want, size)
				}
				soon := answer.NextHeartbeat < DefaultConfig().HeartbeatEvery && answer.SendFullRoster
				if soon != (want < size) {
					t.Errorf("with %d of %d bound the next heartbeat is in %v, with the roster: %t", want, size, answer.NextHeartbeat, answer.SendFullRoster)
				}
			}

			before := without(c.versions(), "node_leases")
			other.must(t, all)
			after := c.versions()
			for table, was := range before {
				if after[table] != was {
					t.Errorf("an unchanged roster wrote %s", table)
				}
			}

			// One in a hundred is another one: by what differs here, by all rows on a replica that has no roster.
			c.exec(`UPDATE bindings SET bound_at = bound_at - interval '1 hour'`)
			step := size / 100
			r.must(t, beatOf("a", "i1", endpointA, manyIDs(step, size+step)...))
			other.must(t, beatOf("a", "i1", endpointA, manyIDs(2*step, size+step)...))
			if got := bound(); got != int64(size)-int64(step) {
				t.Errorf("after two changes %d are bound, want %d: who was just bound is spared", got, size)
			}
			if got := c.feed(); got < int64(size) {
				t.Errorf("%d feed rows, want one for each", got)
			}
		})
	}
	t.Run("above the limit", func(t *testing.T) {
		t.Parallel()
		c := newCell(t)
		r := c.replica()
		before := c.versions()
		if _, err := r.Heartbeat(t.Context(), beatOf("a", "i1", endpointA, manyIDs(0, node.MaxRoster+1)...)); !errors.Is(err, node.ErrBadRoster) {
			t.Errorf("Heartbeat = %v, want %v", err, node.ErrBadRoster)
		}
		after := c.versions()
		for table, was := range before {
			if after[table] != was {
				t.Errorf("a roster that was refused wrote %s", table)
			}
		}
	})
}
