package nodes

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/placement"
)

// versions returns xmin and ctid of every row of every table, by table.
func (c *cell) versions() map[string]string {
	c.t.Helper()
	rows, err := c.Query(c.t.Context(), `SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace ORDER BY 1`)
	if err != nil {
		c.t.Fatal(err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		c.t.Fatal(err)
	}
	found := make(map[string]string, len(tables))
	for _, table := range tables {
		found[table] = value[string](c, `SELECT COALESCE(string_agg(xmin::text || ctid::text, ' ' ORDER BY ctid), '') FROM `+pgx.Identifier{table}.Sanitize())
	}
	return found
}

func TestAPlainHeartbeatWritesOneLeaseAndNothingElse(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	for i := range 3 {
		b := beatOf(fmt.Sprintf("n%d", i), "i1", fmt.Sprintf("http://127.0.0.1:%d", 8001+i), fmt.Sprintf("s%d", i))
		b.Peer = &Peer{Backend: "b", Address: "x:1"}
		r.must(t, b)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ringing := make(chan error, 1)
	go func() { ringing <- r.routes.Doorbell().Run(ctx) }()
	defer func() { stop(); <-ringing }()
	listener, err := pgx.Connect(t.Context(), c.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close(context.WithoutCancel(t.Context())) }()
	// heard returns the channels that rang before a ring of our own, which comes last.
	heard := func() (channels string) {
		c.exec(`NOTIFY probe`)
		for {
			n, err := listener.WaitForNotification(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if n.Channel == "probe" {
				return channels
			}
			channels += n.Channel
		}
	}
	for _, channel := range []string{route.Channel, "probe"} {
		if _, err := listener.Exec(t.Context(), "LISTEN "+channel); err != nil {
			t.Fatal(err)
		}
	}
	_ = waitBell(t, listener, c) // the registrations' rings are over

	before := c.versions()
	lease := func(n string) string {
		return value[string](c, `SELECT xmin::text || ctid::text FROM node_leases WHERE node_id = $1`, n)
	}
	n0, n1 := lease("n0"), lease("n1")
	b := beatOf("n1", "i1", "http://127.0.0.1:8002", "s1")
	b.Peer, b.Snapshot.CPUPercent = &Peer{Backend: "b", Address: "x:1"}, 42
	r.must(t, b)

	after := c.versions()
	if lease("n0") != n0 || lease("n1") == n1 {
		t.Error("want the lease of n1 written and that of n0 left alone")
	}
	if got := value[int](c, `SELECT cpu_percent FROM node_leases WHERE node_id = 'n1'`); got != 42 {
		t.Errorf("cpu_percent = %d, want 42", got)
	}
	delete(before, "node_leases")
	delete(after, "node_leases")
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("row versions of other tables (-before +after):\n%s", diff)
	}
	if channels := heard(); channels != "" {
		t.Errorf("a plain heartbeat rang %q, want silence", channels)
	}
	if got := testutil.ToFloat64(r.metrics.heartbeats.WithLabelValues(pathLease)); got != 1 {
		t.Errorf("heartbeats_total{path=lease} = %v, want 1", got)
	}

	// What the silence is worth: a heartbeat that changes something is seen and heard.
	b.Roster = roster("s1", "s9")
	r.must(t, b)
	if diff := cmp.Diff(after, without(c.versions(), "node_leases")); !strings.Contains(diff, "bindings") || !strings.Contains(diff, "route_feed") {
		t.Errorf("a roster that changed was not seen in bindings and route_feed:\n%s", diff)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // it rings after the answer, in its own time
	defer cancel()
	for {
		n, err := listener.WaitForNotification(ctx)
		if err != nil {
			t.Fatalf("a roster that changed was not heard: %v", err)
		}
		if n.Channel != "probe" {
			return
		}
	}
}

func without(m map[string]string, key string) map[string]string {
	delete(m, key)
	return m
}

// waitBell waits until the doorbell has nothing left to send, and returns how often it rang: a ring
// that is asked for is sent at once or within its time, so the count is over when two probes in a row
// bring none.
func waitBell(t *testing.T, listener *pgx.Conn, c *cell) (rings int) {
	t.Helper()
	for quiet := 0; quiet < 20; quiet++ {
		c.exec(`NOTIFY probe`)
		for {
			n, err := listener.WaitForNotification(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if n.Channel == "probe" {
				break
			}
			rings++
			quiet = 0
		}
	}
	return rings
}

func TestALateRosterSparesWhatWasJustRecordedAndThenDoesNot(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA, "old"))
	_, err := r.routes.Record(t.Context(), bindings.Assignment{
		Sandboxes: []sandbox.ID{"new"}, Node: "a", Endpoint: endpointA, Size: sandbox.Size{CPUMillis: 100, MemoryBytes: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	holds := func() int64 { return value[int64](c, `SELECT count(*) FROM reservations`) }

	r.must(t, beatOf("a", "i1", endpointA)) // made before the record, and without "old" too
	if got := c.bindings()["new"].State; got != sandbox.Bound || holds() != 1 {
		t.Fatalf("after a late roster: %s with %d holds, want it bound and held", got, holds())
	}
	if due := value[float64](c, `SELECT extract(epoch FROM reconcile_due - clock_timestamp())::float8 FROM node_leases`); due > 15 {
		t.Errorf("the roster is due in %.1f s, want it when the grace is over", due)
	}

	c.exec(`UPDATE bindings SET bound_at = bound_at - interval '16 seconds'`)
	c.exec(`UPDATE node_leases SET reconcile_due = reconcile_due - interval '16 seconds'`)
	r.must(t, beatOf("a", "i1", endpointA))
	want := bindingRow{ID: "new", State: sandbox.Gone, Node: "a", Incarnation: 1, EndedBy: "roster"}
	if got := c.bindings()["new"]; got != want || holds() != 0 {
		t.Errorf("after the grace: %+v with %d holds, want %+v and none", got, holds(), want)
	}
}

// A sandbox that was recorded and never came up: the roster stays equal, so only its hold tells.
func TestAHoldThatIsOverdueMakesItsNodeDue(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA))
	_, err := r.routes.Record(t.Context(), bindings.Assignment{Sandboxes: []sandbox.ID{"s"}, Node: "a", Endpoint: endpointA})
	if err != nil {
		t.Fatal(err)
	}
	step := func(want sandbox.State) {
		t.Helper()
		if err := r.due(t.Context()); err != nil {
			t.Fatal(err)
		}
		r.must(t, beatOf("a", "i1", endpointA))
		if got := c.bindings()["s"].State; got != want {
			t.Errorf("state = %s, want %s", got, want)
		}
	}
	step(sandbox.Bound)
	c.exec(`UPDATE bindings SET bound_at = bound_at - interval '16 seconds'`)
	step(sandbox.Bound) // the hold is young: the equal roster was not compared
	c.exec(`UPDATE reservations SET created_at = created_at - interval '16 seconds'`)
	step(sandbox.Gone)
}

func TestABindingStaysWithItsNodeThroughSilenceAndBack(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA, "s"))
	before, feed := c.bindings(), c.feed()
	c.exec(`UPDATE node_leases SET expires_at = clock_timestamp() - interval '1 hour'`)
	if found, err := r.routes.Lookup(t.Context(), "s"); err != nil || found.Status != node.Unhealthy {
		t.Errorf("Lookup = %+v, %v, want the sandbox on an unhealthy node", found, err)
	}
	p, ask := c.placer(), placement.Request{Tenant: "t", Size: sandbox.Size{CPUMillis: 1, MemoryBytes: 1}, Count: 1, Named: true}
	if _, err := p.Schedule(t.Context(), ask); !errors.Is(err, node.ErrNoneReady) {
		t.Errorf("Schedule = %v, want %v: a silent node is not placed on", err, node.ErrNoneReady)
	}
	if answer := r.must(t, beatOf("a", "i1", endpointA, "s")); answer.Epoch != 1 {
		t.Errorf("epoch = %d, want 1: the same instance came back", answer.Epoch)
	}
	if placed, err := p.Schedule(t.Context(), ask); err != nil || placed.Node != "a" {
		t.Errorf("Schedule = %+v, %v, want the node that came back", placed, err)
	}
	if diff := cmp.Diff(before, c.bindings()); diff != "" || c.feed() != feed {
		t.Errorf("silence changed something: %d feed rows more, bindings (-before +after):\n%s", c.feed()-feed, diff)
	}
	if found, err := r.routes.Lookup(t.Context(), "s"); err != nil || found.Status != node.Ready {
		t.Errorf("Lookup = %+v, %v, want it ready again", found, err)
	}
}

func TestASandboxFollowsItsMachineToANewIDWhenTheOldLeaseIsOver(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("old", "i1", endpointA, "s1"))
	r.must(t, beatOf("new", "i2", endpointB, "s1")) // killed and started again under another name
	if got := c.bindings()["s1"].Node; got != "old" {
		t.Fatalf("s1 is on %s, want it with the node whose lease lives", got)
	}
	c.exec(`UPDATE node_leases SET expires_at = now() - interval '1 second' WHERE node_id = 'old'`)
	c.exec(`UPDATE node_leases SET reconcile_due = reconcile_due - interval '15 seconds' WHERE node_id = 'new'`) // as time passes
	r.must(t, beatOf("new", "i2", endpointB, "s1"))
	if got := c.bindings()["s1"].Node; got != "new" {
		t.Errorf("15 s later s1 is on %s, want it on new, though new's roster is what it was", got)
	}
}

