package placement

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
)

func TestEverySlotIsUsedAndNoneBeyond(t *testing.T) {
	t.Parallel()
	const nodes, capacity, callers, tries = 10, 12, 32, 5 // 160 tries for 120 slots
	for _, replicas := range []int{1, 2, 4} {
		t.Run(fmt.Sprintf("%d replicas", replicas), func(t *testing.T) {
			t.Parallel()
			db := newDB(t, nodes, capacity)
			placers := make([]*Placer, replicas)
			for i := range placers {
				placers[i] = startPlacer(t, db, DefaultConfig())
			}
			var placed, refusals atomic.Int64
			var callersDone sync.WaitGroup
			for caller := range callers {
				callersDone.Go(func() {
					for try := range tries {
						_, err := placers[(caller+try)%replicas].Schedule(t.Context(), request())
						switch {
						case err == nil:
							placed.Add(1)
						case errors.Is(err, node.ErrNoRoom):
							refusals.Add(1)
						default:
							t.Errorf("Schedule = %v, want a placement or %v", err, node.ErrNoRoom)
						}
					}
				})
			}
			callersDone.Wait()
			held := heldOn(t, db.DB)
			for id, n := range held {
				if n > capacity {
					t.Errorf("%s has %d holds, its limit is %d", id, n, capacity)
				}
			}
			if got := placed.Load(); got != nodes*capacity || sumOf(held) != nodes*capacity {
				t.Errorf("%d answers and %d holds, want %d of each; %d refused", got, sumOf(held), nodes*capacity, refusals.Load())
			}
		})
	}
}

func TestAsManyOneSlotNodesAsCallersSeatThemAll(t *testing.T) {
	t.Parallel()
	const callers = 24
	db := newDB(t, callers, 1)
	placers := []*Placer{startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())}
	var seated sync.WaitGroup
	for caller := range callers {
		seated.Go(func() {
			if _, err := placers[caller%2].Schedule(t.Context(), request()); err != nil {
				t.Errorf("caller %d: Schedule = %v, want a node", caller, err)
			}
		})
	}
	seated.Wait()
	for id, n := range heldOn(t, db.DB) {
		if n != 1 {
			t.Errorf("%s has %d holds, want 1", id, n)
		}
	}
}

// lockCountInsertSQL is the form that postgres.md warns of: lock and count in one statement. Its
// snapshot is older than the lock it waits for.
const lockCountInsertSQL = `
WITH    l AS MATERIALIZED (SELECT pg_advisory_xact_lock(lock_key(@class::int, @node::text))),
        used AS MATERIALIZED (SELECT count(*) AS n FROM reservations, l WHERE node_id = @node)
INSERT  INTO reservations (reservation_id, n, node_id, cpu_millis, memory_bytes, named, expires_at)
SELECT  gen_random_uuid(), 1, @node, 1, 1, true, clock_timestamp() + interval '1 hour'
FROM    used WHERE used.n < @capacity`

// TestLockAndCountInOneStatementOvershoots is the control of the tests above: who waits for the lock inside
// the statement that counts does not see what came before it got the lock.
func TestLockAndCountInOneStatementOvershoots(t *testing.T) {
	t.Parallel()
	const capacity, clients = 1, 2
	db := newDB(t, 1, capacity)
	key := advisory.Node("node-0")
	var inserts sync.WaitGroup
	in(t, db.DB, func(tx pgx.Tx) error {
		if err := pgdb.Lock(t.Context(), tx, key); err != nil {
			return err
		}
		for range clients {
			inserts.Go(func() {
				if _, err := db.Exec(t.Context(), lockCountInsertSQL, pgx.StrictNamedArgs{
					"class": key.Class, "node": key.ID, "capacity": capacity,
				}); err != nil {
					t.Errorf("insert: %v", err)
				}
			})
		}
		awaitLockWaiters(t, db.DB, clients)
		return nil
	})
	inserts.Wait()
	if held := one[int](t, db.DB, "SELECT count(*) FROM reservations"); held != clients {
		t.Errorf("%d holds on a node for %d, want %d: the control shows nothing", held, capacity, clients)
	}
}

func TestOneRequestIDThroughAllReplicasIsOnePlacement(t *testing.T) {
	t.Parallel()
	const replicas, callers = 4, 24
	db := newDB(t, 5, 100)
	placers := make([]*Placer, replicas)
	for i := range placers {
		placers[i] = startPlacer(t, db, DefaultConfig())
	}
	answers := make([]Placement, callers)
	var done sync.WaitGroup
	for caller := range callers {
		done.Go(func() {
			placed, err := placers[caller%replicas].Schedule(t.Context(), keyed("same"))
			if err != nil {
				t.Errorf("Schedule = %v", err)
			}
			answers[caller] = placed
		})
	}
	done.Wait()
	for i, got := range answers {
		if got.ID != answers[0].ID || got.Reservation != answers[0].Reservation || got.Node != answers[0].Node {
			t.Errorf("caller %d got %+v, caller 0 got %+v", i, got, answers[0])
		}
	}
	if held := sumOf(heldOn(t, db.DB)); held != 1 {
		t.Errorf("%d holds, want 1", held)
	}
}

