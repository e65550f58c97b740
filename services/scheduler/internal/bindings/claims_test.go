package bindings

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// claim holds room for one sandbox under a create key, as Schedule leaves it on a node that draws its own
// ids; it expired long ago if overdue says so. It returns the reservation.
func (c *cell) claim(n node.ID, key string, overdue bool) (placement int64, reservation string) {
	c.t.Helper()
	placement = value[int64](c, `INSERT INTO placements (tenant_id, create_key, create_digest, outcome, node_id, reservation_id, cpu_millis, memory_bytes, strategy)
		VALUES ('t', $1, 'd', 'reserved', $2, gen_random_uuid(), 700, 1024, 'best_of_k') RETURNING placement_id`, key, n)
	c.exec(`INSERT INTO reservations (reservation_id, n, placement_id, node_id, tenant_id, spread_key, cpu_millis, memory_bytes, named, expires_at)
		SELECT reservation_id, 1, placement_id, node_id, tenant_id, 'app', cpu_millis, memory_bytes, true,
		       clock_timestamp() + CASE WHEN $2 THEN interval '-1 minute' ELSE interval '1 minute' END
		FROM placements WHERE placement_id = $1`, placement, overdue)
	return placement, value[string](c, `SELECT reservation_id::text FROM placements WHERE placement_id = $1`, placement)
}

func (c *cell) outcomeOf(placement int64) string {
	c.t.Helper()
	return value[string](c, `SELECT outcome || ' ' || array_to_string(sandbox_ids, ',') FROM placements WHERE placement_id = $1`, placement)
}

func TestAnOverdueClaimIsSettledByWhatItsNodeMade(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		before  []string // adopted before the claim
		after   []string // adopted after it
		owned   bool     // the adopted ones have a tenant
		another bool     // another hold is open there
		fresh   bool     // the claim is not overdue
		want    string
	}{
		"one unexplained sandbox is the claim's":        {after: []string{"made"}, want: "confirmed made"},
		"beside others that were there before":          {before: []string{"old"}, after: []string{"old", "made"}, want: "confirmed made"},
		"none: the key is free":                         {want: "expired "},
		"only one that was there before":                {before: []string{"old"}, after: []string{"old"}, want: "expired "},
		"two: nobody knows which":                       {after: []string{"made", "other"}, want: "expired "},
		"one that somebody explained":                   {after: []string{"made"}, owned: true, want: "expired "},
		"one that another open hold may have made":      {after: []string{"made"}, another: true, want: "expired "},
		"a claim within its time is nobody's to settle": {after: []string{"made"}, fresh: true, want: "reserved "},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			c.listNode("n", 1<<40)
			c.listNode("elsewhere", 1<<40)
			if len(tt.before) > 0 {
				c.mustReconcile("n", tt.before...)
			}
			placed, _ := c.claim("n", "k", !tt.fresh)
			if tt.another {
				c.claim("n", "k2", false)
			}
			c.claim("elsewhere", "k3", false) // it has no part in this
			if len(tt.after) > 0 {
				c.mustReconcile("n", tt.after...)
			}
			if tt.owned {
				c.exec(`UPDATE bindings SET tenant_id = 'somebody'`)
			}
			feed := c.feed()
			if err := c.settleClaims(t.Context()); err != nil {
				t.Fatalf("settleClaims = %v", err)
			}
			if got := c.outcomeOf(placed); got != tt.want {
				t.Errorf("the placement is %q, want %q", got, tt.want)
			}
			held := int64(0)
			for _, still := range []bool{tt.fresh, tt.another} {
				if still {
					held++
				}
			}
			if got := c.holds("n"); got != held {
				t.Errorf("%d holds, want %d", got, held)
			}
			if tt.want != "confirmed made" {
				if got := c.feed(); got != feed {
					t.Errorf("%d feed rows for a key that came to nothing, want 0", got-feed)
				}
				return
			}
			type owned struct {
				tenant, spread string
				cpu, placement int64
			}
			var got owned
			if err := c.owner.QueryRow(t.Context(), `SELECT tenant_id, spread_key, cpu_millis, placement_id FROM bindings WHERE sandbox_id = 'made'`).
				Scan(&got.tenant, &got.spread, &got.cpu, &got.placement); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(owned{"t", "app", 700, placed}, got, cmp.AllowUnexported(owned{})); diff != "" {
				t.Errorf("the binding (-want +got):\n%s", diff)
			}
			if got := c.feed(); got != feed+1 {
				t.Errorf("%d feed rows, want 1: gateways must see the tenant", got-feed)
			}
		})
	}
}

// TestALateRecordAndTheSettlingOfItsClaimAgree races the gateway that comes back with the sweep, which
// runs on two replicas: one sandbox, bound for the tenant, one confirmed placement, whoever was first.
func TestALateRecordAndTheSettlingOfItsClaimAgree(t *testing.T) {
	t.Parallel()
	const rounds = 12
	c := newCell(t)
	other := c.replica()
	for round := range rounds {
		n := node.ID(fmt.Sprint("n", round))
		box := sandbox.ID(fmt.Sprint("box-", round))
		c.listNode(n, 1<<40)
		placed, reservation := c.claim(n, fmt.Sprint("k", round), true)
		c.mustReconcile(n, string(box))
		var done sync.WaitGroup
		for _, b := range []*Bindings{c.Bindings, other} {
			done.Go(func() {
				if err := b.settleClaims(t.Context()); err != nil {
					t.Errorf("settleClaims = %v", err)
				}
			})
		}
		done.Go(func() {
			late := on(n, box)
			late.Tenant, late.PlacementID, late.ReservationID = "t", placed, reservation
			if _, err := c.Record(t.Context(), late); err != nil {
				t.Errorf("Record = %v", err)
			}
		})
		done.Wait()
		if got, want := c.outcomeOf(placed), "confirmed "+string(box); got != want {
			t.Errorf("round %d: the placement is %q, want %q", round, got, want)
		}
		if row := c.row(box); row.Tenant != "t" || row.State != sandbox.Bound {
			t.Errorf("round %d: %+v, want it bound for its tenant", round, row)
		}
		if held := c.holds(n); held != 0 {
			t.Errorf("round %d: %d holds, want 0: the roster lists the sandbox", round, held)
		}
	}
}

// TestALateRecordAfterItsKeyWasGivenAwayLosesTheKey: two creates, two sandboxes, and the key is the one's
// that claimed it last.
func TestALateRecordAfterItsKeyWasGivenAwayLosesTheKey(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("n", 1<<40)
	first, reservation := c.claim("n", "k", true)
	if err := c.settleClaims(t.Context()); err != nil {
		t.Fatalf("settleClaims = %v", err)
	}
	second, _ := c.claim("n", "k", false)
	late := on("n", "late")
	late.Tenant, late.PlacementID, late.ReservationID = "t", first, reservation
	if _, err := c.Record(t.Context(), late); err != nil && !errors.Is(err, node.ErrReservationOver) {
		t.Errorf("Record = %v, want it bound or refused", err)
	}
	if got := c.outcomeOf(second); got != "reserved " {
		t.Errorf("the second create is %q, want it untouched", got)
	}
	if got := value[int64](c, `SELECT count(*) FROM placements WHERE create_key = 'k' AND outcome IN ('reserved', 'confirmed')`); got != 1 {
		t.Errorf("%d creates have the key, want 1", got)
	}
}