func TestAConflictLeavesEverythingAlone(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA, "s"))
	before := without(c.versions(), "sandbox_events_default")
	tests := map[string]struct {
		beat Beat
		want error
	}{
		"another instance elsewhere":         {beatOf("a", "i2", endpointB, "mine"), node.ErrIDInUse},
		"the same instance at another place": {beatOf("a", "i1", endpointB, "mine"), node.ErrIDInUse},
		"an endpoint outside the networks":   {beatOf("b", "i1", "http://8.8.8.8:1", "mine"), route.ErrNotAllowed},
		"a node without a token":             {withoutToken(beatOf("b", "i1", endpointB, "mine")), node.ErrNotListed},
		"a node without an endpoint":         {beatOf("b", "i1", "", "mine"), node.ErrNotListed},
	}
	for name, tt := range tests {
		if _, err := r.Heartbeat(t.Context(), tt.beat); !errors.Is(err, tt.want) {
			t.Errorf("%s: Heartbeat = %v, want %v", name, err, tt.want)
		}
		if diff := cmp.Diff(before, without(c.versions(), "sandbox_events_default")); diff != "" {
			t.Errorf("%s changed rows (-before +after):\n%s", name, diff)
		}
	}
	if got := value[int64](c, `SELECT count(*) FROM sandbox_events WHERE kind <> 'adopted'`); got != 1 {
		t.Errorf("%d events, want one of the conflict in its first minute, and none of the refused", got)
	}
	if got := testutil.ToFloat64(r.metrics.conflicts); got != 2 {
		t.Errorf("node_conflicts_total = %v, want 2", got)
	}
	if got := testutil.ToFloat64(r.metrics.heartbeats.WithLabelValues(pathRefused)); got != float64(len(tests)) {
		t.Errorf("heartbeats_total{path=refused} = %v, want %d", got, len(tests))
	}
}

