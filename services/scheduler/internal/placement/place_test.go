package placement

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

func TestARepeatedRequestGetsTheSamePlacementUntilItEnds(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	addNode(t, db.DB, testNode{id: "a", capabilities: []string{"create_key"}})
	p, other := startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())
	ctx := t.Context()

	first, err := p.Schedule(ctx, keyed("r"))
	if err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	if len(first.SandboxIDs) != 1 || first.Hold != 90*time.Second {
		t.Errorf("Schedule = %+v, want one id drawn and a hold of 90 s", first)
	}
	again, err := other.Schedule(ctx, keyed("r"))
	if err != nil {
		t.Fatalf("repeated Schedule = %v", err)
	}
	if diff := cmp.Diff(first, again, cmpopts.IgnoreFields(Placement{}, "Hold")); diff != "" {
		t.Errorf("the repeated request (-first +again):\n%s", diff)
	}
	if again.Hold <= 80*time.Second || again.Hold > 90*time.Second {
		t.Errorf("the repeated request is held for %s, want what is left of 90 s", again.Hold)
	}

	different := keyed("r")
	different.Fingerprint = []byte{2}
	if _, err := other.Schedule(ctx, different); !errors.Is(err, node.ErrRequestReused) {
		t.Errorf("another body under the key = %v, want %v", err, node.ErrRequestReused)
	}
	elsewhere := different
	elsewhere.Tenant = "another"
	if _, err := other.Schedule(ctx, elsewhere); err != nil {
		t.Errorf("another tenant under the key = %v, want a placement of its own", err)
	}

	if released, err := p.Release(ctx, first.ID, first.Reservation, Canceled); err != nil || !released {
		t.Fatalf("Release = %t, %v", released, err)
	}
	if released, err := p.Release(ctx, first.ID, first.Reservation, Canceled); err != nil || released {
		t.Errorf("the second Release = %t, %v, want false", released, err)
	}
	renewed, err := other.Schedule(ctx, different)
	if err != nil {
		t.Fatalf("a new try = %v", err)
	}
	if renewed.ID != first.ID || renewed.Reservation == first.Reservation || renewed.SandboxIDs[0] == first.SandboxIDs[0] {
		t.Errorf("a new try is %+v, want the row of %+v with another reservation and id", renewed, first)
	}
	if released, err := p.Release(ctx, first.ID, first.Reservation, Canceled); err != nil || released {
		t.Errorf("a late Release of the old try = %t, %v, want false", released, err)
	}
	if got := one[int](t, db.DB, "SELECT tries FROM placements WHERE placement_id = $1", renewed.ID); got != 2 {
		t.Errorf("tries = %d, want 2", got)
	}

	if err := confirmOnce(ctx, db.DB, renewed, renewed.SandboxIDs...); err != nil {
		t.Fatalf("Confirm = %v", err)
	}
	done, err := p.Schedule(ctx, different)
	if err != nil || !done.Confirmed || done.ID != renewed.ID || done.Hold != 0 {
		t.Errorf("after the record Schedule = %+v, %v, want the confirmed placement", done, err)
	}
}

func TestAFailureFreesTheKey(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 1)
	p := startPlacer(t, db, DefaultConfig())
	taken, err := p.Schedule(t.Context(), request())
	if err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	var waits []time.Duration
	for range 3 {
		_, err = p.Schedule(t.Context(), keyed("r"))
		refused, ok := errors.AsType[*node.Refused](err)
		if !ok || !errors.Is(err, node.ErrNoRoom) || refused.Placement == 0 || refused.Reasons["declared_sandboxes"] != 1 {
			t.Fatalf("Schedule = %v (%+v), want a stored refusal with its reason", err, refused)
		}
		waits = append(waits, refused.RetryAfter)
	}
	for i, base := range []time.Duration{200, 400, 800} {
		base *= time.Millisecond
		if waits[i] < base-base/5 || waits[i] > base+base/5 {
			t.Errorf("after try %d wait %s, want %s ± 20 %%", i, waits[i], base)
		}
	}
	if _, err := p.Release(t.Context(), taken.ID, taken.Reservation, Canceled); err != nil {
		t.Fatalf("Release = %v", err)
	}
	if _, err := p.Schedule(t.Context(), keyed("r")); err != nil {
		t.Errorf("with room again Schedule = %v", err)
	}
	if got := one[int](t, db.DB, "SELECT count(*) FROM placements WHERE request_id = 'r'"); got != 1 {
		t.Errorf("%d rows for one request id, want 1", got)
	}
}

