package placement

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// in runs f in a transaction of db.
func in(t *testing.T, db *pgdb.DB, f func(tx pgx.Tx) error) {
	t.Helper()
	if err := db.Tx(t.Context(), f); err != nil {
		t.Fatalf("transaction: %v", err)
	}
}

func confirm(t *testing.T, db *pgdb.DB, c Confirmation) (Confirmed, error) {
	t.Helper()
	var got Confirmed
	err := db.Tx(t.Context(), func(tx pgx.Tx) (err error) {
		if c.Alone {
			if err := pgdb.Lock(t.Context(), tx, advisory.Node(c.Node)); err != nil {
				return err
			}
		}
		got, err = Confirm(t.Context(), tx, c)
		return err
	})
	return got, err
}

// state is what a test sees of one placement.
type state struct {
	Outcome   string
	Open      int // open holds
	Confirmed int
	IDs       int // in sandbox_ids
}

func stateOf(t *testing.T, db *pgdb.DB, placement int64) state {
	t.Helper()
	rows, err := db.Query(t.Context(), `
		SELECT p.outcome, (SELECT count(*) FROM reservations r WHERE r.placement_id = p.placement_id AND sandbox_id IS NULL) AS open,
		       (SELECT count(*) FROM reservations r WHERE r.placement_id = p.placement_id AND sandbox_id IS NOT NULL) AS confirmed,
		       cardinality(p.sandbox_ids) AS ids
		FROM placements p WHERE placement_id = $1`, placement)
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[state])
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func TestConfirm(t *testing.T) {
	t.Parallel()
	boxes := ids("a1", "a2", "a3")
	tests := map[string]struct {
		count   int
		change  func(t *testing.T, p *Placer, placed Placement, c *Confirmation)
		want    state
		wantErr error
	}{
		"one hold becomes the sandbox's": {count: 1, want: state{"confirmed", 0, 1, 1}},
		"what is left over goes":         {count: 3, want: state{"confirmed", 0, 1, 1}},
		"each of a group has its own": {
			count: 3, change: func(_ *testing.T, _ *Placer, _ Placement, c *Confirmation) { c.Sandbox = boxes }, want: state{"confirmed", 0, 3, 3},
		},
		"a further one is held unasked": {
			count: 2, change: func(_ *testing.T, _ *Placer, _ Placement, c *Confirmation) { c.Sandbox = boxes }, want: state{"confirmed", 0, 3, 3},
		},
		"one that is bound there already needs no hold": {
			count: 1, change: func(_ *testing.T, _ *Placer, _ Placement, c *Confirmation) {
				c.AlreadyBoundHere = map[sandbox.ID]bool{"a1": true}
			}, want: state{"confirmed", 0, 0, 1},
		},
		"a repeated call changes nothing": {
			count: 1, change: func(t *testing.T, p *Placer, _ Placement, c *Confirmation) {
				if _, err := confirm(t, p.db, *c); err != nil {
					t.Fatalf("the first Confirm = %v", err)
				}
				c.AlreadyBoundHere = map[sandbox.ID]bool{"a1": true}
			}, want: state{"confirmed", 0, 1, 1},
		},
		"a released one must be confirmed alone": {
			count: 1, change: func(t *testing.T, p *Placer, placed Placement, _ *Confirmation) {
				if _, err := p.Release(t.Context(), placed.ID, placed.Reservation, Canceled); err != nil {
					t.Fatal(err)
				}
			}, want: state{"released", 0, 0, 0}, wantErr: ErrAlone,
		},
		"alone it binds if there is room": {
			count: 1, change: func(t *testing.T, p *Placer, placed Placement, c *Confirmation) {
				if _, err := p.Release(t.Context(), placed.ID, placed.Reservation, Canceled); err != nil {
					t.Fatal(err)
				}
				c.Alone = true
			}, want: state{"confirmed", 0, 1, 1},
		},
		"alone it is refused if there is none": {
			count: 1, change: func(t *testing.T, p *Placer, placed Placement, c *Confirmation) {
				if _, err := p.Release(t.Context(), placed.ID, placed.Reservation, Canceled); err != nil {
					t.Fatal(err)
				}
				all := request()
				all.Count = 4
				if _, err := p.Schedule(t.Context(), all); err != nil {
					t.Fatal(err)
				}
				c.Alone = true
			}, want: state{"released", 0, 0, 0}, wantErr: node.ErrReservationOver,
		},
		"alone a configured limit counts too": {
			count: 1, change: func(t *testing.T, p *Placer, placed Placement, c *Confirmation) {
				if _, err := p.Release(t.Context(), placed.ID, placed.Reservation, Canceled); err != nil {
					t.Fatal(err)
				}
				c.Alone, c.Limits = true, Limits{SandboxCount: new(uint64(0))}
			}, want: state{"released", 0, 0, 0}, wantErr: node.ErrReservationOver,
		},
		"another tenant's reservation is over": {
			count: 1, change: func(_ *testing.T, _ *Placer, _ Placement, c *Confirmation) { c.Tenant = "another" },
			want: state{"reserved", 1, 0, 0}, wantErr: ErrAlone,
		},
		"what never was is over": {
			count: 1, change: func(_ *testing.T, _ *Placer, _ Placement, c *Confirmation) { c.ReservationID = "nonsense" },
			want: state{"reserved", 1, 0, 0}, wantErr: node.ErrReservationOver,
		},
		"an expired one counts until it is swept": {
			count: 1, change: func(t *testing.T, p *Placer, _ Placement, _ *Confirmation) {
				if _, err := p.db.Exec(t.Context(), "UPDATE reservations SET expires_at = clock_timestamp() - interval '1 hour'"); err != nil {
					t.Fatal(err)
				}
			}, want: state{"confirmed", 0, 1, 1},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t, 1, 4)
			p := startPlacer(t, db, DefaultConfig())
			r := request()
			r.Count, r.Constraints.SpreadKey = tt.count, "k"
			placed, err := p.Schedule(t.Context(), r)
			if err != nil {
				t.Fatalf("Schedule = %v", err)
			}
			c := Confirmation{
				Sandbox: boxes[:1], Node: placed.Node, ReservationID: placed.Reservation, PlacementID: placed.ID, Tenant: "default",
				Size: sandbox.Size{CPUMillis: 1, MemoryBytes: 1},
			}
			if tt.change != nil {
				tt.change(t, p, placed, &c)
			}
			got, err := confirm(t, p.db, c)
			if !errors.Is(err, tt.wantErr) {
				t.Fatalf("Confirm = %v, want %v", err, tt.wantErr)
			}
			if diff := cmp.Diff(tt.want, stateOf(t, db.DB, placed.ID)); diff != "" {
				t.Errorf("afterwards (-want +got):\n%s", diff)
			}
			if err == nil && (got.Tenant != "default" || got.Size != size() || got.PlacementID != placed.ID) {
				t.Errorf("Confirm = %+v, want the placement's tenant and size", got)
			}
		})
	}
}

