package nodes

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
)

// watch lets the database itself see every change of a binding, and refuse what no replica may do: a
// revision that falls, a change without a revision, a roster that takes a sandbox from a live node.
// Changes that gateways must hear of are noted in table changed.
func (c *cell) watch() {
	c.t.Helper()
	c.exec(`CREATE TABLE changed (key text, revision bigint, state text, node_id text, xid xid8 DEFAULT pg_current_xact_id())`)
	c.exec(`CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
	        IF TG_OP = 'UPDATE' AND (NEW.state, NEW.node_id, NEW.tenant_id) IS NOT DISTINCT FROM (OLD.state, OLD.node_id, OLD.tenant_id) THEN
	          IF NEW.revision <> OLD.revision THEN RAISE EXCEPTION 'a revision without a change'; END IF;
	          RETURN NEW;
	        END IF;
	        IF TG_OP = 'UPDATE' AND NEW.revision <= OLD.revision THEN RAISE EXCEPTION 'a change without a higher revision'; END IF;
	        IF TG_OP = 'UPDATE' AND OLD.state = 'bound' AND NEW.state = 'bound' AND NEW.node_id <> OLD.node_id AND EXISTS (
	          SELECT 1 FROM node_leases AS l WHERE l.node_id = OLD.node_id AND l.ended_at IS NULL AND l.expires_at > clock_timestamp())
	        THEN RAISE EXCEPTION 'taken from a live node'; END IF;
	        INSERT INTO changed VALUES (NEW.sandbox_id, NEW.revision, NEW.state, NEW.node_id);
	        RETURN NEW; END $$`)
	c.exec(`CREATE TRIGGER watch AFTER INSERT OR UPDATE ON bindings FOR EACH ROW EXECUTE FUNCTION watch()`)
}

// checkFeed compares the changes that were watched with the feed's rows of bindings, both ways.
func (c *cell) checkFeed() {
	c.t.Helper()
	const apart = `SELECT count(*) FROM changed AS c
	        FULL JOIN (SELECT * FROM route_feed WHERE kind = 'binding') AS f
	        ON f.key = c.key AND f.revision = c.revision AND f.state = c.state AND f.node_id = c.node_id AND f.xid = c.xid
	        WHERE c.key IS NULL OR f.key IS NULL`
	if got := value[int64](c, apart); got != 0 {
		c.t.Errorf("%d changes have no feed row of their own, or feed rows no change", got)
	}
	if got := value[int64](c, `SELECT count(*) FROM changed`); got == 0 {
		c.t.Error("no change was watched: the test saw nothing")
	}
}

// deadlocks returns how many the database has seen. The replicas are closed for it: a session tells its
// numbers at the latest when it ends.
func (c *cell) deadlocks(replicas ...*replica) int64 {
	c.t.Helper()
	for _, r := range replicas {
		r.db.Close()
	}
	for value[int64](c, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pgtest as %'`) > 0 {
		if c.t.Context().Err() != nil {
			c.t.Fatal("sessions of closed pools do not end")
		}
	}
	return value[int64](c, `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`)
}

func nodeAt(i int) (id, endpoint string) {
	return fmt.Sprintf("n%02d", i), fmt.Sprintf("http://127.0.0.1:%d", 8000+i)
}

func TestHeartbeatsInAnyOrderOnTwoReplicasWriteOnlyLeases(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	replicas := []*replica{c.replica(), c.replica()}
	const nodes = 30
	beats := make([]Beat, nodes)
	for i := range beats {
		id, endpoint := nodeAt(i)
		beats[i] = beatOf(id, "i1", endpoint, fmt.Sprintf("s%d", i))
		replicas[0].must(t, beats[i])
	}
	before := without(c.versions(), "node_leases")
	var wg sync.WaitGroup
	for worker := range 16 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(worker), 2))
			for range 40 {
				b := beats[rnd.IntN(nodes)]
				if _, err := replicas[rnd.IntN(2)].Heartbeat(t.Context(), b); err != nil {
					t.Errorf("Heartbeat(%s) = %v", b.Node, err)
				}
			}
		})
	}
	wg.Wait()
	if diff := cmp.Diff(before, without(c.versions(), "node_leases")); diff != "" {
		t.Errorf("row versions of other tables (-before +after):\n%s", diff)
	}
	if got := c.deadlocks(replicas...); got != 0 {
		t.Errorf("%d deadlocks, want none", got)
	}
}

// Whole batches of the same nodes, each in another order: what is locked by one is left out by the other,
// and takes the slow path.
func TestBatchesOfTheSameNodesInAnyOrderDoNotDeadlock(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	replicas := []*replica{c.replica(), c.replica()}
	const nodes = 60
	beats := make([]*prepared, nodes)
	for i := range beats {
		id, endpoint := nodeAt(i)
		b := beatOf(id, "i1", endpoint)
		replicas[0].must(t, b)
		p, err := replicas[0].prepare(b)
		if err != nil {
			t.Fatal(err)
		}
		beats[i] = p
	}
	var (
		wg      sync.WaitGroup
		renewed atomic.Int64
	)
	for worker := range 6 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(worker), 4))
			mine := slices.Clone(beats)
			for range 25 {
				rnd.Shuffle(len(mine), func(i, j int) { mine[i], mine[j] = mine[j], mine[i] })
				answers, err := replicas[worker%2].renewOnce(t.Context(), withTTL(columns(mine)))
				if err != nil {
					t.Errorf("renew = %v", err)
				}
				renewed.Add(int64(len(answers)))
			}
		})
	}
	wg.Wait()
	if renewed.Load() < nodes {
		t.Errorf("%d leases were renewed, want some in each batch: the test did nothing", renewed.Load())
	}
	if got := c.deadlocks(replicas...); got != 0 {
		t.Errorf("%d deadlocks, want none", got)
	}
}

