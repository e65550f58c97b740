package bindings

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

const everythingOlder = `UPDATE bindings SET bound_at = bound_at - interval '1 hour', ended_at = ended_at - interval '1 hour'`

func TestWhoseBindingsAreParked(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		given   string // what happened to a
		want    sandbox.State
		endedBy string
	}{
		"a live node keeps them":                              {`SELECT`, sandbox.Bound, ""},
		"a silent node keeps them, routing decides":           {`UPDATE node_leases SET expires_at = expires_at - interval '1 day' WHERE node_id = 'a'`, sandbox.Bound, ""},
		"an unregistered node loses what came later":          {`UPDATE node_leases SET expires_at = clock_timestamp(), ended_at = clock_timestamp() WHERE node_id = 'a'`, sandbox.Parked, "unregistered"},
		"an absent node that still talks keeps them":          {`UPDATE nodes SET present = false, gone_at = now() - interval '1 hour' WHERE node_id = 'a'`, sandbox.Bound, ""},
		"an absent, silent node keeps them for a while":       {`WITH l AS (UPDATE node_leases SET expires_at = now() - interval '1 hour' WHERE node_id = 'a') UPDATE nodes SET present = false, gone_at = now() - interval '4 minutes' WHERE node_id = 'a'`, sandbox.Bound, ""},
		"an absent node that was silent only now keeps them":  {`WITH l AS (UPDATE node_leases SET expires_at = now() - interval '4 minutes' WHERE node_id = 'a') UPDATE nodes SET present = false, gone_at = now() - interval '1 hour' WHERE node_id = 'a'`, sandbox.Bound, ""},
		"an absent, silent node loses them then":              {`WITH l AS (UPDATE node_leases SET expires_at = now() - interval '6 minutes' WHERE node_id = 'a') UPDATE nodes SET present = false, gone_at = now() - interval '6 minutes' WHERE node_id = 'a'`, sandbox.Parked, "node_gone"},
		"an absent node that was never heard loses them then": {`WITH l AS (DELETE FROM node_leases WHERE node_id = 'a') UPDATE nodes SET present = false, gone_at = now() - interval '6 minutes' WHERE node_id = 'a'`, sandbox.Parked, "node_gone"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			c.listNode("a", time.Hour)
			c.mustRecord(on("a", "s"))
			c.exec(everythingOlder)
			c.exec(tt.given)
			if err := c.parkLost(t.Context()); err != nil {
				t.Fatal(err)
			}
			got := c.row("s")
			if got.State != tt.want || got.EndedBy != tt.endedBy {
				t.Errorf("binding = %+v, want %s by %q", got, tt.want, tt.endedBy)
			}
			parked := tt.want == sandbox.Parked
			if holds := c.holds("a"); (holds == 0) != parked {
				t.Errorf("holds = %d, want them to end with the binding and only then", holds)
			}
			if feed := c.feed(); (feed == 2) != parked {
				t.Errorf("feed rows = %d, want one more where it was parked", feed)
			}
		})
	}
}