func TestAnAgentENVCallerKnowsOneRefusal(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 1)
	p := startPlacer(t, db, DefaultConfig())
	r := Request{Size: size(), Count: 1}
	if _, err := p.Schedule(t.Context(), r); err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	if _, err := p.Schedule(t.Context(), r); !errors.Is(err, node.ErrNoneReady) {
		t.Errorf("Schedule = %v, want %v", err, node.ErrNoneReady)
	}
	if got := one[string](t, db.DB, "SELECT refusal FROM placements WHERE outcome = 'refused'"); got != "capacity" {
		t.Errorf("the row says %q, want capacity", got)
	}
}

func TestRefusalsWithoutRequestIDAreStoredTenTimesASecond(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	p := startPlacer(t, db, DefaultConfig())
	started := time.Now()
	for range 40 {
		if _, err := p.Schedule(t.Context(), request()); !errors.Is(err, node.ErrNoneReady) {
			t.Fatalf("Schedule = %v, want %v", err, node.ErrNoneReady)
		}
	}
	most := storedRefusals * (1 + int(time.Since(started)/time.Second) + 1)
	if got := one[int](t, db.DB, "SELECT count(*) FROM placements"); got < storedRefusals || got > min(most, 39) {
		t.Errorf("%d of 40 refusals are stored, want about %d for each second", got, storedRefusals)
	}
}

func TestADryRunWritesNothing(t *testing.T) {
	t.Parallel()
	db := newDB(t, 2, 5)
	p := startPlacer(t, db, DefaultConfig())
	r := keyed("r")
	r.DryRun = true
	placed, err := p.Schedule(t.Context(), r)
	if err != nil || placed.Node == "" || placed.ID != 0 || placed.Reservation != "" {
		t.Errorf("Schedule = %+v, %v, want a node and nothing else", placed, err)
	}
	r.Cluster = "nowhere"
	if _, err := p.Schedule(t.Context(), r); !errors.Is(err, node.ErrConstraints) {
		t.Errorf("Schedule = %v, want %v", err, node.ErrConstraints)
	}
	if rows := one[int](t, db.DB, "SELECT (SELECT count(*) FROM placements) + (SELECT count(*) FROM reservations)"); rows != 0 {
		t.Errorf("a dry run left %d rows", rows)
	}
}

func TestAGroupIsPlacedWholeOrNotAtAll(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	addNode(t, db.DB, testNode{id: "a", capacity: 5, capabilities: []string{"create_key"}})
	p := startPlacer(t, db, DefaultConfig())
	r := request()
	r.Count = 3
	placed, err := p.Schedule(t.Context(), r)
	if err != nil || len(placed.SandboxIDs) != 3 {
		t.Fatalf("Schedule = %+v, %v, want three ids", placed, err)
	}
	if _, err := p.Schedule(t.Context(), r); !errors.Is(err, node.ErrNoRoom) {
		t.Errorf("three more of two slots = %v, want %v", err, node.ErrNoRoom)
	}
	if held := heldOn(t, db.DB)["a"]; held != 3 {
		t.Errorf("%d holds, want 3", held)
	}
}

