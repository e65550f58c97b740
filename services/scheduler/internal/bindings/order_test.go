package bindings

import (
	"cmp"
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// Whoever inserts a binding waits for a transaction that inserted or changed the same row. So nobody may
// wait for anything once it has changed rows: else the two wait for each other. Here another transaction
// has inserted "a-new" and goes on to "z-old", as a roster does that lists both and read neither, while
// what is tested knows "z-old" and not yet "a-new".
func TestWhoWaitsForANewBindingHasChangedNoOldOne(t *testing.T) {
	t.Parallel()
	const fresh, old sandbox.ID = "a-new", "z-old"
	const (
		insert = `INSERT INTO bindings (sandbox_id, state, node_id, origin) VALUES ($1, 'bound', 'b', 'adopted')
		        ON CONFLICT (sandbox_id) DO NOTHING`
		lockHold = `SELECT FROM reservations WHERE sandbox_id = $1 FOR UPDATE`
	)
	tests := map[string]struct {
		given func(c *cell)
		block string // how the other comes first; "": by inserting the new binding
		do    func(ctx context.Context, c *cell) error
	}{
		"a roster that takes the old one over": {
			given: func(c *cell) { c.mustRecord(on("b", old)); c.park1("b") },
			do:    func(ctx context.Context, c *cell) error { return c.reconcileOnce(ctx, "a", fresh, old) },
		},
		"a roster that ends the old one": {
			given: func(c *cell) {
				c.mustRecord(on("a", old))
				c.exec(`UPDATE bindings SET bound_at = bound_at - interval '1 hour'`)
			},
			do: func(ctx context.Context, c *cell) error { return c.reconcileOnce(ctx, "a", fresh) },
		},
		"a record that moves the old one": {
			given: func(c *cell) { c.mustRecord(on("b", old)) },
			do: func(ctx context.Context, c *cell) error {
				_, err := c.Record(ctx, on("a", fresh, old))
				return err
			},
		},
		"a record that gives the old one its tenant": {
			given: func(c *cell) { c.mustRecord(on("a", old)) },
			do: func(ctx context.Context, c *cell) error {
				_, err := c.Record(ctx, ofTenant("t1", on("a", fresh, old)))
				return err
			},
		},
		"a node that unregisters, whose hold the other has": {
			given: func(c *cell) { c.mustRecord(on("a", fresh, old)) },
			block: lockHold,
			do: func(ctx context.Context, c *cell) error {
				return pgx.BeginFunc(ctx, c.db.Pool, func(tx pgx.Tx) error {
					_, err := ParkNode(ctx, tx, "a")
					return err
				})
			},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			c.listNode("a", time.Hour)
			c.listNode("b", time.Hour)
			tt.given(c)

			other, err := c.owner.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = other.Rollback(context.WithoutCancel(t.Context())) }() // after a commit it has nothing to do
			if _, err := other.Exec(t.Context(), cmp.Or(tt.block, insert), fresh); err != nil {
				t.Fatal(err)
			}
			// What does not wait at all cannot meet it; what waits does, before a deadlock is looked for.
			if _, err := other.Exec(t.Context(), `SET LOCAL lock_timeout = '1ms'`); err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() { done <- tt.do(t.Context(), c) }()
			c.awaitBlocked()

			if _, err := other.Exec(t.Context(), insert, old); err != nil {
				t.Errorf("insert the old binding while the new one is waited for: %v, want it left alone at once", err)
			}
			if err := other.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Errorf("%s = %v, want it done once the other has ended", name, err)
			}
			if got := c.row(fresh); got.Node != "a" {
				t.Errorf("%s is on %s, want a", fresh, got.Node)
			}
		})
	}
}

// reconcileOnce reconciles in one try: a deadlock is not absorbed.
func (c *cell) reconcileOnce(ctx context.Context, n node.ID, ids ...sandbox.ID) error {
	listed := make([]string, len(ids))
	for i, id := range ids {
		listed[i] = string(id)
	}
	roster, _ := node.NewRoster(listed, nil)
	return pgx.BeginFunc(ctx, c.db.Pool, func(tx pgx.Tx) error {
		_, err := c.Reconcile(ctx, tx, Report{Node: n, Cluster: "c1", Roster: roster})
		return err
	})
}

// awaitBlocked returns once a session of the scheduler's role waits for another transaction.
func (c *cell) awaitBlocked() {
	c.t.Helper()
	const blocked = `SELECT count(*) FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
	        WHERE a.datname = current_database() AND a.application_name = 'pgtest as berth_scheduler' AND NOT l.granted AND l.locktype = 'transactionid'`
	for value[int64](c, blocked) == 0 {
		if c.t.Context().Err() != nil {
			c.t.Fatal("nobody waits for the new binding")
		}
	}
}
