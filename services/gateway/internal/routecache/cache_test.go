package routecache

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"berth/migrations"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// running is a cache on a database of its own, with its loader running.
type running struct {
	*Cache
	t     *testing.T
	admin *pgdb.DB
	pool  *pgdb.DB
}

func newRunning(t *testing.T, change func(*Config)) *running {
	t.Helper()
	d := pgtest.New(t, migrations.FS)
	cfg := DefaultConfig()
	if change != nil {
		change(&cfg)
	}
	pool := d.As(t, "berth_gateway")
	c := New(pool, cfg, slog.New(slog.NewTextHandler(t.Output(), nil)), nil)
	ctx, cancel := context.WithCancel(context.Background())
	var run sync.WaitGroup
	run.Go(func() { _ = c.Run(ctx) })
	t.Cleanup(func() { cancel(); run.Wait() })
	r := &running{Cache: c, t: t, admin: d.DB, pool: pool}
	r.exec(`INSERT INTO nodes (node_id, endpoint, source, capabilities) VALUES ('n1', 'http://127.0.0.1:8001', 'registered', '{route_revision}'),
		('n2', 'http://127.0.0.1:8002', 'static', '{}')`)
	return r
}

func (r *running) exec(sql string, args ...any) {
	r.t.Helper()
	if _, err := r.admin.Exec(r.t.Context(), sql, args...); err != nil {
		r.t.Fatal(err)
	}
}

func (r *running) bind(id, n string, revision int64) {
	r.t.Helper()
	r.exec(`INSERT INTO bindings (sandbox_id, state, node_id, revision, origin, tenant_id) VALUES (@id, 'bound', @node, @revision, 'recorded', 't1')
		ON CONFLICT (sandbox_id) DO UPDATE SET node_id = @node, revision = @revision, state = 'bound', ended_at = NULL, ended_by = NULL`,
		pgx.StrictNamedArgs{"id": id, "node": n, "revision": revision})
}

// vouch does what the feed does with each poll.
func (r *running) vouch() { r.Confirm(time.Now()) }

// cut makes every read of the cache fail until the test ends.
func (r *running) cut() {
	r.t.Helper()
	r.exec("REVOKE SELECT ON bindings, nodes, feed_meta FROM berth_gateway")
}

func bound(id sandbox.ID, n node.ID, revision sandbox.Revision) route.Route {
	return route.Route{Sandbox: id, Node: n, Revision: revision, Incarnation: 1, State: sandbox.Bound}
}

func TestOnlyAHigherRevisionReplacesAnEntry(t *testing.T) {
	t.Parallel()
	c := New(nil, DefaultConfig(), slog.New(slog.DiscardHandler), nil)
	c.Confirm(time.Now())
	n1, _ := NewNode("n1", "http://127.0.0.1:1", nil, false, 1)
	n2, _ := NewNode("n2", "http://127.0.0.1:2", nil, false, 1)
	c.ApplyNodes([]*Node{n1, n2})
	gone := bound("s", "n2", 7)
	gone.State = sandbox.Gone
	for _, step := range []struct {
		say  route.Route
		want node.ID // "" is gone
	}{
		{bound("s", "n1", 5), "n1"},
		{bound("s", "n2", 4), "n1"},
		{bound("s", "n2", 5), "n1"},
		{bound("s", "n2", 6), "n2"},
		{gone, ""},
		{bound("s", "n1", 6), ""},
		{bound("s", "n1", 7), ""},
		{bound("s", "n1", 8), "n1"},
	} {
		c.Apply([]route.Route{step.say})
		f, err := c.Lookup(t.Context(), "s")
		if step.want == "" && !errors.Is(err, sandbox.ErrNotFound) || step.want != "" && f.Route.Node != step.want {
			t.Fatalf("after %+v: %+v, %v; want %q", step.say, f, err, step.want)
		}
	}
}

func TestATenantIsFilledInWithoutANewRevision(t *testing.T) {
	t.Parallel()
	c := New(nil, DefaultConfig(), slog.New(slog.DiscardHandler), nil)
	tenant := func() string { return c.shards.get("s").route.Tenant }
	adopted := bound("s", "n1", 5)
	recorded := adopted
	recorded.Tenant = "t1"
	c.Put(adopted)
	if c.Put(recorded); tenant() != "t1" {
		t.Errorf("tenant %q after it was recorded", tenant())
	}
	if c.Put(adopted); tenant() != "t1" {
		t.Errorf("tenant %q after the older row came again", tenant())
	}
}