func TestAReplacedReservationEndsWithTheNewOne(t *testing.T) {
	t.Parallel()
	db := newDB(t, 2, 10)
	p := startPlacer(t, db, DefaultConfig())
	first, err := p.Schedule(t.Context(), keyed("r"))
	if err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	next := keyed("r")
	next.Replaces, next.Exclude = first.Reservation, []node.ID{first.Node}
	second, err := p.Schedule(t.Context(), next)
	if err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	if second.Node == first.Node || second.Reservation == first.Reservation || second.ID != first.ID {
		t.Errorf("the replacement is %+v after %+v, want another node under the same placement", second, first)
	}
	again, err := p.Schedule(t.Context(), next)
	if err != nil || again.Reservation != second.Reservation {
		t.Errorf("repeated: %+v, %v, want %+v", again, err, second)
	}
	if diff := cmp.Diff(map[node.ID]int{second.Node: 1}, heldOn(t, db.DB)); diff != "" {
		t.Errorf("holds (-want +got):\n%s", diff)
	}

	// It is given up even where nothing takes its place, but only by its tenant.
	foreign := request()
	foreign.Tenant, foreign.Replaces, foreign.Cluster = "another", second.Reservation, "nowhere"
	if _, err := p.Schedule(t.Context(), foreign); !errors.Is(err, node.ErrConstraints) {
		t.Errorf("Schedule = %v, want %v", err, node.ErrConstraints)
	}
	if held := sumOf(heldOn(t, db.DB)); held != 1 {
		t.Errorf("another tenant ended the hold: %d left", held)
	}
	mine := foreign
	mine.Tenant = "default"
	if _, err := p.Schedule(t.Context(), mine); !errors.Is(err, node.ErrConstraints) {
		t.Errorf("Schedule = %v, want %v", err, node.ErrConstraints)
	}
	if held := sumOf(heldOn(t, db.DB)); held != 0 {
		t.Errorf("%d holds are left, want 0", held)
	}
	if got := one[string](t, db.DB, "SELECT outcome FROM placements WHERE request_id = 'r'"); got != "released" {
		t.Errorf("its placement is %s, want released", got)
	}
}

func TestANodeThatJustRegisteredIsSeen(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	p := startPlacer(t, db, DefaultConfig())
	if _, err := p.Schedule(t.Context(), request()); !errors.Is(err, node.ErrNoneReady) {
		t.Fatalf("Schedule = %v, want %v", err, node.ErrNoneReady)
	}
	if _, _, err := p.Pick(t.Context()); !errors.Is(err, node.ErrNoneReady) {
		t.Fatalf("Pick = %v, want %v", err, node.ErrNoneReady)
	}
	addNode(t, db.DB, testNode{id: "late"})
	if placed, err := p.Schedule(t.Context(), request()); err != nil || placed.Node != "late" {
		t.Errorf("Schedule = %+v, %v, want the node of a moment ago", placed, err)
	}
	if id, endpoint, err := p.Pick(t.Context()); err != nil || id != "late" || endpoint != "http://10.0.0.1:8000" {
		t.Errorf("Pick = %s, %s, %v, want the node of a moment ago", id, endpoint, err)
	}
}

func TestACordonThatCameAfterTheViewIsSeenUnderTheLock(t *testing.T) {
	t.Parallel()
	db := newDB(t, 2, 10)
	p := startPlacer(t, db, DefaultConfig())
	if _, err := p.Schedule(t.Context(), request()); err != nil { // fills the view
		t.Fatalf("Schedule = %v", err)
	}
	if _, err := db.Exec(t.Context(), "UPDATE nodes SET cordoned = true WHERE node_id = 'node-0'"); err != nil {
		t.Fatal(err)
	}
	before := heldOn(t, db.DB)["node-0"]
	for range 8 {
		if placed, err := p.Schedule(t.Context(), request()); err != nil || placed.Node != "node-1" {
			t.Errorf("Schedule = %+v, %v, want node-1", placed, err)
		}
	}
	if got := heldOn(t, db.DB)["node-0"]; got != before {
		t.Errorf("the cordoned node has %d holds, it had %d", got, before)
	}
}

