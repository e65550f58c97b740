package nodes

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/internal/route"
)

const endpointC = "http://10.1.2.3:8000"

// listed is a node's row as discovery sees it.
type listed struct {
	ID        node.ID
	Endpoint  string
	Source    string
	Trusted   bool
	Present   bool
	Lingering bool
}

func (c *cell) listed() []listed {
	c.t.Helper()
	rows, err := c.Query(c.t.Context(), `SELECT node_id, endpoint, source, trusted, present, lingering FROM nodes ORDER BY node_id`)
	if err != nil {
		c.t.Fatalf("read nodes: %v", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[listed])
	if err != nil {
		c.t.Fatalf("read nodes: %v", err)
	}
	return list
}

// writer claims the lease.
func (r *replica) writer(t *testing.T, holder string) Writer {
	t.Helper()
	w, err := r.ClaimWriter(t.Context(), holder)
	if err != nil {
		t.Fatalf("ClaimWriter(%s) = %v, want the lease", holder, err)
	}
	return w
}

// discover applies a list whose nodes are all fit.
func (r *replica) discover(t *testing.T, w Writer, nodes ...DiscoveredNode) {
	t.Helper()
	if unfit, err := r.ApplyDiscovered(t.Context(), w, nodes); err != nil || len(unfit) > 0 {
		t.Fatalf("ApplyDiscovered(%v) = %v, %v, want all applied", nodes, unfit, err)
	}
}

func TestKubernetesNodesAreExactlyThoseListed(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	w := r.writer(t, "one")
	r.discover(t, w, DiscoveredNode{ID: "a", Endpoint: endpointC}, DiscoveredNode{ID: "b", Endpoint: endpointA, Lingering: true})
	a := listed{ID: "a", Endpoint: endpointC, Source: "kubernetes", Present: true}
	b := listed{ID: "b", Endpoint: endpointA, Source: "kubernetes", Present: true, Lingering: true}
	if diff := cmp.Diff([]listed{a, b}, c.listed()); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	if got := c.feed(); got != 2 {
		t.Errorf("feed rows = %d, want one for each node", got)
	}
	changed := value[time.Time](c, `SELECT max(changed_at) FROM nodes`)
	r.discover(t, w, DiscoveredNode{ID: "b", Endpoint: endpointA, Lingering: true}, DiscoveredNode{ID: "a", Endpoint: endpointC})
	if got := value[time.Time](c, `SELECT max(changed_at) FROM nodes`); !got.Equal(changed) {
		t.Error("the same list again wrote rows")
	}
	r.discover(t, w, DiscoveredNode{ID: "b", Endpoint: endpointB})
	a.Present = false
	b.Endpoint, b.Lingering = endpointB, false
	if diff := cmp.Diff([]listed{a, b}, c.listed()); diff != "" {
		t.Errorf("nodes after a left and b moved (-want +got):\n%s", diff)
	}
	if got := c.feed(); got != 3 {
		t.Errorf("feed rows = %d, want one more for the endpoint that moved", got)
	}
	r.discover(t, w)
	b.Present = false
	if diff := cmp.Diff([]listed{a, b}, c.listed()); diff != "" {
		t.Errorf("nodes after an empty list (-want +got):\n%s", diff)
	}
}

// A source only removes what it added, and one id has one source: static before Kubernetes before registered.
func TestEachSourceKeepsToItsOwnRows(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	w := r.writer(t, "one")
	if err := r.ApplyStatic(t.Context(), []StaticNode{{ID: "static", Endpoint: endpointA}}); err != nil {
		t.Fatal(err)
	}
	r.must(t, beatOf("registered", "i1", endpointB, "s"))
	static := listed{ID: "static", Endpoint: endpointA, Source: "static", Trusted: true, Present: true}
	registered := listed{ID: "registered", Endpoint: endpointB, Source: "registered", Present: true}
	want := func(when string, rows ...listed) {
		t.Helper()
		if diff := cmp.Diff(rows, c.listed()); diff != "" {
			t.Errorf("nodes %s (-want +got):\n%s", when, diff)
		}
	}
	r.discover(t, w)
	want("after an empty list", registered, static)

	r.discover(t, w, DiscoveredNode{ID: "static", Endpoint: endpointC, Lingering: true}, DiscoveredNode{ID: "registered", Endpoint: endpointB})
	taken := registered
	taken.Source = "kubernetes"
	want("after Kubernetes listed both", taken, static)
	r.must(t, beatOf("registered", "i1", endpointB, "s"))

	if err := r.ApplyStatic(t.Context(), []StaticNode{{ID: "registered", Endpoint: endpointB}}); err != nil {
		t.Fatal(err)
	}
	operators, given := taken, static
	operators.Source, operators.Trusted = "static", true
	given.Present = false
	want("after the static list took the one and gave up the other", operators, given)

	r.discover(t, w, DiscoveredNode{ID: "static", Endpoint: endpointC, Lingering: true}, DiscoveredNode{ID: "registered", Endpoint: endpointB})
	found := listed{ID: "static", Endpoint: endpointC, Source: "kubernetes", Present: true, Lingering: true}
	want("after Kubernetes took what the static list gave up", operators, found)

	if err := r.ApplyStatic(t.Context(), []StaticNode{{ID: "static", Endpoint: endpointA}}); err != nil {
		t.Fatal(err)
	}
	operators.Present = false
	want("after the static list took it back, which does not linger", operators, static)
}

func TestWhatIsUnfitIsLeftOutAndSaid(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	unfit, err := r.ApplyDiscovered(t.Context(), r.writer(t, "one"), []DiscoveredNode{
		{ID: "public", Endpoint: "http://8.8.8.8:8000"},
		{ID: "fine", Endpoint: endpointC},
		{ID: "fine", Endpoint: endpointA},
		{ID: "-", Endpoint: endpointA},
		{ID: "metadata", Endpoint: "http://169.254.169.254:80"},
	})
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[node.ID]error, len(unfit))
	for _, u := range unfit {
		got[u.ID] = u.Why
	}
	if len(got) != 4 || !errors.Is(got["-"], node.ErrBadID) || got["fine"] == nil ||
		!errors.Is(got["public"], route.ErrNotAllowed) || !errors.Is(got["metadata"], route.ErrNotAllowed) {
		t.Errorf("left out %v, want a bad id, a repeated one and two addresses outside the networks", unfit)
	}
	if diff := cmp.Diff([]listed{{ID: "fine", Endpoint: endpointC, Source: "kubernetes", Present: true}}, c.listed()); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
}