func TestAMissIsOneReadForAllWhoWait(t *testing.T) {
	t.Parallel()
	r := newRunning(t, nil)
	r.bind("s1", "n1", 5)
	r.vouch()
	var wrong atomic.Int32
	var callers sync.WaitGroup
	start := make(chan struct{})
	impatient, leave := context.WithCancel(t.Context())
	leave()
	for i := range 200 {
		callers.Go(func() {
			<-start
			ctx := t.Context()
			if i%2 == 0 {
				ctx = impatient // leaves at once, and takes nobody's answer with it
			}
			f, err := r.Lookup(ctx, "s1")
			if i%2 == 1 && (err != nil || f.Node.ID != "n1" || f.Tenant != "t1") {
				wrong.Add(1)
			}
		})
	}
	before := r.pool.Stat().AcquireCount()
	close(start)
	callers.Wait()
	if wrong.Load() != 0 {
		t.Errorf("%d callers did not get the route", wrong.Load())
	}
	// One read of the binding, and of the node for as many callers as saw the binding before it.
	if reads := r.pool.Stat().AcquireCount() - before; reads > 110 {
		t.Errorf("%d reads for 200 callers", reads)
	}
	before = r.pool.Stat().AcquireCount()
	for range 1000 {
		if _, err := r.Lookup(t.Context(), "s1"); err != nil {
			t.Fatal(err)
		}
	}
	if reads := r.pool.Stat().AcquireCount() - before; reads != 0 {
		t.Errorf("warm look-ups cost %d reads", reads)
	}
}

func TestAnAbsentSandboxIsRememberedUntilSomethingIsSaid(t *testing.T) {
	t.Parallel()
	r := newRunning(t, func(c *Config) { c.AbsentFor = time.Hour })
	r.vouch()
	missing := func() {
		t.Helper()
		if _, err := r.Lookup(t.Context(), "s1"); !errors.Is(err, sandbox.ErrNotFound) {
			t.Fatalf("Lookup = %v, want not found", err)
		}
	}
	missing()
	before := r.pool.Stat().AcquireCount()
	missing()
	if reads := r.pool.Stat().AcquireCount() - before; reads != 0 {
		t.Errorf("the second look-up cost %d reads", reads)
	}
	r.Put(bound("s1", "n1", 3)) // a create of our own
	if f, err := r.Lookup(t.Context(), "s1"); err != nil || f.Node.Address != "127.0.0.1:8001" {
		t.Errorf("after a create: %+v, %v", f, err)
	}
}

// TestAnAnswerOlderThanTheFeedIsNotRemembered is the race of a read that finds nothing with a row
// of the feed that says otherwise.
func TestAnAnswerOlderThanTheFeedIsNotRemembered(t *testing.T) {
	t.Parallel()
	l := &loader{}
	l.init(DefaultConfig())
	quiet, _ := l.ask("quiet", 0, 1)
	told, _ := l.ask("told", 0, 1)
	l.take()
	l.told("told")
	l.finish(quiet, true, nil, 1)
	l.finish(told, true, nil, 1)
	if !l.isAbsent("quiet", 2) || l.isAbsent("told", 2) {
		t.Errorf("absent: quiet %v, told %v; want true, false", l.isAbsent("quiet", 2), l.isAbsent("told", 2))
	}
	if l.isAbsent("quiet", 1+int64(time.Second)) {
		t.Error("absence is remembered for over a second")
	}
}

func TestAbsentIdsHaveABound(t *testing.T) {
	t.Parallel()
	cfg := DefaultConfig()
	cfg.MaxAbsent = 100
	l := &loader{}
	l.init(cfg)
	for i := range 1000 {
		id := sandbox.ID(fmt.Sprint("s", i))
		c, _ := l.ask(id, 0, 1)
		l.take()
		l.finish(c, true, nil, 1)
	}
	if len(l.absent) > 100 || len(l.order) > 100 || !l.isAbsent("s999", 2) {
		t.Errorf("%d ids, %d in order", len(l.absent), len(l.order))
	}
}