func TestAFullNodeIsPassedOverWhileAnotherPasses(t *testing.T) {
	t.Parallel()
	db := newDB(t, 2, 100)
	p := startPlacer(t, db, DefaultConfig())
	placed, err := p.Schedule(t.Context(), request())
	if err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	if released, err := p.Release(t.Context(), placed.ID, placed.Reservation, NodeFull); err != nil || !released {
		t.Fatalf("Release = %t, %v", released, err)
	}
	for range 5 {
		if next, err := p.Schedule(t.Context(), request()); err != nil || next.Node == placed.Node {
			t.Errorf("Schedule = %+v, %v, want the other node", next, err)
		}
	}
	only := request()
	only.Constraints.Node = placed.Node
	if next, err := p.Schedule(t.Context(), only); err != nil || next.Node != placed.Node {
		t.Errorf("Schedule = %+v, %v, want the node that was passed over: no other may be", next, err)
	}
}

func TestABusyNodeIsAvoidedAndThenWaitedFor(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 10)
	p := startPlacer(t, db, DefaultConfig())
	// Another replica has the only node's lock.
	holder, err := db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = holder.Rollback(context.WithoutCancel(t.Context())) }()
	if err := pgdb.Lock(t.Context(), holder, advisory.Node("node-0")); err != nil {
		t.Fatal(err)
	}
	limited, cancel := context.WithTimeout(t.Context(), 600*time.Millisecond)
	defer cancel()
	_, err = p.Schedule(limited, request())
	if refused, ok := errors.AsType[*node.Refused](err); !ok || !errors.Is(err, node.ErrContended) || refused.RetryAfter == 0 {
		t.Errorf("Schedule behind a held lock = %v, want %v with a hint", err, node.ErrContended)
	}
	if _, err := p.Schedule(limited, Request{Size: size(), Count: 1}); err == nil {
		t.Error("a call whose time is over was placed")
	}
	answer := make(chan error, 1)
	go func() {
		_, err := p.Schedule(t.Context(), request())
		answer <- err
	}()
	awaitWaiter(t, db.DB)
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-answer; err != nil {
		t.Errorf("once the lock is free Schedule = %v, want a placement", err)
	}
	if held := sumOf(heldOn(t, db.DB)); held != 1 {
		t.Errorf("%d holds, want 1: what gave up must hold nothing", held)
	}
}

// awaitWaiter returns once somebody waits for an advisory lock.
func awaitWaiter(t *testing.T, db *pgdb.DB) {
	t.Helper()
	for one[int](t, db, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())") == 0 {
		if t.Context().Err() != nil {
			t.Fatal("nobody waits")
		}
	}
}

func TestATenantNeverExceedsItsQuotaThroughTwoReplicas(t *testing.T) {
	t.Parallel()
	db := newDB(t, 4, 100)
	if _, err := db.Exec(t.Context(), "INSERT INTO tenant_quotas (tenant_id, max_sandboxes) VALUES ('small', 7)"); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(t.Context(), `INSERT INTO bindings (sandbox_id, state, node_id, origin, tenant_id) VALUES ('old', 'bound', 'node-0', 'recorded', 'small')`); err != nil {
		t.Fatal(err)
	}
	placers := []*Placer{startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())}
	var placed atomic.Int64
	var done sync.WaitGroup
	for caller := range 24 {
		done.Go(func() {
			r := request()
			r.Tenant = "small"
			_, err := placers[caller%2].Schedule(t.Context(), r)
			if err == nil {
				placed.Add(1)
			} else if !errors.Is(err, node.ErrQuota) {
				t.Errorf("Schedule = %v, want a placement or %v", err, node.ErrQuota)
			}
			if _, err := placers[caller%2].Schedule(t.Context(), request()); err != nil {
				t.Errorf("another tenant: Schedule = %v", err)
			}
		})
	}
	done.Wait()
	if placed.Load() != 6 {
		t.Errorf("%d placed beside one that is bound, want 6 of 7", placed.Load())
	}
	if got := one[int](t, db.DB, "SELECT count(*) FROM reservations WHERE tenant_id = 'small'"); got != 6 {
		t.Errorf("%d holds, want 6", got)
	}
}

