package placement

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
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

// awaitLockWaiters returns once as many statements of db wait for a lock.
func awaitLockWaiters(t *testing.T, db *pgdb.DB, many int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for one[int](t, db, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) < many {
		select {
		case <-ctx.Done():
			t.Fatalf("not %d wait for a lock", many)
		case <-tick.C:
		}
	}
}

// A record confirms without the request id's lock: a new try that has read the placement before that
// must not take its row, for the request id would stand for two sandboxes.
func TestANewTryFindsWhatWasConfirmedMeanwhile(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		ended bool // the hold had expired, and the record is late
	}{"while it was to be replaced": {false}, "after it had expired": {true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t, 2, 10)
			p := startPlacer(t, db, DefaultConfig())
			first, err := p.Schedule(t.Context(), keyed("r"))
			if err != nil {
				t.Fatalf("Schedule = %v", err)
			}
			next := keyed("r")
			next.Exclude = []node.ID{first.Node}
			if tt.ended {
				overdue(t, db.DB, first.ID, time.Hour)
				if err := p.expire(t.Context()); err != nil {
					t.Fatalf("expire = %v", err)
				}
			} else {
				next.Replaces = first.Reservation
			}

			var tried Placement
			done := make(chan error, 1)
			in(t, db.DB, func(tx pgx.Tx) error {
				if err := pgdb.Lock(t.Context(), tx, advisory.Node(first.Node)); err != nil {
					return err
				}
				_, err := Confirm(t.Context(), tx, Confirmation{
					Sandbox: ids("s1"), Node: first.Node, ReservationID: first.Reservation, PlacementID: first.ID, Tenant: "default", Alone: true,
				})
				if err != nil {
					return err
				}
				go func() {
					var err error
					tried, err = p.Schedule(t.Context(), next)
					done <- err
				}()
				awaitLockWaiters(t, db.DB, 1)
				return nil
			})
			if err := <-done; err != nil || !tried.Confirmed || tried.Node != first.Node || tried.Reservation != first.Reservation {
				t.Errorf("Schedule = %+v, %v, want what was confirmed: %+v", tried, err, first)
			}
			if diff := cmp.Diff(state{Outcome: "confirmed", Confirmed: 1, IDs: 1}, stateOf(t, db.DB, first.ID)); diff != "" {
				t.Errorf("the placement (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(map[node.ID]int{first.Node: 1}, heldOn(t, db.DB)); diff != "" {
				t.Errorf("holds (-want +got):\n%s", diff)
			}
		})
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
