package nodes

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/placement"
)

// Nodes tell of one another's sandboxes while rosters, records, deletes and ends of leases concern the same
// ids, on two replicas. The database watches every change.
func TestEventsRostersAndRecordsAtOnceKeepEveryInvariant(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.watchEvents()
	cfg, routeCfg := patient()
	routeCfg.Grace, routeCfg.TombstoneGrace = 0, 0 // nothing is spared: every roster acts
	replicas := []*replica{c.replicaWith(cfg, routeCfg), c.replicaWith(cfg, routeCfg)}
	const nodes, sandboxes, workers, rounds = 4, 12, 8, 30
	for i := range nodes {
		id, endpoint := nodeAt(i)
		replicas[0].must(t, beatOf(id, "i1", endpoint))
	}
	some := func(rnd *rand.Rand) []string {
		var ids []string
		for s := range sandboxes {
			if rnd.IntN(3) == 0 {
				ids = append(ids, fmt.Sprintf("s%d", s))
			}
		}
		return ids
	}
	kinds := []bindings.Kind{bindings.KindCreate, bindings.KindCreate, bindings.KindFork, bindings.KindResume, bindings.KindPause, bindings.KindDelete}
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(worker), 5))
			for range rounds {
				r, i := replicas[rnd.IntN(2)], rnd.IntN(nodes)
				id, endpoint := nodeAt(i)
				var err error
				switch rnd.IntN(10) {
				case 0:
					err = r.Unregister(t.Context(), node.ID(id), "i1")
				case 1:
					_, err = r.routes.Release(t.Context(), sandbox.ID(fmt.Sprintf("s%d", rnd.IntN(sandboxes))), 0)
				case 2, 3:
					var all []sandbox.ID
					for _, s := range some(rnd) {
						all = append(all, sandbox.ID(s))
					}
					if len(all) > 0 {
						_, err = r.routes.Record(t.Context(), bindings.Assignment{Sandboxes: all, Node: node.ID(id), Endpoint: endpoint})
					}
				case 4, 5, 6:
					_, err = r.Heartbeat(t.Context(), beatOf(id, "i1", endpoint, some(rnd)...))
				default:
					var events []bindings.Told
					for _, s := range append(some(rnd), some(rnd)...) {
						events = append(events, told(kinds[rnd.IntN(len(kinds))], sandbox.ID(s)))
					}
					err = r.Tell(t.Context(), tellingOf(node.ID(id), "i1", events...))
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	c.checkFeed()
	c.checkHolds()
	if got := value[int64](c, `SELECT count(*) FROM sandbox_events WHERE source = 'node' AND effect = 'bound'`); got == 0 {
		t.Error("no event bound anything: the test saw nothing")
	}
	c.checkLog()

	// At rest the rosters are the truth, and every sandbox is counted by its report alone.
	r := c.replicaWith(cfg, routeCfg)
	c.exec(`UPDATE bindings SET ended_by = 'roster' WHERE ended_by = 'deleted'`)
	for range 2 {
		c.exec(`UPDATE node_leases SET reconcile_due = '-infinity'`)
		for i := range nodes {
			id, endpoint := nodeAt(i)
			r.must(t, beatOf(id, "i1", endpoint, fmt.Sprintf("s%d", i)))
		}
	}
	for i := range nodes {
		id, _ := nodeAt(i)
		got := c.bindings()[sandbox.ID(fmt.Sprintf("s%d", i))]
		if got.State != sandbox.Bound || got.Node != node.ID(id) {
			t.Errorf("at rest: %+v, want it on %s", got, id)
		}
	}
	if got := value[int64](c, `SELECT count(*) FROM bindings WHERE state = 'bound'`); got != nodes {
		t.Errorf("at rest %d are bound, want %d", got, nodes)
	}
	if got := value[int64](c, `SELECT count(*) FROM reservations`); got != 0 {
		t.Errorf("at rest %d holds are left, want none", got)
	}
	c.checkFeed()
	c.checkLog()
	if got := c.deadlocks(append(replicas, r)...); got != 0 {
		t.Errorf("%d deadlocks, want none", got)
	}
}

// watchEvents is watch without its rule about live nodes, which records may break. Events may not.
func (c *cell) watchEvents() {
	c.t.Helper()
	c.exec(`CREATE TABLE changed (key text, revision bigint, state text, node_id text, recorded boolean, xid xid8 DEFAULT pg_current_xact_id())`)
	c.exec(`CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
	        IF TG_OP = 'UPDATE' AND (NEW.state, NEW.node_id, NEW.tenant_id) IS NOT DISTINCT FROM (OLD.state, OLD.node_id, OLD.tenant_id) THEN
	          IF NEW.revision <> OLD.revision THEN RAISE EXCEPTION 'a revision without a change'; END IF;
	          RETURN NEW;
	        END IF;
	        IF TG_OP = 'UPDATE' AND NEW.revision <= OLD.revision THEN RAISE EXCEPTION 'a change without a higher revision'; END IF;
	        IF TG_OP = 'UPDATE' AND OLD.state = 'bound' AND NEW.state = 'bound' AND OLD.origin <> 'event' AND NEW.origin = 'event'
	        THEN RAISE EXCEPTION 'an event took a sandbox from another node'; END IF;
	        INSERT INTO changed VALUES (NEW.sandbox_id, NEW.revision, NEW.state, NEW.node_id, NEW.origin = 'recorded');
	        RETURN NEW; END $$`)
	c.exec(`CREATE TRIGGER watch AFTER INSERT OR UPDATE ON bindings FOR EACH ROW EXECUTE FUNCTION watch()`)
}

// checkLog compares the changes that were watched with the log, by transaction and both ways: it tells of
// each but those of records, and of nothing that did not happen.
func (c *cell) checkLog() {
	c.t.Helper()
	const apartSQL = `
WITH   told AS (
       SELECT xmin::text::bigint AS xid, sandbox_id AS key,
              CASE WHEN effect = 'bound' OR kind IN ('adopted', 'moved', 'revived') THEN 'bound' WHEN kind = 'parked' THEN 'parked' ELSE 'gone' END AS state,
              count(*) AS n
       FROM   sandbox_events
       WHERE  effect IN ('bound', 'ended') OR kind IN ('adopted', 'moved', 'revived', 'parked', 'gone')
       GROUP  BY 1, 2, 3),
       done AS (
       SELECT xid::text::bigint % 4294967296 AS xid, key, state, count(*) AS n, bool_and(state = 'bound' AND recorded) AS recorded
       FROM   changed
       GROUP  BY 1, 2, 3)
SELECT count(*) FROM told FULL JOIN done USING (xid, key, state)
WHERE  told.n IS DISTINCT FROM done.n AND NOT (told.n IS NULL AND done.recorded)`
	if got := value[int64](c, apartSQL); got != 0 {
		c.t.Errorf("%d changes are not in the log, or were none", got)
	}
}

// checkHolds wants every confirmed hold to be of a sandbox that is bound to its node.
func (c *cell) checkHolds() {
	c.t.Helper()
	const straySQL = `SELECT count(*) FROM reservations AS r
		LEFT JOIN bindings AS b ON b.sandbox_id = r.sandbox_id AND b.state = 'bound' AND b.node_id = r.node_id
		WHERE r.sandbox_id IS NOT NULL AND b.sandbox_id IS NULL`
	if got := value[int64](c, straySQL); got != 0 {
		c.t.Errorf("%d holds are of sandboxes that are not bound where the hold is", got)
	}
}

// Creates are told while their gateways record them, and while holds expire and are released: whatever
// comes first, each sandbox that lives is counted once, and nothing else is.
func TestCreatesAreCountedOnceWhileEventsAndRecordsRace(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	replicas := []*replica{c.replica(), c.replica()}
	replicas[0].must(t, beatOf("a", "i1", endpointA))
	const rounds = 12
	for round := range rounds {
		c.openHold(fmt.Sprintf("018f0000-0000-7000-8000-00000001%04d", round), false, 500, "")
		c.openHold(fmt.Sprintf("018f0000-0000-7000-8000-00000002%04d", round), false, 700, "")
		ids := []sandbox.ID{sandbox.ID(fmt.Sprintf("s-%d", round)), sandbox.ID(fmt.Sprintf("u-%d", round))}
		var wg sync.WaitGroup
		for i, id := range ids {
			wg.Go(func() {
				if err := replicas[i].Tell(t.Context(), tellingOf("a", "i1", told(bindings.KindCreate, id))); err != nil {
					t.Error(err)
				}
			})
			wg.Go(func() {
				_, err := replicas[1-i].routes.Record(t.Context(), bindings.Assignment{Sandboxes: []sandbox.ID{id}, Node: "a", Endpoint: endpointA})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	if got := value[int64](c, `SELECT count(*) FROM reservations WHERE sandbox_id IS NULL`); got != 0 {
		t.Errorf("%d holds are still open, want every create to have taken its own", got)
	}
	if got := value[int64](c, `SELECT count(*) FROM reservations`); got != 2*rounds {
		t.Errorf("%d holds, want %d: one a sandbox", got, 2*rounds)
	}
	c.checkHolds()
	// Unregistering gives all of it back.
	if err := replicas[0].Unregister(t.Context(), "a", "i1"); err != nil {
		t.Fatal(err)
	}
	if got := value[int64](c, `SELECT count(*) FROM reservations`); got != 0 {
		t.Errorf("%d holds after unregistering, want none", got)
	}
	if got := c.deadlocks(replicas...); got != 0 {
		t.Errorf("%d deadlocks, want none", got)
	}
}

// The control of the hold's test: an arrival that leaves the create's hold alone is seen.
func TestAnArrivalThatTakesNoHoldIsCountedTwice(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA))
	c.openHold(first, false, 500, "")
	err := r.db.Tx(t.Context(), func(tx pgx.Tx) error {
		_, err := placement.Arrive(t.Context(), tx, "a", []placement.Arrival{{Sandbox: "s"}}) // not said to be created
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := len(c.holdRows()); got != 2 {
		t.Errorf("%d holds, want the create's and the arrival's: the count tells them apart", got)
	}
}