func TestTheQuotaOfAllTenantsSparesThoseWithARow(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 100)
	if _, err := db.Exec(t.Context(), "UPDATE tenant_quotas SET max_cpu_millis = 500 WHERE tenant_id = '*'"); err != nil {
		t.Fatal(err)
	}
	p := startPlacer(t, db, DefaultConfig())
	r := request()
	r.Tenant = "unknown"
	if _, err := p.Schedule(t.Context(), r); !errors.Is(err, node.ErrQuota) {
		t.Errorf("a tenant without a row: Schedule = %v, want %v", err, node.ErrQuota)
	}
	r.DryRun = true
	if _, err := p.Schedule(t.Context(), r); !errors.Is(err, node.ErrQuota) {
		t.Errorf("a dry run of it: Schedule = %v, want %v", err, node.ErrQuota)
	}
	for _, tenant := range []string{"default", ""} {
		r := request()
		r.Tenant = tenant
		if _, err := p.Schedule(t.Context(), r); err != nil {
			t.Errorf("tenant %q: Schedule = %v, want a placement", tenant, err)
		}
	}
}

func TestMaxPerNodeHoldsUnderConcurrency(t *testing.T) {
	t.Parallel()
	db := newDB(t, 3, 100)
	placers := []*Placer{startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())}
	var placed atomic.Int64
	var done sync.WaitGroup
	for caller := range 20 {
		done.Go(func() {
			r := request()
			r.Constraints.SpreadKey, r.Constraints.MaxPerNode = "app", 2
			_, err := placers[caller%2].Schedule(t.Context(), r)
			if err == nil {
				placed.Add(1)
			} else if !errors.Is(err, node.ErrConstraints) {
				t.Errorf("Schedule = %v, want a placement or %v", err, node.ErrConstraints)
			}
		})
	}
	done.Wait()
	if diff := cmp.Diff(map[node.ID]int{"node-0": 2, "node-1": 2, "node-2": 2}, heldOn(t, db.DB)); diff != "" || placed.Load() != 6 {
		t.Errorf("%d placed; holds (-want +got):\n%s", placed.Load(), diff)
	}
}

func TestAnExpiredHoldEndsOnceAndByAnyReplica(t *testing.T) {
	t.Parallel()
	db := newDB(t, 2, 50)
	p, other := startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())
	r := request()
	r.TTL = time.Millisecond
	r.Count = 2
	for range 10 {
		if _, err := p.Schedule(t.Context(), r); err != nil {
			t.Fatalf("Schedule = %v", err)
		}
	}
	kept, err := p.Schedule(t.Context(), request())
	if err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	waitExpired(t, db.DB)
	if err := other.expire(t.Context()); err != nil {
		t.Fatalf("expire = %v", err)
	}
	if got := one[int](t, db.DB, "SELECT count(*) FROM placements WHERE outcome = 'expired'"); got != 10 {
		t.Errorf("%d placements expired, want 10", got)
	}
	if held := sumOf(heldOn(t, db.DB)); held != 1 {
		t.Errorf("%d holds are left, want the one whose time is not over", held)
	}
	if err := p.Extend(t.Context(), kept.ID, kept.Reservation, time.Hour); err != nil {
		t.Errorf("Extend = %v", err)
	}
	if left := one[float64](t, db.DB, "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8 FROM reservations"); left < 3500 {
		t.Errorf("after Extend it holds for %.0f s, want an hour", left)
	}
	if err := p.Extend(t.Context(), kept.ID, uuid.NewString(), time.Hour); !errors.Is(err, node.ErrNotOpen) {
		t.Errorf("Extend of nothing = %v, want %v", err, node.ErrNotOpen)
	}
	if err := confirmOnce(t.Context(), db.DB, kept, newID(t)); err != nil {
		t.Fatalf("Confirm = %v", err)
	}
	if err := p.Extend(t.Context(), kept.ID, kept.Reservation, time.Hour); !errors.Is(err, node.ErrNotOpen) {
		t.Errorf("Extend of a confirmed one = %v, want %v", err, node.ErrNotOpen)
	}
}