func TestEntriesHaveABoundAndTheLeastUsedGo(t *testing.T) {
	t.Parallel()
	cfg := DefaultConfig()
	cfg.MaxEntries = 6400
	c := New(nil, cfg, slog.New(slog.DiscardHandler), nil)
	c.Confirm(time.Now())
	n1, _ := NewNode("n1", "http://127.0.0.1:1", nil, false, 1)
	c.ApplyNodes([]*Node{n1})
	for i := range 100 { // in use all the time
		c.Apply([]route.Route{bound(sandbox.ID(fmt.Sprint("hot", i)), "n1", 1)})
	}
	for i := range 30_000 {
		c.Apply([]route.Route{bound(sandbox.ID(fmt.Sprint("cold", i)), "n1", 1)})
		if s := c.shards.get(sandbox.ID(fmt.Sprint("hot", i%100))); s != nil {
			s.used.Store(c.now())
		}
	}
	if n := c.Len(); n > cfg.MaxEntries {
		t.Errorf("%d entries, at most %d", n, cfg.MaxEntries)
	}
	kept := 0
	for i := range 100 {
		if c.shards.get(sandbox.ID(fmt.Sprint("hot", i))) != nil {
			kept++
		}
	}
	if kept < 90 {
		t.Errorf("%d of 100 entries in use are left", kept)
	}
}

func TestUnconfirmedEntriesAreReadAgainAtMostOnceASecond(t *testing.T) {
	t.Parallel()
	r := newRunning(t, nil)
	r.bind("s1", "n1", 5)
	if f, err := r.Lookup(t.Context(), "s1"); err != nil || f.Node.ID != "n1" {
		t.Fatalf("%+v, %v", f, err)
	}
	before := r.pool.Stat().AcquireCount()
	for range 100 {
		if f, err := r.Lookup(t.Context(), "s1"); err != nil || f.Stale {
			t.Fatalf("%+v, %v", f, err)
		}
	}
	if reads := r.pool.Stat().AcquireCount() - before; reads != 0 {
		t.Errorf("%d reads within a second", reads)
	}
	r.bind("s1", "n2", 6) // nobody tells
	began := time.Now()
	eventually(t, "the move is seen without the feed", func() bool {
		f, err := r.Lookup(t.Context(), "s1")
		return err == nil && f.Route.Node == "n2"
	})
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("seen after %s", took)
	}
}

func TestWithoutPostgreSQLKnownRoutesAreServedAndMarked(t *testing.T) {
	t.Parallel()
	r := newRunning(t, func(c *Config) {
		c.Bound, c.RecheckEvery, c.LookupTimeout, c.StaleLimit = 50*time.Millisecond, 50*time.Millisecond, 300*time.Millisecond, 3*time.Second
	})
	r.bind("s1", "n1", 5)
	r.vouch()
	if _, err := r.Lookup(t.Context(), "s1"); err != nil {
		t.Fatal(err)
	}
	r.Put(route.Route{Sandbox: "ended", Node: "n1", Revision: 9, State: sandbox.Gone})
	r.cut()
	eventually(t, "the route is served as stale", func() bool {
		f, err := r.Lookup(t.Context(), "s1")
		if err != nil {
			t.Fatalf("a known route failed: %v", err)
		}
		return f.Stale
	})
	slow := 0
	for range 100 {
		began := time.Now()
		if _, err := r.Lookup(t.Context(), "s1"); err != nil {
			t.Fatal(err)
		}
		if time.Since(began) > 100*time.Millisecond {
			slow++
		}
	}
	if slow > 2 {
		t.Errorf("%d of 100 look-ups waited for the database", slow)
	}
	for _, id := range []sandbox.ID{"never-seen", "ended"} {
		if _, err := r.Lookup(t.Context(), id); !errors.Is(err, ErrUnavailable) {
			t.Errorf("Lookup(%s) = %v, want unavailable: absence is not known", id, err)
		}
	}
	eventually(t, "the limit ends it", func() bool {
		_, err := r.Lookup(t.Context(), "s1")
		return errors.Is(err, ErrUnavailable)
	})
	r.exec("GRANT SELECT ON bindings, nodes, feed_meta TO berth_gateway")
	eventually(t, "it comes back by itself", func() bool {
		f, err := r.Lookup(t.Context(), "s1")
		return err == nil && !f.Stale
	})
}