func TestAnAgentENVRecordTakesTheSmallestUnnamedHold(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 0)
	p := startPlacer(t, db, DefaultConfig())
	var smallest Placement
	for _, mem := range []int64{3, 1, 2} {
		r := Request{Count: 1, Size: sandbox.Size{CPUMillis: 1000, MemoryBytes: mem * gib}}
		placed, err := p.Schedule(t.Context(), r)
		if err != nil {
			t.Fatalf("Schedule = %v", err)
		}
		if mem == 1 {
			smallest = placed
		}
	}
	named := request()
	named.Size.MemoryBytes = 1
	if _, err := p.Schedule(t.Context(), named); err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	record := func(id sandbox.ID) Confirmed {
		t.Helper()
		got, err := confirm(t, p.db, Confirmation{Sandbox: ids(id), Node: "node-0", Size: sandbox.Size{CPUMillis: 7, MemoryBytes: 7}})
		if err != nil {
			t.Fatalf("Confirm = %v", err)
		}
		return got
	}
	if got := record("a1"); got.PlacementID != smallest.ID || got.Size.MemoryBytes != gib {
		t.Errorf("Confirm = %+v, want the hold of 1 GiB of placement %d", got, smallest.ID)
	}
	record("a2")
	record("a3")
	if got := record("a4"); got.PlacementID != 0 || got.Size.MemoryBytes != 7 {
		t.Errorf("without an unnamed hold Confirm = %+v, want one unasked of the record's size", got)
	}
	if held := heldOn(t, db.DB)["node-0"]; held != 5 {
		t.Errorf("%d holds, want four confirmed and the named one", held)
	}
	if got := one[int](t, db.DB, "SELECT count(*) FROM reservations WHERE named AND sandbox_id IS NULL"); got != 1 {
		t.Errorf("%d named holds are open, want 1", got)
	}
}