// waitExpired returns once some hold's time is over.
func waitExpired(t *testing.T, db *pgdb.DB) {
	t.Helper()
	for one[int](t, db, "SELECT count(*) FROM reservations WHERE expires_at < clock_timestamp()") == 0 {
		if t.Context().Err() != nil {
			t.Fatal("nothing expires")
		}
	}
}

func TestAPlacementExplainsItself(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	addNode(t, db.DB, testNode{id: "full", capacity: 1, running: 1})
	addNode(t, db.DB, testNode{id: "gone", dead: true})
	addNode(t, db.DB, testNode{id: "good", capacity: 9})
	p := startPlacer(t, db, DefaultConfig())
	placed, err := p.Schedule(t.Context(), keyed("r"))
	if err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	got, err := p.Explain(t.Context(), Question{Tenant: "default", RequestID: "r"})
	if err != nil {
		t.Fatalf("Explain = %v", err)
	}
	want := Decision{
		PlacementID: placed.ID, TenantID: "default", RequestID: new("r"), Outcome: Reserved, Tries: 1, Count: 1, NodeID: new(node.ID("good")),
		ReservationID: &placed.Reservation, SandboxIDs: []sandbox.ID{}, CPUMillis: 1000, MemoryBytes: gib, Strategy: BestOfK,
		Reasons: map[Reason]int{DeclaredSandboxes: 1, Unhealthy: 1},
		Candidates: []Candidate{
			{Node: "full", Verdict: VerdictRefused, Reason: DeclaredSandboxes, Value: 2, Limit: 1},
			{Node: "gone", Verdict: VerdictRefused, Reason: Unhealthy},
			{Node: "good", Verdict: VerdictChosen},
		},
	}
	ignored := cmpopts.IgnoreFields(Decision{}, "CreatedAt", "ChangedAt")
	byNode := cmpopts.SortSlices(func(a, b Candidate) bool { return a.Node < b.Node })
	if diff := cmp.Diff(want, got, ignored, byNode, cmpopts.IgnoreFields(Candidate{}, "Score")); diff != "" {
		t.Errorf("Explain (-want +got):\n%s", diff)
	}

	box := newID(t)
	if err := confirmOnce(t.Context(), db.DB, placed, box); err != nil {
		t.Fatalf("Confirm = %v", err)
	}
	for name, q := range map[string]Question{"by id": {PlacementID: placed.ID}, "by its sandbox": {Sandbox: box}} {
		if got, err := p.Explain(t.Context(), q); err != nil || got.PlacementID != placed.ID || got.Outcome != Recorded {
			t.Errorf("%s: Explain = %+v, %v", name, got, err)
		}
	}
	for name, q := range map[string]Question{
		"an unknown id": {PlacementID: 1 << 40}, "another tenant's key": {Tenant: "another", RequestID: "r"}, "an unknown sandbox": {Sandbox: "x"},
	} {
		if _, err := p.Explain(t.Context(), q); !errors.Is(err, node.ErrNoPlacement) {
			t.Errorf("%s: Explain = %v, want %v", name, err, node.ErrNoPlacement)
		}
	}
}