func TestAReadThatFailsIsTriedAgainWithinItsTime(t *testing.T) {
	t.Parallel()
	r := newRunning(t, nil)
	r.bind("s1", "n1", 5)
	r.vouch()
	r.cut()
	got := make(chan error, 1)
	go func() {
		_, err := r.Lookup(t.Context(), "s1")
		got <- err
	}()
	eventually(t, "a read has failed", r.down.Load)
	r.exec("GRANT SELECT ON bindings, nodes, feed_meta TO berth_gateway")
	if err := <-got; err != nil {
		t.Errorf("Lookup = %v", err)
	}
}

func TestAnotherDatabaseEmptiesTheCacheAndIsRefusedUntilTheFeedIsThere(t *testing.T) {
	t.Parallel()
	r := newRunning(t, func(c *Config) { c.LookupTimeout = 300 * time.Millisecond })
	r.bind("s1", "n1", 5)
	r.vouch()
	if _, err := r.Lookup(t.Context(), "s1"); err != nil {
		t.Fatal(err)
	}
	generation := r.Reset("1/2/00000009/of-another")
	if r.Len() != 0 || r.Fresh() {
		t.Error("a reset left something")
	}
	r.vouch()
	if _, err := r.Lookup(t.Context(), "s1"); !errors.Is(err, ErrUnavailable) {
		t.Errorf("a look-up on another database than the feed's gave %v", err)
	}
	r.Fill(generation-1, []route.Route{bound("s1", "n1", 5)})
	if r.Len() != 0 {
		t.Error("what was read before the reset was stored after it")
	}
	r.Fill(generation, []route.Route{bound("s1", "n1", 5)})
	if r.Len() != 1 {
		t.Error("what was read after the reset was not stored")
	}
}

func TestSuspectReadsBindingAndNodeAndNeverEndsARoute(t *testing.T) {
	t.Parallel()
	r := newRunning(t, nil)
	r.bind("s1", "n1", 5)
	r.vouch()
	f, err := r.Lookup(t.Context(), "s1")
	if err != nil {
		t.Fatal(err)
	}
	now, lost, err := r.Suspect(t.Context(), f)
	if err != nil || !lost || now.Node.ID != "n1" {
		t.Errorf("a node without a lease: %+v, lost %v, %v", now, lost, err)
	}
	r.exec(`INSERT INTO node_leases (expires_at, last_seen_at, reported_at_unix_ms, facts_digest, roster_digest, node_id, service_instance_id, place)
		SELECT clock_timestamp() + interval '30 s', clock_timestamp(), 0, '', '', node_id, 'i', '' FROM nodes`)
	r.bind("s1", "n2", 6)
	r.suspects.asked = map[node.ID]int64{}
	now, lost, err = r.Suspect(t.Context(), f)
	if err != nil || lost || now.Route.Node != "n2" {
		t.Errorf("after a move: %+v, lost %v, %v", now, lost, err)
	}
	r.bind("s1", "n1", 7)
	now, _, err = r.Suspect(t.Context(), now) // n2 is looked at for the first time
	if err != nil || now.Route.Node != "n1" {
		t.Errorf("after the move back: %+v, %v", now, err)
	}
	r.cut()
	r.suspects.asked = map[node.ID]int64{}
	if now, _, err = r.Suspect(t.Context(), now); err != nil || now.Route.Node != "n1" {
		t.Errorf("when nothing can be read: %+v, %v; want the route as it was", now, err)
	}
}

func TestRecheckReadsUntilTheRevisionIsThere(t *testing.T) {
	t.Parallel()
	r := newRunning(t, nil)
	r.bind("s1", "n1", 5)
	r.vouch()
	if _, err := r.Lookup(t.Context(), "s1"); err != nil {
		t.Fatal(err)
	}
	got := make(chan Found, 1)
	go func() {
		f, err := r.Recheck(t.Context(), "s1", 8)
		if err != nil {
			t.Error(err)
		}
		got <- f
	}()
	r.bind("s1", "n2", 7)
	r.bind("s1", "n2", 8)
	if f := <-got; f.Revision != 8 || f.Route.Node != "n2" {
		t.Errorf("Recheck = %+v", f)
	}
	if _, err := r.Recheck(t.Context(), "s1", 99); !errors.Is(err, ErrUnavailable) {
		t.Errorf("a revision that never comes: %v", err)
	}
}

func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !holds() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 10 s: %s", what)
		}
		<-tick.C
	}
}
