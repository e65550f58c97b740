package nodes

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
)

// openHold makes an open hold of a placement on node a. drawn has the sandbox whose id the placement drew, or "".
func (c *cell) openHold(reservation string, named bool, millis int64, drawn string) {
	c.t.Helper()
	ids := []string{}
	if drawn != "" {
		ids = append(ids, drawn)
	}
	c.exec(`WITH p AS (INSERT INTO placements (tenant_id, outcome, node_id, reservation_id, sandbox_ids, cpu_millis, memory_bytes, strategy)
	        VALUES ('t', 'reserved', 'a', $1::uuid, $4, $3, $3, 'best_of_k') RETURNING placement_id)
	        INSERT INTO reservations (reservation_id, n, placement_id, node_id, tenant_id, cpu_millis, memory_bytes, named, expires_at)
	        SELECT $1::uuid, 1, placement_id, 'a', 't', $3, $3, $2, now() + interval '1 hour' FROM p`, reservation, named, millis, ids)
}

// holdRows returns all holds, as sandbox or open, millis and whether named, in order.
func (c *cell) holdRows() []string {
	c.t.Helper()
	return all[string](c, `SELECT COALESCE(sandbox_id, 'open') || ' ' || cpu_millis || CASE WHEN named THEN ' named' ELSE '' END FROM reservations ORDER BY 1`)
}

const (
	first  = "018f0000-0000-7000-8000-000000000001"
	second = "018f0000-0000-7000-8000-000000000002"
)

// Each sandbox is held once, whether its node tells of it before its gateway records it, after, or never.
func TestASandboxIsHeldOnceWhoeverTellsOfItFirst(t *testing.T) {
	t.Parallel()
	create := func(id sandbox.ID) func(*testing.T, *replica) {
		return func(t *testing.T, r *replica) { r.mustTell(t, tellingOf("a", "i1", told(bindings.KindCreate, id))) }
	}
	fork := func(id sandbox.ID) func(*testing.T, *replica) {
		return func(t *testing.T, r *replica) { r.mustTell(t, tellingOf("a", "i1", told(bindings.KindFork, id))) }
	}
	record := func(id sandbox.ID, reservation string) func(*testing.T, *replica) {
		return func(t *testing.T, r *replica) {
			t.Helper()
			a := bindings.Assignment{Sandboxes: []sandbox.ID{id}, Node: "a", Endpoint: endpointA, ReservationID: reservation}
			if _, err := r.routes.Record(t.Context(), a); err != nil {
				t.Fatalf("Record(%s) = %v", id, err)
			}
		}
	}
	listed := func(ids ...string) func(*testing.T, *replica) {
		return func(t *testing.T, r *replica) { r.must(t, beatOf("a", "i1", endpointA, ids...)) }
	}
	unnamed := func(c *cell) { c.openHold(first, false, 500, "") }
	tests := map[string]struct {
		given func(*cell)
		steps []func(*testing.T, *replica)
		want  []string // holds
		owner string   // of s: tenant and size
	}{
		"AgentENV: the event, then the record": {
			unnamed, []func(*testing.T, *replica){create("s"), record("s", "")}, []string{"s 2000"}, "t 2000",
		},
		"AgentENV: the record, then the event": {
			unnamed, []func(*testing.T, *replica){record("s", ""), create("s")}, []string{"s 500"}, "t 500",
		},
		"AgentENV: the record twice around the event": {
			func(c *cell) { unnamed(c); c.openHold(second, false, 700, "") },
			[]func(*testing.T, *replica){create("s"), record("s", ""), record("s", "")},
			[]string{"open 700", "s 2000"},
			"t 2000",
		},
		"AgentENV: two creates": {
			func(c *cell) { unnamed(c); c.openHold(second, false, 700, "") },
			[]func(*testing.T, *replica){create("s"), create("u"), record("u", ""), record("s", "")},
			[]string{"s 2000", "u 2000"},
			"t 2000",
		},
		"AgentENV: a create without a hold of its own": {
			func(*cell) {}, []func(*testing.T, *replica){create("s"), record("s", "")}, []string{"s 2000 named"}, " 2000",
		},
		"Berth: the event, then the record": {
			func(c *cell) { c.openHold(first, true, 500, "") }, []func(*testing.T, *replica){create("s"), record("s", first)}, []string{"s 2000 named"}, "t 2000",
		},
		"Berth: the record, then the event": {
			func(c *cell) { c.openHold(first, true, 500, "") }, []func(*testing.T, *replica){record("s", first), create("s")}, []string{"s 500 named"}, "t 500",
		},
		"the id was drawn: the event takes the hold that is its own": {
			func(c *cell) { c.openHold(first, true, 500, "other"); c.openHold(second, true, 700, "s") },
			[]func(*testing.T, *replica){create("s")},
			[]string{"open 500 named", "s 2000 named"},
			"t 2000",
		},
		"the id was drawn: then the record": {
			func(c *cell) { c.openHold(second, true, 700, "s") },
			[]func(*testing.T, *replica){create("s"), record("s", second)},
			[]string{"s 2000 named"},
			"t 2000",
		},
		"both kinds of gateways: an event that may be either's takes nobody's hold": {
			func(c *cell) { unnamed(c); c.openHold(second, true, 700, "") },
			[]func(*testing.T, *replica){create("s"), record("s", second)},
			[]string{"open 500", "s 2000 named"},
			"t 2000",
		},
		"a fork takes no create's hold": {
			unnamed, []func(*testing.T, *replica){fork("s")}, []string{"open 500", "s 2000 named"}, " 2000",
		},
		"what came back takes no create's hold": {
			func(c *cell) {
				unnamed(c)
				c.exec(`INSERT INTO bindings (sandbox_id, state, node_id, origin, tenant_id, ended_at, ended_by) VALUES ('s', 'gone', 'a', 'event', 'u', now(), 'event')`)
			},
			[]func(*testing.T, *replica){create("s")},
			[]string{"open 500", "s 2000 named"},
			"u 2000",
		},
		"the roster, then the event": {
			func(*cell) {}, []func(*testing.T, *replica){listed("s"), create("s")}, nil, " 0",
		},
		"the event, the roster, then the record": {
			unnamed, []func(*testing.T, *replica){create("s"), listed("s"), record("s", "")}, nil, "t 2000",
		},
		"the event, the roster, the event again": {
			unnamed, []func(*testing.T, *replica){create("s"), listed("s"), create("s")}, nil, "t 2000",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			r := c.replica()
			r.must(t, beatOf("a", "i1", endpointA))
			tt.given(c)
			for _, step := range tt.steps {
				step(t, r)
			}
			if diff := cmp.Diff(tt.want, c.holdRows()); diff != "" {
				t.Errorf("holds (-want +got):\n%s", diff)
			}
			if got := value[string](c, `SELECT tenant_id || ' ' || cpu_millis FROM bindings WHERE sandbox_id = 's' AND state = 'bound'`); got != tt.owner {
				t.Errorf("s is of %q, want %q", got, tt.owner)
			}
			const apartSQL = `SELECT count(*) FROM placements AS p WHERE p.outcome = 'reserved'
				AND NOT EXISTS (SELECT 1 FROM reservations AS r WHERE r.placement_id = p.placement_id AND r.sandbox_id IS NULL)`
			if got := value[int64](c, apartSQL); got != 0 {
				t.Errorf("%d placements wait without a hold, want none: they are confirmed", got)
			}
		})
	}
}