func withoutToken(b Beat) Beat {
	b.MayRegister = false
	return b
}

func TestARestartTakesOverAndTheOldProcessIsSuperseded(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r, other := c.replica(), c.replica()
	r.must(t, beatOf("a", "i1", endpointA, "s1", "s2"))
	answer := other.must(t, beatOf("a", "i2", endpointA, "s1", "s2"))
	if answer.Epoch != 2 {
		t.Errorf("epoch = %d, want 2", answer.Epoch)
	}
	if got := testutil.ToFloat64(other.metrics.heartbeats.WithLabelValues(pathTakeover)); got != 1 {
		t.Errorf("heartbeats_total{path=takeover} = %v, want 1", got)
	}
	before := c.versions()
	if _, err := r.Heartbeat(t.Context(), beatOf("a", "i1", endpointA)); !errors.Is(err, node.ErrSuperseded) {
		t.Errorf("the old process: %v, want %v", err, node.ErrSuperseded)
	}
	if diff := cmp.Diff(before, c.versions()); diff != "" {
		t.Errorf("the old process changed rows (-before +after):\n%s", diff)
	}
	if got := c.bindings()["s1"]; got.State != sandbox.Bound || got.Incarnation != 1 {
		t.Errorf("binding = %+v, want it as it was", got)
	}
}

