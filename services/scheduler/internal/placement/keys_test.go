package placement

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
	"berth/services/internal/node"
)

// drawing is what a node announces that takes the ids it is given.
var drawing = []string{"create_key"} //nolint:gochecknoglobals // a constant

// claiming is a create under a key, as one gateway asks for it.
func claiming(key, request string) Request {
	r := keyed(request)
	r.CreateKey, r.Digest = key, []byte("digest")
	return r
}

// overdue lets the open holds of a placement be past their expiry for d.
func overdue(t *testing.T, db *pgdb.DB, id int64, d time.Duration) {
	t.Helper()
	tag, err := db.Exec(t.Context(), "UPDATE reservations SET expires_at = clock_timestamp() - $2::interval WHERE placement_id = $1 AND sandbox_id IS NULL", id, d)
	if err != nil || tag.RowsAffected() == 0 {
		t.Fatalf("let the holds of %d expire: %v, %v", id, tag, err)
	}
}

func mustSchedule(t *testing.T, p *Placer, r Request) Placement {
	t.Helper()
	placed, err := p.Schedule(t.Context(), r)
	if err != nil {
		t.Fatalf("Schedule(%s, %s) = %v", r.CreateKey, r.RequestID, err)
	}
	return placed
}

func TestOneCreateKeyIsOneCreate(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	addNode(t, db.DB, testNode{id: "a", capacity: 9, capabilities: drawing})
	p, other := startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())

	first := mustSchedule(t, p, claiming("k", "r1"))
	if first.State != KeyNew || len(first.SandboxIDs) != 1 {
		t.Fatalf("Schedule = %+v, want %s with the id drawn", first, KeyNew)
	}
	again := mustSchedule(t, other, claiming("k", "r1"))
	if diff := cmp.Diff(first, again, cmpopts.IgnoreFields(Placement{}, "Hold")); diff != "" {
		t.Errorf("the same request again (-first +again):\n%s", diff)
	}
	if pending := mustSchedule(t, other, claiming("k", "r2")); !cmp.Equal(pending, Placement{State: KeyPending}) {
		t.Errorf("another request = %+v, want %s and nothing to act on", pending, KeyPending)
	}

	different := claiming("k", "r3")
	different.Digest = []byte("other")
	if _, err := other.Schedule(t.Context(), different); !errors.Is(err, node.ErrKeyReused) {
		t.Errorf("another body while it is in flight = %v, want %v", err, node.ErrKeyReused)
	}
	foreign := claiming("k", "r2")
	foreign.Tenant = "another"
	if placed := mustSchedule(t, other, foreign); placed.State != KeyNew || placed.ID == first.ID {
		t.Errorf("another tenant = %+v, want a create of its own", placed)
	}

	if err := recordSealed(t.Context(), db.DB, first, []byte("sealed")); err != nil {
		t.Fatalf("Confirm = %v", err)
	}
	for _, request := range []string{"r1", "r4", ""} {
		r := claiming("k", request)
		if request == "" {
			r.RequestID, r.Fingerprint = "", nil
		}
		done := mustSchedule(t, p, r)
		if done.State != KeyDone || !cmp.Equal(done.SandboxIDs, first.SandboxIDs) || string(done.SealedAnswer) != "sealed" || done.Node != "a" {
			t.Errorf("request %q after the record = %+v, want %s with ids and answer", request, done, KeyDone)
		}
	}
	if _, err := other.Schedule(t.Context(), different); !errors.Is(err, node.ErrKeyReused) {
		t.Errorf("another body after it was done = %v, want %v", err, node.ErrKeyReused)
	}
	if rows := one[int](t, db.DB, "SELECT count(*) FROM placements WHERE tenant_id = 'default'"); rows != 1 {
		t.Errorf("%d placements, want 1", rows)
	}
}

func recordSealed(ctx context.Context, db *pgdb.DB, placed Placement, sealed []byte) error {
	return confirmWith(ctx, db, placed, sealed, false, placed.SandboxIDs...)
}