func TestPlacementsAreListedNewestFirst(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 3)
	p := startPlacer(t, db, DefaultConfig())
	for i := range 5 { // three placed, two refused
		_, err := p.Schedule(t.Context(), keyed(fmt.Sprint(i)))
		if (err == nil) != (i < 3) {
			t.Fatalf("Schedule %d = %v", i, err)
		}
	}
	listed := func(page Page) (requests []string) {
		t.Helper()
		decisions, err := p.List(t.Context(), page)
		if err != nil {
			t.Fatalf("List = %v", err)
		}
		for _, d := range decisions {
			requests = append(requests, *d.RequestID)
		}
		return requests
	}
	for name, tt := range map[string]struct {
		page Page
		want []string
	}{
		"all":                   {Page{Limit: 10}, []string{"4", "3", "2", "1", "0"}},
		"a page":                {Page{Limit: 2}, []string{"4", "3"}},
		"refused ones":          {Page{Limit: 10, Outcome: Rejected}, []string{"4", "3"}},
		"of a node":             {Page{Limit: 10, Node: "node-0"}, []string{"2", "1", "0"}},
		"of a tenant without":   {Page{Limit: 10, Tenant: "another"}, nil},
		"older than the second": {Page{Limit: 10, Before: one[int64](t, db.DB, "SELECT placement_id FROM placements WHERE request_id = '1'")}, []string{"0"}},
	} {
		if diff := cmp.Diff(tt.want, listed(tt.page)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestEndedPlacementsAreForgottenInTime(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 0)
	cfg := DefaultConfig()
	cfg.KeyRetention = time.Hour
	p := startPlacer(t, db, cfg)
	var placed []Placement
	for i := range 3 {
		got, err := p.Schedule(t.Context(), keyed(fmt.Sprint(i)))
		if err != nil {
			t.Fatalf("Schedule = %v", err)
		}
		placed = append(placed, got)
	}
	for _, ended := range placed[:2] {
		if _, err := p.Release(t.Context(), ended.ID, ended.Reservation, Canceled); err != nil {
			t.Fatalf("Release = %v", err)
		}
	}
	if _, err := db.Exec(t.Context(), "UPDATE placements SET created_at = created_at - interval '2 hours', changed_at = changed_at - CASE request_id WHEN '1' THEN interval '0' ELSE interval '2 hours' END"); err != nil {
		t.Fatal(err)
	}
	if err := p.retain(t.Context()); err != nil {
		t.Fatalf("retain = %v", err)
	}
	rows, err := db.Query(t.Context(), "SELECT request_id FROM placements ORDER BY 1")
	if err != nil {
		t.Fatal(err)
	}
	left, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"1", "2"}, left); diff != "" {
		t.Errorf("left are the one that ended lately and the one that holds room (-want +got):\n%s", diff)
	}
}

func TestAStoppedPlacerAnswersThatItCannot(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 1)
	p := New(db.DB, DefaultConfig(), nil, nil)
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if err := p.Run(ctx); err != nil {
		t.Fatalf("Run = %v", err)
	}
	if _, err := p.Schedule(t.Context(), request()); !pgdb.Unavailable(err) {
		t.Errorf("Schedule = %v, want an error that is Unavailable", err)
	}
}

func TestALostDatabaseIsUnavailableAndComesBack(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 0)
	p := startPlacer(t, db, DefaultConfig())
	if _, err := p.Schedule(t.Context(), request()); err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	// The connections of the placer die under it; the pool dials new ones.
	var failed int
	for range 20 {
		if _, err := db.Exec(t.Context(), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pgtest as berth_scheduler' AND datname = current_database()"); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Schedule(t.Context(), request()); err != nil {
			failed++
			if !pgdb.Unavailable(err) {
				t.Errorf("Schedule on a killed connection = %v, want an error that is Unavailable", err)
			}
		}
	}
	if _, err := p.Schedule(t.Context(), request()); err != nil {
		t.Errorf("afterwards Schedule = %v, want a placement", err)
	}
	t.Logf("%d of 20 calls saw a killed connection", failed)
}