func TestARecordElsewhereMovesTheHold(t *testing.T) {
	t.Parallel()
	db := newDB(t, 2, 0)
	for _, n := range []node.ID{"node-0", "node-1"} {
		if _, err := confirm(t, db.DB, Confirmation{Sandbox: ids("a1"), Node: n, Size: size()}); err != nil {
			t.Fatalf("Confirm on %s = %v", n, err)
		}
	}
	if diff := cmp.Diff(map[node.ID]int{"node-1": 1}, heldOn(t, db.DB)); diff != "" {
		t.Errorf("holds (-want +got):\n%s", diff)
	}
}

func TestAdoptEndsTheHoldOfWhatARosterShows(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	addNode(t, db.DB, testNode{id: "a", capabilities: []string{"create_key"}})
	addNode(t, db.DB, testNode{id: "b"})
	p := startPlacer(t, db, DefaultConfig())
	place := func(n node.ID, count int) Placement {
		t.Helper()
		r := request()
		r.Constraints.Node, r.Count = n, count
		placed, err := p.Schedule(t.Context(), r)
		if err != nil {
			t.Fatalf("Schedule = %v", err)
		}
		return placed
	}
	drawn, named, group := place("a", 1), place("a", 1), place("a", 3)
	elsewhere := place("b", 1)
	entries := []node.Entry{
		{Sandbox: drawn.SandboxIDs[0]},
		{Sandbox: "named", Reservation: named.Reservation},
		{Sandbox: group.SandboxIDs[0]},
		{Sandbox: group.SandboxIDs[2]},
		{Sandbox: "elsewhere", Reservation: elsewhere.Reservation},
		{Sandbox: "unknown", Reservation: uuid.NewString()},
		{Sandbox: "odd", Reservation: "nonsense"},
	}
	var owners map[sandbox.ID]Owner
	in(t, p.db, func(tx pgx.Tx) (err error) {
		owners, err = Adopt(t.Context(), tx, "a", entries)
		return err
	})
	owner := func(of Placement) Owner { return Owner{Tenant: "default", Size: size(), PlacementID: of.ID} }
	want := map[sandbox.ID]Owner{
		drawn.SandboxIDs[0]: owner(drawn), "named": owner(named), group.SandboxIDs[0]: owner(group), group.SandboxIDs[2]: owner(group),
	}
	if diff := cmp.Diff(want, owners); diff != "" {
		t.Errorf("Adopt (-want +got):\n%s", diff)
	}
	for name, tt := range map[string]struct {
		of   Placement
		want state
	}{
		"drawn": {drawn, state{"confirmed", 0, 0, 1}}, "named": {named, state{"confirmed", 0, 0, 1}},
		"the group keeps the third hold": {group, state{"confirmed", 1, 0, 3}}, "elsewhere": {elsewhere, state{"reserved", 1, 0, 0}},
	} {
		if diff := cmp.Diff(tt.want, stateOf(t, db.DB, tt.of.ID)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	// The gateway's own record, a moment later, finds its sandbox bound.
	late, err := confirm(t, p.db, Confirmation{
		Sandbox: drawn.SandboxIDs, Node: "a", ReservationID: drawn.Reservation, PlacementID: drawn.ID, Tenant: "default",
		AlreadyBoundHere: map[sandbox.ID]bool{drawn.SandboxIDs[0]: true},
	})
	if err != nil || late.PlacementID != drawn.ID {
		t.Errorf("Confirm after the roster = %+v, %v", late, err)
	}
}

func TestHoldsEndWithWhatTheyStoodFor(t *testing.T) {
	t.Parallel()
	db := newDB(t, 2, 0)
	p := startPlacer(t, db, DefaultConfig())
	confirmed := func(n node.ID, id sandbox.ID) {
		t.Helper()
		if _, err := confirm(t, p.db, Confirmation{Sandbox: ids(id), Node: n, Size: size()}); err != nil {
			t.Fatalf("Confirm = %v", err)
		}
	}
	confirmed("node-0", "listed")
	confirmed("node-0", "unlisted")
	confirmed("node-1", "other")
	in(t, p.db, func(tx pgx.Tx) error { return Listed(t.Context(), tx, "node-0", ids("listed", "other", "strange")) })
	if diff := cmp.Diff(map[node.ID]int{"node-0": 1, "node-1": 1}, heldOn(t, db.DB)); diff != "" {
		t.Errorf("after a roster (-want +got):\n%s", diff)
	}

	overdue := func(grace time.Duration) (late []node.ID) {
		t.Helper()
		in(t, p.db, func(tx pgx.Tx) (err error) {
			late, err = OverdueNodes(t.Context(), tx, grace)
			return err
		})
		return late
	}
	if got := overdue(time.Hour); len(got) != 0 {
		t.Errorf("OverdueNodes(1h) = %v, want none", got)
	}
	if _, err := db.Exec(t.Context(), "UPDATE reservations SET created_at = created_at - interval '2 hours' WHERE sandbox_id = 'unlisted'"); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]node.ID{"node-0"}, overdue(time.Hour)); diff != "" {
		t.Errorf("OverdueNodes (-want +got):\n%s", diff)
	}

	in(t, p.db, func(tx pgx.Tx) error { return DropHolds(t.Context(), tx, ids("unlisted", "strange")) })
	if diff := cmp.Diff(map[node.ID]int{"node-1": 1}, heldOn(t, db.DB)); diff != "" {
		t.Errorf("after an end (-want +got):\n%s", diff)
	}

	r := request()
	r.Constraints.Node = "node-1"
	placed, err := p.Schedule(t.Context(), r)
	if err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	in(t, p.db, func(tx pgx.Tx) error { return ReleaseNode(t.Context(), tx, "node-1") })
	if diff := cmp.Diff(map[node.ID]int{}, heldOn(t, db.DB)); diff != "" {
		t.Errorf("after the node left (-want +got):\n%s", diff)
	}
	if got := stateOf(t, db.DB, placed.ID).Outcome; got != "released" {
		t.Errorf("what waited there is %s, want released", got)
	}
}

