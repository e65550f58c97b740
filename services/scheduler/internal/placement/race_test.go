package placement

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
)

// TestAnExtensionRacedWithTheEndsOfItsHoldRevivesNothing: a hold that was extended may still be confirmed or released, and
// one that has ended stays ended.
func TestAnExtensionRacedWithTheEndsOfItsHoldRevivesNothing(t *testing.T) {
	t.Parallel()
	const rounds = 30
	db := newDB(t, 2, 1000)
	p, other := startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())
	ends := map[string]int{}
	for i := range rounds {
		placed := mustSchedule(t, p, request())
		overdue(t, db.DB, placed.ID, time.Second)
		box := newID(t)
		var (
			extended, confirmed error
			released            bool
			done                sync.WaitGroup
		)
		done.Go(func() { extended = other.Extend(t.Context(), placed.ID, placed.Reservation, time.Hour) })
		if i%3 == 0 {
			done.Go(func() { confirmed = confirmOnce(t.Context(), db.DB, placed, box) })
		}
		if i%3 == 1 {
			done.Go(func() {
				var err error
				if released, err = p.Release(t.Context(), placed.ID, placed.Reservation, Canceled); err != nil {
					t.Errorf("Release = %v", err)
				}
			})
		}
		done.Go(func() {
			if err := p.expire(t.Context()); err != nil {
				t.Errorf("expire = %v", err)
			}
		})
		done.Wait()
		if extended != nil && !errors.Is(extended, node.ErrNotOpen) {
			t.Errorf("round %d: Extend = %v, want %v", i, extended, node.ErrNotOpen)
		}
		// A pass that found the row locked leaves it to the next one.
		if err := p.expire(t.Context()); err != nil {
			t.Errorf("expire = %v", err)
		}
		outcome := one[string](t, db.DB, "SELECT outcome FROM placements WHERE placement_id = $1", placed.ID)
		held := one[int](t, db.DB, "SELECT count(*) FROM reservations WHERE placement_id = $1", placed.ID)
		ends[fmt.Sprintf("%s, extended %t", outcome, extended == nil)]++
		if (i%3 == 0 && confirmed == nil) != (outcome == "confirmed") || released != (outcome == "released") ||
			(held == 1) != (outcome == "confirmed" || outcome == "reserved") || outcome == "reserved" && extended != nil {
			t.Errorf("round %d: %s with %d holds, extended %v, confirmed %v, released %t", i, outcome, held, extended, confirmed, released)
		}
		if outcome == "expired" && extended == nil {
			t.Errorf("round %d: it expired, though it was extended by an hour", i)
		}
		// What is left is ended, so that the sum is none.
		if _, err := p.Release(t.Context(), placed.ID, placed.Reservation, Canceled); err != nil {
			t.Errorf("Release = %v", err)
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

// TestAReplacementRacedWithTheEndsOfWhatItReplacesHoldsOnce: whoever comes first, one request id has one node's room.
func TestAReplacementRacedWithTheEndsOfWhatItReplacesHoldsOnce(t *testing.T) {
	t.Parallel()
	const rounds = 30
	db := newDB(t, 3, 1000)
	p, other := startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())
	ends := map[string]int{}
	for i := range rounds {
		r := keyed(fmt.Sprint("request ", i))
		first := mustSchedule(t, p, r)
		next := r
		next.Replaces, next.Exclude = first.Reservation, []node.ID{first.Node}
		box := newID(t)
		rival := map[int]func(ctx context.Context) error{
			0: func(ctx context.Context) error { return confirmOnce(ctx, db.DB, first, box) },
			1: func(ctx context.Context) error {
				_, err := p.Release(ctx, first.ID, first.Reservation, NodeError)
				return err
			},
			2: func(ctx context.Context) error {
				overdue := "UPDATE reservations SET expires_at = clock_timestamp() - interval '1 second' WHERE reservation_id = $1 AND sandbox_id IS NULL"
				if _, err := db.Exec(ctx, overdue, first.Reservation); err != nil {
					return err
				}
				return p.expire(ctx)
			},
		}[i%3]
		var (
			second          Placement
			replaced, ended error
			done            sync.WaitGroup
		)
		done.Go(func() { second, replaced = other.Schedule(t.Context(), next) })
		done.Go(func() { ended = rival(t.Context()) })
		done.Wait()
		if replaced != nil {
			t.Fatalf("round %d: Schedule = %v, want a placement whoever came first", i, replaced)
		}
		won := i%3 == 0 && ended == nil // the record
		if !won && ended != nil && !errors.Is(ended, ErrAlone) {
			t.Errorf("round %d: the other end = %v", i, ended)
		}
		ends[fmt.Sprintf("rival %d, replaced %t", i%3, second.Reservation != first.Reservation)]++
		if second.ID != first.ID || second.Confirmed != won || won && second.Reservation != first.Reservation || !won && second.Node == first.Node {
			t.Errorf("round %d: the new try is %+v after %+v, recorded: %t", i, second, first, won)
		}
		if rows := one[int](t, db.DB, "SELECT count(*) FROM reservations WHERE placement_id = $1", first.ID); rows != 1 {
			t.Errorf("round %d: %d holds of one request id, want 1", i, rows)
		}
		if rows := one[int](t, db.DB, "SELECT count(*) FROM reservations WHERE reservation_id = $1", second.Reservation); rows != 1 {
			t.Errorf("round %d: %d holds of the reservation that was answered, want 1", i, rows)
		}
		if _, err := p.Release(t.Context(), second.ID, second.Reservation, Canceled); err != nil {
			t.Errorf("Release = %v", err)
		}
		if err := db.Tx(t.Context(), func(tx pgx.Tx) error { return Listed(t.Context(), tx, first.Node, ids(box)) }); err != nil {
			t.Errorf("Listed = %v", err)
		}
	}
	if held := sumOf(heldOn(t, db.DB)); held != 0 {
		t.Errorf("%d holds are left, want 0", held)
	}
	t.Logf("outcomes: %v", ends)
}