func TestAYoungBindingOfANodeThatUnregisteredIsSpared(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.exec(`UPDATE node_leases SET expires_at = clock_timestamp(), ended_at = clock_timestamp() WHERE node_id = 'a'`)
	c.mustRecord(on("a", "s")) // on its way while the node left
	if err := c.parkLost(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := c.row("s").State; got != sandbox.Bound {
		t.Errorf("state = %s, want bound", got)
	}
}

func TestANodeWithVeryManyUnregistersAtOnceAndTheRestIsParkedSoon(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.exec(`INSERT INTO bindings (sandbox_id, state, node_id, origin, bound_at)
	        SELECT 's' || i, 'bound', 'a', 'recorded', now() - interval '1 hour' FROM generate_series(1, $1::int) AS i`, ChangesAtOnce+7)
	var parked int
	err := c.db.Tx(t.Context(), func(tx pgx.Tx) (err error) {
		parked, err = ParkNode(t.Context(), tx, "a")
		return err
	})
	if err != nil || parked != ChangesAtOnce {
		t.Fatalf("ParkNode = %d, %v, want %d", parked, err, ChangesAtOnce)
	}
	c.exec(`UPDATE node_leases SET expires_at = clock_timestamp(), ended_at = clock_timestamp() WHERE node_id = 'a'`)
	if err := c.parkLost(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := value[int64](c, `SELECT count(*) FROM bindings WHERE state = 'parked' AND ended_by = 'unregistered'`); got != ChangesAtOnce+7 {
		t.Errorf("%d are parked, want all %d", got, ChangesAtOnce+7)
	}
}

func TestOneNodesTroubleStopsNoOthers(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	var claims []int64
	for _, id := range []node.ID{"a", "b"} {
		c.listNode(id, time.Hour)
		c.mustReconcile(id, "s-"+string(id))
		placed, _ := c.claim(id, "k-"+string(id), true)
		claims = append(claims, placed)
	}
	c.exec(everythingOlder) // what was adopted is no claim's
	c.exec(`UPDATE node_leases SET expires_at = clock_timestamp(), ended_at = clock_timestamp()`)
	c.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused'; END $$`)
	for _, table := range []string{"bindings", "placements"} {
		c.exec(`CREATE TRIGGER refuse BEFORE UPDATE ON ` + table + ` FOR EACH ROW WHEN (OLD.node_id = 'a') EXECUTE FUNCTION refuse()`)
	}
	for name, pass := range map[string]func(context.Context) error{"parkLost": c.parkLost, "settleClaims": c.settleClaims} {
		if err := pass(t.Context()); err == nil || !strings.Contains(err.Error(), "a: ") {
			t.Errorf("%s = %v, want the trouble of a", name, err)
		}
	}
	if a, b := c.row("s-a").State, c.row("s-b").State; a != sandbox.Bound || b != sandbox.Parked {
		t.Errorf("states are %s and %s, want bound and parked", a, b)
	}
	if a, b := c.outcomeOf(claims[0]), c.outcomeOf(claims[1]); a != "reserved " || b != "expired " {
		t.Errorf("claims are %q and %q, want reserved and expired", a, b)
	}
}

func TestMoreThanOnePassfulIsParkedAndForgotten(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	var ids []string
	for i := range passBatch + 20 {
		ids = append(ids, fmt.Sprintf("s%d", i))
	}
	c.mustReconcile("a", ids...)
	c.exec(everythingOlder)
	c.exec(`UPDATE node_leases SET expires_at = clock_timestamp(), ended_at = clock_timestamp() WHERE node_id = 'a'`)
	count := func(state string) int64 {
		return value[int64](c, `SELECT count(*) FROM bindings WHERE state = $1`, state)
	}

	if err := c.parkLost(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := count("parked"); got != passBatch+20 {
		t.Fatalf("parked = %d, want %d", got, passBatch+20)
	}
	if err := c.forgetParked(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := count("parked"); got != passBatch+20 {
		t.Fatalf("parked = %d, want all of them: they have only just been parked", got)
	}
	c.exec(everythingOlder)
	if err := c.forgetParked(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := value[int64](c, `SELECT count(*) FROM bindings WHERE state = 'gone' AND ended_by = 'node_gone'`); got != passBatch+20 {
		t.Fatalf("gone = %d, want %d", got, passBatch+20)
	}
	if got := c.feed(); got != 3*(passBatch+20) {
		t.Errorf("feed rows = %d, want three a sandbox", got)
	}
	if err := c.forgetGone(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := count("gone"); got != passBatch+20 {
		t.Errorf("gone = %d, want all of them kept for their time", got)
	}
	c.exec(everythingOlder)
	if err := c.forgetGone(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := value[int64](c, `SELECT count(*) FROM bindings`); got != 0 {
		t.Errorf("bindings = %d, want none", got)
	}
}

func TestAPassJudgesNobodyWhileNoHeartbeatsFlow(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.mustRecord(on("a", "s"))
	c.exec(everythingOlder)
	c.exec(`UPDATE node_leases SET expires_at = now() - interval '1 hour', ended_at = now() - interval '1 hour', last_seen_at = now() - interval '1 hour'`)
	f := flow{since: time.Now().Add(-time.Hour)} // it had judged before the outage
	if err := c.park(t.Context(), &f); err != nil {
		t.Fatal(err)
	}
	if got := c.row("s").State; got != sandbox.Bound {
		t.Fatalf("state = %s after an outage, want bound", got)
	}
	c.listNode("b", time.Hour) // heard a moment ago
	f = flow{since: time.Now().Add(-time.Hour)}
	if err := c.park(t.Context(), &f); err != nil {
		t.Fatal(err)
	}
	if got := c.row("s").State; got != sandbox.Parked {
		t.Errorf("state = %s while heartbeats flow, want parked", got)
	}
}