func TestWhoeverLeavesHoldsNothingTwice(t *testing.T) {
	t.Parallel()
	const nodes, capacity, callers = 3, 10, 60
	db := newDB(t, nodes, capacity)
	placers := []*Placer{startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())}
	var done sync.WaitGroup
	for caller := range callers {
		done.Go(func() {
			r := keyed(fmt.Sprint("request ", caller))
			// Half of the callers leave at a random moment, and ask the other replica again.
			if caller%2 == 0 {
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(8*time.Millisecond))
				_, _ = placers[0].Schedule(ctx, r) // it may end any way
				cancel()
			}
			if _, err := placers[1].Schedule(t.Context(), r); err != nil && !errors.Is(err, node.ErrNoRoom) {
				t.Errorf("Schedule = %v", err)
			}
		})
	}
	done.Wait()
	held := heldOn(t, db.DB)
	if sumOf(held) != nodes*capacity {
		t.Errorf("%d holds, want %d", sumOf(held), nodes*capacity)
	}
	if twice := one[int](t, db.DB, "SELECT count(*) FROM (SELECT placement_id FROM reservations GROUP BY 1 HAVING count(*) > 1) AS t"); twice != 0 {
		t.Errorf("%d placements hold more than one row", twice)
	}
}

// TestConfirmReleaseAndExpiryRacedHaveOneOutcome starts all three at once on each of many reservations.
func TestConfirmReleaseAndExpiryRacedHaveOneOutcome(t *testing.T) {
	t.Parallel()
	const rounds = 40
	db := newDB(t, 2, 1000)
	p := startPlacer(t, db, DefaultConfig())
	ends := map[string]int{}
	for i := range rounds {
		r := request()
		r.TTL = time.Millisecond
		placed, err := p.Schedule(t.Context(), r)
		if err != nil {
			t.Fatalf("Schedule = %v", err)
		}
		box := newID(t)
		var (
			confirmed error
			released  bool
			done      sync.WaitGroup
		)
		done.Go(func() { confirmed = confirmOnce(t.Context(), db.DB, placed, box) })
		done.Go(func() {
			var err error
			if released, err = p.Release(t.Context(), placed.ID, placed.Reservation, Canceled); err != nil {
				t.Errorf("Release = %v", err)
			}
		})
		done.Go(func() {
			if err := p.expire(t.Context()); err != nil {
				t.Errorf("expire = %v", err)
			}
		})
		done.Wait()
		// It may have come to nothing for all three, if the pass was another's; then the next pass ends it.
		if err := p.expire(t.Context()); err != nil {
			t.Errorf("expire = %v", err)
		}
		outcome := one[string](t, db.DB, "SELECT outcome FROM placements WHERE placement_id = $1", placed.ID)
		held := one[int](t, db.DB, "SELECT count(*) FROM reservations WHERE placement_id = $1", placed.ID)
		ends[outcome]++
		if (confirmed == nil) != (outcome == "confirmed") || released != (outcome == "released") || (held == 1) != (outcome == "confirmed") {
			t.Errorf("round %d: %s with %d holds, confirmed %v, released %t", i, outcome, held, confirmed, released)
		}
		if confirmed != nil && !errors.Is(confirmed, ErrAlone) {
			t.Errorf("round %d: Confirm = %v, want %v", i, confirmed, ErrAlone)
		}
		if err := db.Tx(t.Context(), func(tx pgx.Tx) error { return Listed(t.Context(), tx, placed.Node, ids(box)) }); err != nil {
			t.Errorf("Listed = %v", err)
		}
	}
	if held := sumOf(heldOn(t, db.DB)); held != 0 {
		t.Errorf("%d holds are left, want 0", held)
	}
	t.Logf("outcomes: %v", ends)
}

func confirmOnce(ctx context.Context, db *pgdb.DB, placed Placement, box ...sandboxID) error {
	return confirmWith(ctx, db, placed, nil, false, box...)
}

func confirmWith(ctx context.Context, db *pgdb.DB, placed Placement, sealed []byte, alone bool, box ...sandboxID) error {
	return db.Tx(ctx, func(tx pgx.Tx) error {
		if alone {
			if err := pgdb.Lock(ctx, tx, advisory.Node(placed.Node)); err != nil {
				return err
			}
		}
		_, err := Confirm(ctx, tx, Confirmation{
			Sandbox: box, Node: placed.Node, ReservationID: placed.Reservation, PlacementID: placed.ID, Tenant: "default", Size: size(),
			SealedAnswer: sealed, Alone: alone,
		})
		return err
	})
}