func TestAFailureFreesTheCreateKey(t *testing.T) {
	t.Parallel()
	ends := map[string]func(t *testing.T, p *Placer, placed Placement){
		"released": func(t *testing.T, p *Placer, placed Placement) {
			if released, err := p.Release(t.Context(), placed.ID, placed.Reservation, NodeError); err != nil || !released {
				t.Errorf("Release = %t, %v", released, err)
			}
		},
		"long overdue": func(t *testing.T, p *Placer, placed Placement) {
			overdue(t, p.db, placed.ID, time.Hour)
			if err := p.expire(t.Context()); err != nil {
				t.Errorf("expire = %v", err)
			}
		},
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t, 0, 0)
			addNode(t, db.DB, testNode{id: "a", capacity: 1, capabilities: drawing})
			p := startPlacer(t, db, DefaultConfig())
			first := mustSchedule(t, p, claiming("k", "r1"))
			end(t, p, first)
			changed := claiming("k", "r2")
			changed.Digest = []byte("other") // a free key stands for nothing
			second := mustSchedule(t, p, changed)
			if second.State != KeyNew || second.ID == first.ID || second.SandboxIDs[0] == first.SandboxIDs[0] {
				t.Errorf("after the failure Schedule = %+v, want a create of its own", second)
			}
		})
	}
	t.Run("refused", func(t *testing.T) {
		t.Parallel()
		db := newDB(t, 0, 0)
		p := startPlacer(t, db, DefaultConfig())
		if _, err := p.Schedule(t.Context(), claiming("k", "r1")); !errors.Is(err, node.ErrNoneReady) {
			t.Fatalf("Schedule = %v, want %v", err, node.ErrNoneReady)
		}
		addNode(t, db.DB, testNode{id: "a", capabilities: drawing})
		if placed := mustSchedule(t, p, claiming("k", "r2")); placed.State != KeyNew {
			t.Errorf("after the refusal Schedule = %+v, want %s", placed, KeyNew)
		}
	})
}

func TestAnOverdueClaimIsTakenOver(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	addNode(t, db.DB, testNode{id: "a", capacity: 1, capabilities: drawing})
	p, other := startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())
	first := mustSchedule(t, p, claiming("k", "r1"))
	overdue(t, db.DB, first.ID, time.Millisecond)
	if err := p.expire(t.Context()); err != nil { // within the grace the sweep leaves it
		t.Fatalf("expire = %v", err)
	}

	taken := mustSchedule(t, other, claiming("k", "r2"))
	if taken.State != KeyTakeover || taken.ID != first.ID || taken.Node != first.Node || !cmp.Equal(taken.SandboxIDs, first.SandboxIDs) || taken.Hold <= 0 {
		t.Errorf("Schedule = %+v, want %s of %+v", taken, KeyTakeover, first)
	}
	if taken.Reservation == first.Reservation {
		t.Error("the former caller's name for the hold still works")
	}
	if left := one[bool](t, db.DB, "SELECT count(*) = 1 AND bool_and(expires_at > clock_timestamp()) FROM reservations"); !left {
		t.Error("the hold was not renewed, or not alone")
	}
	// The former caller is late with whatever it does.
	if released, err := p.Release(t.Context(), first.ID, first.Reservation, Canceled); err != nil || released {
		t.Errorf("a late Release = %t, %v, want false", released, err)
	}
	if err := p.Extend(t.Context(), first.ID, first.Reservation, time.Minute); !errors.Is(err, node.ErrNotOpen) {
		t.Errorf("a late Extend = %v, want %v", err, node.ErrNotOpen)
	}
	if late := mustSchedule(t, p, claiming("k", "r1")); late.State != KeyPending {
		t.Errorf("its repeated call = %+v, want %s", late, KeyPending)
	}
	// Whoever has it now may repeat its call.
	again := mustSchedule(t, p, claiming("k", "r2"))
	if again.Reservation != taken.Reservation || again.State != KeyNew {
		t.Errorf("the new caller's repeated call = %+v, want its claim %+v", again, taken)
	}
}