func TestAnEndpointChangesOnlyAtATakeoverAndGatewaysHear(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA, "s"))
	c.exec(`UPDATE node_leases SET expires_at = clock_timestamp() - interval '1 second'`)
	if _, err := r.Heartbeat(t.Context(), beatOf("a", "i2", "http://169.254.1.1:1", "s")); !errors.Is(err, route.ErrNotAllowed) {
		t.Errorf("a move to an address that is not allowed: %v, want %v", err, route.ErrNotAllowed)
	}
	r.must(t, beatOf("a", "i2", endpointB, "s"))
	found, err := r.routes.Lookup(t.Context(), "s")
	if err != nil || found.Endpoint != endpointB || found.Revision != 2 {
		// revisions: 1 the node, 2 its sandbox, 3 the node's move
		t.Errorf("Lookup = %+v, %v, want the new endpoint and the old revision", found, err)
	}
	got := value[string](c, `SELECT string_agg(kind || ' ' || key || ' ' || endpoint, ', ' ORDER BY revision) FROM route_feed WHERE kind = 'node'`)
	if want := "node a " + endpointA + ", node a " + endpointB; got != want {
		t.Errorf("feed = %q, want %q", got, want)
	}
	if got := value[bool](c, `SELECT n.endpoint_revision = max(f.revision) FROM nodes n, route_feed f WHERE f.kind = 'node' GROUP BY n.endpoint_revision`); !got {
		t.Error("the node's endpoint_revision is not its last feed row's")
	}
}

func TestASeqThatWasSeenWritesNothing(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	send := func(seq int64, ids ...string) Answer {
		b := beatOf("a", "i1", endpointA, ids...)
		b.Seq = seq
		return r.must(t, b)
	}
	send(5, "s1")
	send(6, "s1")
	before := c.versions()
	for _, seq := range []int64{6, 5, 1} {
		if answer := send(seq, "s1", "s2"); answer.Epoch != 1 {
			t.Errorf("seq %d: epoch = %d, want 1", seq, answer.Epoch)
		}
	}
	if diff := cmp.Diff(before, c.versions()); diff != "" {
		t.Errorf("what was seen changed rows (-before +after):\n%s", diff)
	}
	send(7, "s1", "s2")
	if got := c.bindings()["s2"].State; got != sandbox.Bound {
		t.Errorf("the next seq: %s, want its roster believed", got)
	}
	b := beatOf("a", "i2", endpointA, "s1")
	b.Seq = 1
	r.must(t, b)
	if got := value[int64](c, `SELECT node_seq FROM node_leases`); got != 1 {
		t.Errorf("node_seq = %d, want 1: another instance counts anew", got)
	}
}

func TestAnUnchangedRosterIsItsDigest(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	full := beatOf("a", "i1", endpointA, "s1", "s2")
	short := full
	short.Roster, short.RosterUnchanged, short.RosterDigest = nil, true, full.Roster.Digest()

	if answer := r.must(t, short); !answer.SendFullRoster {
		t.Error("the first heartbeat: want the full roster asked for")
	}
	if answer := r.must(t, full); answer.SendFullRoster || len(c.bindings()) != 2 {
		t.Errorf("the full roster: %+v with %d bindings, want it believed", answer, len(c.bindings()))
	}
	if answer := r.must(t, short); answer.SendFullRoster {
		t.Error("the digest that is known: want nothing more asked for")
	}
	if got := testutil.ToFloat64(r.metrics.heartbeats.WithLabelValues(pathLease)); got != 2 {
		t.Errorf("heartbeats_total{path=lease} = %v, want 2: the first one compared nothing either", got)
	}
	short.RosterDigest = roster("s3").Digest()
	seen := value[time.Time](c, `SELECT last_seen_at FROM node_leases`)
	if answer := r.must(t, short); !answer.SendFullRoster || len(c.bindings()) != 2 {
		t.Errorf("another digest: %+v with %d bindings, want the full roster asked for and nothing changed", answer, len(c.bindings()))
	}
	if got := value[time.Time](c, `SELECT last_seen_at FROM node_leases`); !got.After(seen) {
		t.Error("another digest: want the lease renewed all the same")
	}
	short.RosterDigest = full.Roster.Digest()
	if answer := r.must(t, short); answer.SendFullRoster {
		t.Error("the digest that is known still: want nothing more asked for")
	}
}

