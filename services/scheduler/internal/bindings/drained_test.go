package bindings

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// parkDrained parks what is bound to n as the end of a drain does.
func (c *cell) parkDrained(n node.ID) {
	c.t.Helper()
	err := c.db.Tx(c.t.Context(), func(tx pgx.Tx) error {
		if err := pgdb.Lock(c.t.Context(), tx, advisory.Node(n)); err != nil {
			return err
		}
		_, err := ParkDrained(c.t.Context(), tx, n)
		return err
	})
	if err != nil {
		c.t.Fatalf("ParkDrained(%s) = %v", n, err)
	}
}

func TestWhatADrainParkedIsForgottenOnlyWithItsNode(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		given string
		want  sandbox.State
	}{
		"while its node lives and is cordoned":   {`SELECT`, sandbox.Parked},
		"when its node is silent for a while":    {`UPDATE node_leases SET expires_at = now() - interval '1 minute'`, sandbox.Parked},
		"when its node is silent for long":       {`UPDATE node_leases SET expires_at = now() - interval '1 hour'`, sandbox.Gone},
		"when its node has unregistered":         {`UPDATE node_leases SET ended_at = now()`, sandbox.Gone},
		"when its node is open and lists it not": {`UPDATE nodes SET cordoned = false`, sandbox.Gone},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			c.listNode("a", time.Hour)
			c.mustRecord(on("a", "s"))
			c.exec(`UPDATE nodes SET cordoned = true`)
			c.parkDrained("a")
			if got := c.row("s"); got.State != sandbox.Parked || got.EndedBy != "drain" || c.holds("a") != 0 {
				t.Fatalf("binding = %+v with %d holds, want it parked without any", got, c.holds("a"))
			}
			c.exec(everythingOlder)
			c.exec(tt.given)
			if err := c.forgetParked(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := c.row("s"); got.State != tt.want {
				t.Errorf("binding = %+v, want it %s", got, tt.want)
			}
		})
	}
}

// The reservation's room was given back, so to record it now is to land anew.
func TestALateRecordFindsNoRoomOnANodeThatIsCordoned(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		given string
		want  error
	}{
		"open":     {`SELECT`, nil},
		"cordoned": {`UPDATE nodes SET cordoned = true`, node.ErrReservationOver},
		"drained":  {`UPDATE nodes SET drain_id = 1`, node.ErrReservationOver},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			c.listNode("a", time.Hour)
			c.exec(tt.given)
			late := on("a", "s")
			late.ReservationID = "0192f0c1-2d3e-7000-8000-000000000001" // nobody holds it any more
			if _, err := c.Record(t.Context(), late); !errors.Is(err, tt.want) {
				t.Errorf("Record = %v, want %v", err, tt.want)
			}
		})
	}
}