// TestALateRecordOfATakenClaimIsTheSameSandbox: the node is full with it, so no second hold would fit.
func TestALateRecordOfATakenClaimIsTheSameSandbox(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	addNode(t, db.DB, testNode{id: "a", capacity: 1, capabilities: drawing})
	p := startPlacer(t, db, DefaultConfig())
	first := mustSchedule(t, p, claiming("k", "r1"))
	overdue(t, db.DB, first.ID, time.Millisecond)
	taken := mustSchedule(t, p, claiming("k", "r2"))
	if taken.State != KeyTakeover {
		t.Fatalf("Schedule = %+v, want %s", taken, KeyTakeover)
	}
	for who, placed := range map[string]Placement{"the former": first, "the new one": taken} {
		err := recordSealed(t.Context(), db.DB, placed, []byte("sealed"))
		if errors.Is(err, ErrAlone) {
			err = confirmWith(t.Context(), db.DB, placed, []byte("sealed"), true, placed.SandboxIDs...)
		}
		if err != nil {
			t.Errorf("%s: Confirm = %v", who, err)
		}
	}
	if diff := cmp.Diff(map[node.ID]int{"a": 1}, heldOn(t, db.DB)); diff != "" {
		t.Errorf("holds (-want +got):\n%s", diff)
	}
	if done := mustSchedule(t, p, claiming("k", "r3")); done.State != KeyDone || !cmp.Equal(done.SandboxIDs, first.SandboxIDs) {
		t.Errorf("Schedule = %+v, want %s", done, KeyDone)
	}
}

func TestAnOverdueClaimOnANodeThatDrawsItsOwnIDsIsPending(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 5)
	p := startPlacer(t, db, DefaultConfig())
	first := mustSchedule(t, p, claiming("k", "r1"))
	overdue(t, db.DB, first.ID, time.Hour)
	if err := p.expire(t.Context()); err != nil {
		t.Fatalf("expire = %v", err)
	}
	for _, request := range []string{"r1", "r2"} {
		if pending := mustSchedule(t, p, claiming("k", request)); pending.State != KeyPending {
			t.Errorf("request %s = %+v, want %s: the node may have made a sandbox", request, pending, KeyPending)
		}
	}
}