func TestAChangedRosterIsComparedByItsDelta(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r, other := c.replica(), c.replica()
	paths := func(r *replica) string {
		var counted []string
		for _, path := range []string{pathLease, pathDelta, pathFull} {
			counted = append(counted, fmt.Sprint(testutil.ToFloat64(r.metrics.heartbeats.WithLabelValues(path))))
		}
		return strings.Join(counted, " ")
	}
	r.must(t, beatOf("a", "i1", endpointA, "s1", "s2", "s3"))
	c.exec(`UPDATE bindings SET bound_at = bound_at - interval '1 hour'`)
	r.must(t, beatOf("a", "i1", endpointA, "s2", "s3", "s4"))
	if got := paths(r); got != "0 1 1" {
		t.Errorf("lease, delta, full = %s, want the change compared by its delta", got)
	}
	if got := c.bindings(); got["s1"].State != sandbox.Gone || got["s4"].State != sandbox.Bound || got["s2"].State != sandbox.Bound {
		t.Errorf("bindings = %+v, want s1 gone, s4 bound", got)
	}
	other.must(t, beatOf("a", "i1", endpointA, "s2", "s3", "s5"))
	if got := paths(other); got != "0 0 1" {
		t.Errorf("on the other replica lease, delta, full = %s, want a full comparison: it knows no roster", got)
	}
	r.must(t, beatOf("a", "i1", endpointA, "s2", "s3", "s6"))
	if got := paths(r); got != "0 1 2" {
		t.Errorf("lease, delta, full = %s, want a full comparison: another replica stored the last roster", got)
	}
	c.exec(`UPDATE node_leases SET reconcile_due = clock_timestamp()`)
	r.must(t, beatOf("a", "i1", endpointA, "s2", "s3", "s6"))
	if got := paths(r); got != "0 1 3" {
		t.Errorf("lease, delta, full = %s, want a full comparison although the digest is equal: it is due", got)
	}
}

func TestADeletedSandboxIsAnOrphanOfWhoListsIt(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA, "s1", "s2"))
	if _, err := r.routes.Release(t.Context(), "s1", 0); err != nil {
		t.Fatal(err)
	}
	c.exec(`UPDATE node_leases SET reconcile_due = clock_timestamp()`)
	answer := r.must(t, beatOf("a", "i1", endpointA, "s1", "s2", "s3"))
	if diff := cmp.Diff([]sandbox.ID{"s1"}, answer.Orphans); diff != "" {
		t.Errorf("orphans (-want +got):\n%s", diff)
	}
	if got := c.bindings()["s1"].State; got != sandbox.Gone {
		t.Errorf("state of the orphan = %s, want gone", got)
	}
}

func TestExtremeNumbersAreStoredAtTheirBounds(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	for _, reported := range []int64{math.MinInt64, math.MaxInt64, 0, time.Now().Add(time.Hour).UnixMilli()} {
		b := beatOf("a", "i1", endpointA)
		b.Snapshot = &Snapshot{
			Status: node.Ready, ReportedAtUnixMS: reported, AllocatedMemoryBytes: math.MaxUint64, CreateFails: math.MaxUint64,
			CPUCount: math.MaxUint32, SandboxCount: math.MaxUint32, MemoryTotalBytes: math.MaxUint64,
		}
		b.Capacity = Capacity{Sandboxes: math.MaxUint32, CPUMillis: math.MaxInt64, MemoryBytes: math.MaxInt64}
		for range 2 { // the slow path, then the fast one
			r.must(t, b)
			got, err := r.Get(t.Context(), "a", "")
			if err != nil {
				t.Fatal(err)
			}
			if got.Snapshot.AllocatedMemoryBytes != math.MaxInt64 || got.Snapshot.CPUCount != math.MaxInt32 || got.Snapshot.Status != node.Ready {
				t.Errorf("reported at %d: snapshot = %+v, want it saturated", reported, got.Snapshot)
			}
			switch {
			case reported == 0 && (got.SkewMS != 0 || got.Snapshot.ReportedAtUnixMS != got.LastSeen.UnixMilli()):
				t.Errorf("reported at 0: skew %d, reported at %d, want none and the time of receipt", got.SkewMS, got.Snapshot.ReportedAtUnixMS)
			case reported == math.MinInt64 && got.SkewMS != math.MinInt32, reported == math.MaxInt64 && got.SkewMS != math.MaxInt32:
				t.Errorf("reported at %d: skew = %d, want it saturated", reported, got.SkewMS)
			case reported > 0 && reported < math.MaxInt64 && (got.SkewMS < 3_500_000 || got.SkewMS > 3_700_000):
				t.Errorf("an hour ahead: skew = %d ms", got.SkewMS)
			}
		}
	}
}