func TestOneReplicaWritesAndAnotherTakesOverWhenItsLeaseEnds(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	one, two := c.replica(), c.replica()
	first := one.writer(t, "one")
	if _, err := two.ClaimWriter(t.Context(), "two"); !errors.Is(err, ErrNotWriter) {
		t.Errorf("ClaimWriter = %v while another has the lease, want ErrNotWriter", err)
	}
	if renewed := one.writer(t, "one"); renewed != first {
		t.Errorf("renewed %+v, want the fence of %+v", renewed, first)
	}
	c.exec(`UPDATE discovery_writer SET expires_at = now() - interval '1 ms'`)
	second := two.writer(t, "two")
	if second.Fence <= first.Fence {
		t.Errorf("fence %d after %d, want a higher one", second.Fence, first.Fence)
	}
	for range 2 {
		_, err := one.ApplyDiscovered(t.Context(), first, []DiscoveredNode{{ID: "stale", Endpoint: endpointC}})
		if !errors.Is(err, ErrNotWriter) {
			t.Errorf("a write under an earlier fence = %v, want ErrNotWriter", err)
		}
	}
	if got := c.listed(); len(got) != 0 {
		t.Errorf("a stale writer left %v, want nothing", got)
	}
	if err := one.ReleaseWriter(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	two.discover(t, second, DiscoveredNode{ID: "a", Endpoint: endpointC}) // not released by the former
	if err := two.ReleaseWriter(t.Context(), second); err != nil {
		t.Fatal(err)
	}
	if third := one.writer(t, "one"); third.Fence <= second.Fence {
		t.Errorf("fence %d after %d was released, want a higher one", third.Fence, second.Fence)
	}
}

// The same process after its own lease ended: what it began before must not come through.
func TestALeaseThatEndedKeepsNoFenceEvenForItsHolder(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	before := r.writer(t, "one")
	c.exec(`UPDATE discovery_writer SET expires_at = now() - interval '1 ms'`)
	if after := r.writer(t, "one"); after.Fence <= before.Fence {
		t.Errorf("fence %d after %d, want a higher one", after.Fence, before.Fence)
	}
}

// The writer is paused in its transaction, after it passed the check: nobody takes over before it ended,
// so its write is not behind a newer one. Paused before the check, it writes nothing.
func TestAPausedWriterWritesNothingAfterATakeover(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	one, two := c.replica(), c.replica()
	first := one.writer(t, "one")

	// Somebody holds the node's lock, so the write waits before it checks its lease.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	blocker, err := c.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = blocker.Rollback(context.WithoutCancel(ctx)) }()
	if err := pgdb.Lock(ctx, blocker, advisory.Node("a")); err != nil {
		t.Fatal(err)
	}
	written := make(chan error, 1)
	go func() {
		_, err := one.ApplyDiscovered(ctx, first, []DiscoveredNode{{ID: "a", Endpoint: endpointA}})
		written <- err
	}()
	c.awaitLockWaiter(ctx)
	c.exec(`UPDATE discovery_writer SET expires_at = now() - interval '1 ms'`)
	second := two.writer(t, "two")
	if err := blocker.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-written; !errors.Is(err, ErrNotWriter) {
		t.Errorf("the paused write = %v, want ErrNotWriter", err)
	}
	two.discover(t, second, DiscoveredNode{ID: "a", Endpoint: endpointC})

	// A write that passed the check holds the lease until it ends: a takeover waits, even past its time.
	inside, err := one.db.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = inside.Rollback(context.WithoutCancel(ctx)) }()
	if err := checkWriter(ctx, inside, second); err != nil {
		t.Fatalf("checkWriter = %v", err)
	}
	taken := make(chan error, 1)
	go func() {
		_, err := c.Exec(ctx, `UPDATE discovery_writer SET expires_at = now() - interval '1 ms'`)
		taken <- err
	}()
	c.awaitLockWaiter(ctx)
	select {
	case err := <-taken:
		t.Errorf("the lease changed under an open write: %v", err)
	default:
	}
	if err := inside.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-taken; err != nil {
		t.Error(err)
	}
}