func withTTL(args pgx.StrictNamedArgs) pgx.StrictNamedArgs {
	args["ttl"] = time.Minute
	return args
}

// Nodes claim each other's sandboxes, fall silent, unregister and come back, while both replicas run
// their loops. The database watches every change.
func TestRostersAtOnceKeepEveryInvariant(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.watch()
	cfg, routeCfg := patient()
	routeCfg.Grace, routeCfg.TombstoneGrace = 0, 0 // nothing is spared: every roster acts
	replicas := []*replica{c.replicaWith(cfg, routeCfg), c.replicaWith(cfg, routeCfg)}
	const nodes, sandboxes = 6, 10
	beat := func(i int, rnd *rand.Rand) Beat {
		id, endpoint := nodeAt(i)
		var ids []string
		for s := range sandboxes {
			if rnd.IntN(2) == 0 {
				ids = append(ids, fmt.Sprintf("s%d", s))
			}
		}
		return beatOf(id, "i1", endpoint, ids...)
	}
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(worker), 3))
			for range 30 {
				r, i := replicas[rnd.IntN(2)], rnd.IntN(nodes)
				id, _ := nodeAt(i)
				var err error
				switch rnd.IntN(12) {
				case 0:
					err = r.Unregister(t.Context(), node.ID(id), "i1")
				case 1:
					_, err = c.Exec(t.Context(), `UPDATE node_leases SET expires_at = clock_timestamp() - interval '1 second' WHERE node_id = $1`, id)
				case 2:
					_, err = r.routes.Release(t.Context(), sandbox.ID(fmt.Sprintf("s%d", rnd.IntN(sandboxes))), 0)
				case 3:
					err = r.due(t.Context())
				default:
					_, err = r.Heartbeat(t.Context(), beat(i, rnd))
				}
				if err != nil && !errors.Is(err, pgdb.ErrPoolWait) { // the pools are small: on a slow machine some are sent away
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	c.checkFeed()
	if got := c.deadlocks(replicas...); got != 0 {
		t.Errorf("%d deadlocks, want none", got)
	}

	// At rest the rosters are the truth, whoever says so.
	r := c.replicaWith(cfg, routeCfg)
	c.exec(`UPDATE bindings SET ended_by = 'roster' WHERE ended_by = 'deleted'`)
	for range 2 { // what another node lets go in the first round is adopted in the second
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
	c.checkFeed()
}

// Records race with the rosters of the nodes they name: a sandbox is adopted or recorded first, and ends
// up bound once, counted once.
func TestRecordsRaceWithTheRostersThatAdopt(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.watch()
	cfg, routeCfg := patient()
	routeCfg.Grace = time.Hour // each roster lists its round's sandbox alone, and on a slow machine there are many seconds of them
	replicas := []*replica{c.replicaWith(cfg, routeCfg), c.replicaWith(cfg, routeCfg)}
	for i := range 2 {
		id, endpoint := nodeAt(i)
		replicas[0].must(t, beatOf(id, "i1", endpoint))
	}
	const rounds = 25
	for round := range rounds {
		var wg sync.WaitGroup
		for i := range 2 {
			id, endpoint := nodeAt(i)
			s := fmt.Sprintf("s%d-%d", i, round)
			wg.Go(func() {
				if _, err := replicas[round%2].Heartbeat(t.Context(), beatOf(id, "i1", endpoint, s)); err != nil {
					t.Error(err)
				}
			})
			wg.Go(func() {
				_, err := replicas[(round+i)%2].routes.Record(t.Context(), bindings.Assignment{
					Sandboxes: []sandbox.ID{sandbox.ID(s)}, Node: node.ID(id), Endpoint: endpoint, Tenant: "t",
					Size: sandbox.Size{CPUMillis: 100, MemoryBytes: 1},
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	if got := value[int64](c, `SELECT count(*) FROM bindings WHERE state = 'bound' AND tenant_id = 't' AND cpu_millis = 100`); got != 2*rounds {
		t.Errorf("%d bindings are bound and known as the tenant's, want %d", got, 2*rounds)
	}
	c.checkFeed()
	// Each is counted by its roster, or by a hold until the next one.
	c.exec(`UPDATE node_leases SET reconcile_due = '-infinity'`)
	for i := range 2 {
		id, endpoint := nodeAt(i)
		ids := make([]string, rounds)
		for round := range ids {
			ids[round] = fmt.Sprintf("s%d-%d", i, round)
		}
		replicas[0].must(t, beatOf(id, "i1", endpoint, ids...))
	}
	if got := value[int64](c, `SELECT count(*) FROM reservations`); got != 0 {
		t.Errorf("%d holds are left, want none: the reports count every sandbox", got)
	}
	if got := c.deadlocks(replicas...); got != 0 {
		t.Errorf("%d deadlocks, want none", got)
	}
}

// A heartbeat whose caller has left does not end in a commit.
func TestACallerThatLeftChangesNothing(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA, "s1"))
	before := c.versions()
	ctx, leave := context.WithTimeout(t.Context(), time.Nanosecond)
	defer leave()
	<-ctx.Done()
	if _, err := r.Heartbeat(ctx, beatOf("a", "i1", endpointA, "s1", "s2")); err == nil {
		t.Error("Heartbeat = nil, want its caller's end")
	}
	r.must(t, beatOf("b", "i1", endpointB)) // the batcher goes on
	after := c.versions()
	if before["bindings"] != after["bindings"] {
		t.Error("the roster of a caller that left was believed")
	}
}