// Two who settle the same placements, each told of them in another order, wait for each other where
// the first one is locked already: whoever had the second one by then would be waited for in turn.
func TestPlacementsAreSettledInOneOrder(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 10)
	p := startPlacer(t, db, DefaultConfig())
	var settled []settlement
	for i := range 2 {
		placed, err := p.Schedule(t.Context(), request())
		if err != nil {
			t.Fatalf("Schedule = %v", err)
		}
		settled = append(settled, settlement{placement: placed.ID, reservation: placed.Reservation, sandboxes: ids(sandbox.ID(fmt.Sprint("s", i)))})
	}
	// Among many rows they are looked up one by one, as they were told.
	for _, sql := range []string{
		`INSERT INTO placements (outcome, refusal, cpu_millis, memory_bytes, strategy) SELECT 'refused', 'quota', 1, 1, 'random' FROM generate_series(1, 5000)`,
		`ANALYZE placements`,
	} {
		if _, err := db.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan error, 2)
	in(t, db.DB, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `SELECT FROM placements WHERE placement_id = $1 FOR UPDATE`, settled[0].placement); err != nil {
			return err
		}
		for i, order := range [][]settlement{{settled[0], settled[1]}, {settled[1], settled[0]}} {
			go func() {
				tx, err := db.Begin(t.Context())
				if err == nil {
					err = errors.Join(settle(t.Context(), tx, order), tx.Commit(t.Context()))
				}
				done <- err
			}()
			awaitLockWaiters(t, db.DB, i+1)
		}
		return nil
	})
	for range 2 {
		if err := <-done; err != nil {
			t.Errorf("settle = %v", err)
		}
	}
	for _, s := range settled {
		if got := stateOf(t, db.DB, s.placement); got.Outcome != string(Recorded) || got.IDs != 1 {
			t.Errorf("placement %d is %+v, want it confirmed", s.placement, got)
		}
	}
}