// awaitLockWaiter returns once a statement of this database waits for a lock.
func (c *cell) awaitLockWaiter(ctx context.Context) {
	c.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	const waitingSQL = `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`
	for {
		var waits bool
		if err := c.QueryRow(ctx, waitingSQL).Scan(&waits); err != nil {
			c.t.Fatalf("look for a waiting statement: %v", err)
		}
		if waits {
			return
		}
		select {
		case <-ctx.Done():
			c.t.Fatal("nothing waits for a lock")
		case <-tick.C:
		}
	}
}

// A machine is replaced: a new Pod at the old one's address.
func TestAReplacedNodeIsReadyAtTheOldAddressWithoutSQL(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	w := r.writer(t, "one")
	r.discover(t, w, DiscoveredNode{ID: "old", Endpoint: endpointC})
	old := beatOf("old", "i1", "", "s")
	old.MayRegister = false
	r.must(t, old)
	r.discover(t, w, DiscoveredNode{ID: "new", Endpoint: endpointC})
	next := beatOf("new", "i2", endpointC, "s")
	next.MayRegister = false
	r.must(t, next)
	members, err := r.ListPresent(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Member{{ID: "new", Endpoint: endpointC}}, members); diff != "" {
		t.Errorf("present nodes (-want +got):\n%s", diff)
	}
	observed, err := r.Get(t.Context(), "new", "")
	if err != nil || observed.Snapshot.Status != node.Ready {
		t.Errorf("Get(new) = %+v, %v, want it ready", observed, err)
	}
	if _, err := r.Heartbeat(t.Context(), old); !errors.Is(err, node.ErrNotListed) {
		t.Errorf("heartbeat of the old node = %v, want it refused as not listed", err)
	}
}