func TestAWaitingCallHearsWhatBecameOfTheKey(t *testing.T) {
	t.Parallel()
	ends := map[string]struct {
		end  func(t *testing.T, db *pgtest.Database, p *Placer, placed Placement)
		want State
	}{
		"recorded": {func(t *testing.T, db *pgtest.Database, _ *Placer, placed Placement) {
			if err := recordSealed(t.Context(), db.DB, placed, nil); err != nil {
				t.Errorf("Confirm = %v", err)
			}
		}, KeyDone},
		"released": {func(t *testing.T, _ *pgtest.Database, p *Placer, placed Placement) {
			if _, err := p.Release(t.Context(), placed.ID, placed.Reservation, NodeError); err != nil {
				t.Errorf("Release = %v", err)
			}
		}, KeyNew},
		"overdue": {func(t *testing.T, db *pgtest.Database, _ *Placer, placed Placement) {
			overdue(t, db.DB, placed.ID, time.Millisecond)
		}, KeyTakeover},
	}
	for name, tt := range ends {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t, 0, 0)
			addNode(t, db.DB, testNode{id: "a", capabilities: drawing})
			p, other := startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())
			placed := mustSchedule(t, p, claiming("k", "r1"))
			// On a slow machine the two seconds may end before anything is seen; asking again is what callers do.
			answer := make(chan Placement, 1)
			go func() {
				for t.Context().Err() == nil {
					got, err := other.Schedule(t.Context(), claiming("k", "r2"))
					if err != nil {
						t.Errorf("Schedule = %v", err)
					}
					if err != nil || got.State != KeyPending {
						answer <- got
						return
					}
				}
			}()
			other.keys.awaitWaiter(t)
			// Who waits has nothing of the database.
			if locks := one[int](t, db.DB, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`); locks != 0 {
				t.Errorf("%d advisory locks are held while a call waits, want 0", locks)
			}
			tt.end(t, db, p, placed)
			if got := <-answer; got.State != tt.want {
				t.Errorf("the waiting call = %+v, want %s", got, tt.want)
			}
		})
	}
}

// awaitWaiter returns once a call waits for a key.
func (w *keyWatch) awaitWaiter(t *testing.T) {
	t.Helper()
	for {
		if _, keys := w.names(); len(keys) > 0 {
			return
		}
		select {
		case <-t.Context().Done():
			t.Fatal("nobody waits")
		case <-time.After(time.Millisecond):
		}
	}
}

func TestAWaitEndsWithItsCaller(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	addNode(t, db.DB, testNode{id: "a", capabilities: drawing})
	p := startPlacer(t, db, DefaultConfig())
	mustSchedule(t, p, claiming("k", "r1"))
	ctx, cancel := context.WithCancel(t.Context())
	answer := make(chan error, 1)
	go func() {
		_, err := p.Schedule(ctx, claiming("k", "r2"))
		answer <- err
	}()
	p.keys.awaitWaiter(t)
	cancel()
	if err := <-answer; err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("Schedule = %v, want %v", err, context.Canceled)
	}
	if _, keys := p.keys.names(); len(keys) != 0 {
		t.Errorf("%v are waited for by nobody", keys)
	}
}

// TestOneCreateKeyThroughAllReplicasIsOnePlacement starts many callers at once, and replicas end and
// start meanwhile.
func TestOneCreateKeyThroughAllReplicasIsOnePlacement(t *testing.T) {
	t.Parallel()
	for name, capabilities := range map[string][]string{"nodes that are given ids": drawing, "nodes that draw their own": {}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const replicas, callers = 3, 24
			db := newDB(t, 0, 0)
			for i := range 5 {
				addNode(t, db.DB, testNode{id: fmt.Sprint("node-", i), capacity: 100, capabilities: capabilities})
			}
			placers := make([]*Placer, replicas)
			for i := range placers {
				placers[i] = startPlacer(t, db, DefaultConfig())
			}
			answers := make([]Placement, callers)
			var done sync.WaitGroup
			for caller := range callers {
				done.Go(func() {
					p := placers[caller%replicas]
					for answers[caller].State == "" || answers[caller].State == KeyPending {
						got, err := p.Schedule(t.Context(), claiming("k", fmt.Sprint("r", caller)))
						if err != nil {
							t.Errorf("Schedule = %v", err)
							return
						}
						answers[caller] = got
						if got.State == KeyNew {
							box := got.SandboxIDs
							if len(box) == 0 {
								box = ids("drawn-there")
							}
							if err := confirmWith(t.Context(), db.DB, got, []byte("sealed"), false, box...); err != nil {
								t.Errorf("Confirm = %v", err)
							}
						}
						// The next question goes to a replica that has just started.
						p = startPlacer(t, db, DefaultConfig())
					}
				})
			}
			done.Wait()
			states := map[State]int{}
			for caller, got := range answers {
				states[got.State]++
				if got.ID != answers[0].ID {
					t.Errorf("caller %d got placement %d, caller 0 got %d", caller, got.ID, answers[0].ID)
				}
			}
			if diff := cmp.Diff(map[State]int{KeyNew: 1, KeyDone: callers - 1}, states); diff != "" {
				t.Errorf("answers (-want +got):\n%s", diff)
			}
			if held := sumOf(heldOn(t, db.DB)); held != 1 {
				t.Errorf("%d holds, want 1", held)
			}
		})
	}
}

// TestAnOverdueClaimIsTakenOverOnce starts many takers at once.
func TestAnOverdueClaimIsTakenOverOnce(t *testing.T) {
	t.Parallel()
	const callers = 12
	db := newDB(t, 0, 0)
	addNode(t, db.DB, testNode{id: "a", capabilities: drawing})
	placers := []*Placer{startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())}
	first := mustSchedule(t, placers[0], claiming("k", "first"))
	overdue(t, db.DB, first.ID, time.Millisecond)
	states := make([]State, callers)
	var done sync.WaitGroup
	for caller := range callers {
		done.Go(func() {
			placed, err := placers[caller%2].Schedule(t.Context(), claiming("k", fmt.Sprint("r", caller)))
			if err != nil {
				t.Errorf("Schedule = %v", err)
			}
			states[caller] = placed.State
		})
	}
	done.Wait()
	count := map[State]int{}
	for _, s := range states {
		count[s]++
	}
	if diff := cmp.Diff(map[State]int{KeyTakeover: 1, KeyPending: callers - 1}, count); diff != "" {
		t.Errorf("answers (-want +got):\n%s", diff)
	}
}

func TestADryRunClaimsNoKey(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 5)
	p := startPlacer(t, db, DefaultConfig())
	r := claiming("k", "r")
	r.DryRun = true
	if placed := mustSchedule(t, p, r); placed.State != "" {
		t.Errorf("Schedule = %+v, want a node and no state", placed)
	}
	if rows := one[int](t, db.DB, "SELECT count(*) FROM placements"); rows != 0 {
		t.Errorf("a dry run left %d rows", rows)
	}
}
