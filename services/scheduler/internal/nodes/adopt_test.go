package nodes

import (
	"strings"
	"testing"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
)

// A node may say what it runs before the gateway that placed it has recorded it. What the placement
// knows about the sandbox is not lost, and its room is counted once.
func TestASandboxThatWasPlacedIsAdoptedForItsTenant(t *testing.T) {
	t.Parallel()
	const reservation = "0192f0c1-2d3e-7000-8000-000000000001"
	tests := map[string]struct{ entry node.Entry }{
		"its placement drew the id":        {node.Entry{Sandbox: "drawn"}},
		"its entry names the reservation":  {node.Entry{Sandbox: "own", Reservation: reservation}},
		"its entry spells it as a URN":     {node.Entry{Sandbox: "own", Reservation: "urn:uuid:" + reservation}},
		"its entry spells it in capitals":  {node.Entry{Sandbox: "own", Reservation: strings.ToUpper(reservation)}},
		"its entry says a size of its own": {node.Entry{Sandbox: "drawn", Size: sandbox.Size{CPUMillis: 1, MemoryBytes: 1}}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			r := c.replica()
			r.must(t, beatOf("a", "i1", endpointA))
			c.exec(`INSERT INTO placements (tenant_id, outcome, node_id, reservation_id, sandbox_ids, cpu_millis, memory_bytes, strategy)
			        VALUES ('t1', 'reserved', 'a', $1, '{drawn}', 500, 64, 'best_of_k')`, reservation)
			c.exec(`INSERT INTO reservations (reservation_id, n, placement_id, node_id, tenant_id, spread_key, cpu_millis, memory_bytes, named, expires_at)
			        SELECT reservation_id, 1, placement_id, 'a', 't1', 'k', 500, 64, true, now() + interval '1 hour' FROM placements`)

			b := beatOf("a", "i1", endpointA)
			b.Roster, _ = node.NewRoster(nil, []node.Entry{tt.entry})
			r.must(t, b)

			const row = `SELECT concat_ws(' ', state, tenant_id, spread_key, cpu_millis, memory_bytes, origin) FROM bindings WHERE sandbox_id = $1`
			if got := value[string](c, row, tt.entry.Sandbox); got != "bound t1 k 500 64 adopted" {
				t.Errorf("binding = %s", got)
			}
			if got := value[string](c, `SELECT outcome FROM placements`); got != "confirmed" {
				t.Errorf("placement is %s, want confirmed", got)
			}
			if got := value[int64](c, `SELECT count(*) FROM reservations`); got != 0 {
				t.Errorf("%d holds, want none: the report counts the sandbox", got)
			}

			feed := c.feed()
			assigned, err := r.routes.Record(t.Context(), bindings.Assignment{ // the gateway's turn
				Sandboxes: []sandbox.ID{tt.entry.Sandbox}, Node: "a", Endpoint: endpointA, ReservationID: reservation, Tenant: "t1",
				PlacementID: value[int64](c, `SELECT placement_id FROM placements`), SealedAnswer: []byte("sealed"),
			})
			if err != nil || assigned[0].Incarnation != 1 || c.feed() != feed {
				t.Errorf("Record = %+v, %v with %d feed rows more, want the same route", assigned, err, c.feed()-feed)
			}
			if got := value[int64](c, `SELECT count(*) FROM reservations`); got != 0 {
				t.Errorf("%d holds after the record, want none", got)
			}
			if got := value[string](c, `SELECT convert_from(sealed_answer, 'utf8') FROM placements`); got != "sealed" {
				t.Errorf("sealed answer = %q", got)
			}
		})
	}
}

func TestAReservationThatIsNoneFailsNoHeartbeat(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"x", "urn:uuid:x", "urn:uuid:0192f0c1-2d3e-7000-8000-00000000000g", "\x00", "{0192f0c1-2d3e-7000-8000-000000000001"} {
		c := newCell(t)
		r := c.replica()
		b := beatOf("a", "i1", endpointA)
		b.Roster, _ = node.NewRoster(nil, []node.Entry{{Sandbox: "s1", Reservation: text}})
		if _, err := r.Heartbeat(t.Context(), b); err != nil {
			t.Errorf("Heartbeat with reservation %q = %v", text, err)
		}
		if got := c.bindings()["s1"].State; got != sandbox.Bound {
			t.Errorf("with reservation %q the sandbox is %q, want bound", text, got)
		}
	}
}
