package nodes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/scheduler/internal/bindings"
)

const (
	drainsEvery  = time.Second
	drainsShown  = 15 * time.Second
	drainsKept   = 90 * 24 * time.Hour // ended ones: who asks what happened to a node asks within a quarter
	drainsAtOnce = 500                 // read at once

	loopDrains = "drains"
)

// DrainsLoop moves open drains on, until ctx ends. The rows say where each is, so any replica goes on where
// another one died.
func (n *Nodes) DrainsLoop(ctx context.Context) error {
	var shown time.Time
	return n.db.Loop(ctx, loopDrains, drainsEvery, n.store.Pass(loopDrains, func(ctx context.Context) error {
		err := n.advanceDrains(ctx)
		if time.Since(shown) >= drainsShown {
			shown = time.Now()
			err = errors.Join(err, n.showDrains(ctx), n.forgetDrains(ctx))
		}
		return err
	}), n.log)
}

// advanceDrains moves all open drains on, the newest first and page by page: there may be as many as nodes.
func (n *Nodes) advanceDrains(ctx context.Context) error {
	var failed []error
	for before := int64(0); ; {
		open, err := readDrains(ctx, n.db, drainQuestion{Open: true, Before: before, Most: drainsAtOnce})
		if err != nil {
			return errors.Join(append(failed, err)...)
		}
		for i := range open {
			if err := n.advanceDrain(ctx, &open[i]); err != nil {
				failed = append(failed, err) // one node's trouble stops no other's drain
			}
			before = open[i].ID
		}
		if len(open) < drainsAtOnce || ctx.Err() != nil {
			return errors.Join(failed...)
		}
	}
}

// moveDrainSQL writes only what changed: most passes find nothing to write.
const moveDrainSQL = `
UPDATE  drains
SET     state = @state, total = GREATEST(total, @total)
WHERE   drain_id = @drain AND ended_at IS NULL AND (state <> @state OR total < @total)`

// advanceDrain moves one drain as far as it goes now. It does nothing while somebody else changes the node.
func (n *Nodes) advanceDrain(ctx context.Context, seen *Drain) error {
	var (
		now   Drain
		was   DrainState
		fed   bool
		noted []bindings.Event
	)
	err := n.db.Tx(ctx, func(tx pgx.Tx) error {
		now, was, fed, noted = Drain{}, "", false, nil
		for _, key := range []pgdb.Key{advisory.Node(seen.Node), advisory.Loop(loopDrains)} {
			if mine, err := pgdb.TryLock(ctx, tx, key); err != nil || !mine {
				return err
			}
		}
		known, err := lockRow(ctx, tx, seen.Node)
		if err != nil || known == nil {
			return err
		}
		d, err := lockDrain(ctx, tx, seen.ID)
		if err != nil || d.EndedAt != nil {
			return err
		}
		all, err := bindings.CountLeft(ctx, tx, d.Node)
		if err != nil {
			return err
		}
		d.Left = all[d.Node]
		d.Total = max(d.Total, d.Left.All())
		now, was = d, d.State
		if fed, err = moveOn(ctx, tx, &now); err != nil {
			return err
		}
		if now.State == Closing || now.State == Draining {
			_, err = tx.Exec(ctx, moveDrainSQL, pgx.StrictNamedArgs{"drain": d.ID, "state": now.State, "total": now.Total})
		} else {
			err = endDrain(ctx, tx, &now, now.State, now.Left.All())
		}
		if err != nil || now.State == was {
			return err
		}
		noted = []bindings.Event{now.event(known.ClusterID)}
		return bindings.Note(ctx, tx, noted...)
	})
	if err != nil {
		return fmt.Errorf("drain %d of %s: %w", seen.ID, seen.Node, err)
	}
	if fed {
		n.routes.Doorbell().Ring()
	}
	n.routes.Count(noted...)
	if len(noted) > 0 {
		n.log.InfoContext(ctx, "drain moved on", slog.Any("node", now.Node), slog.Int64("drain", now.ID),
			slog.Any("from", was), slog.Any("to", now.State), slog.Int("left", now.Left.All()), slog.Bool("parked", fed))
	}
	return nil
}

// moveOn asks what becomes of d until it stays, and parks what is left where that is the answer.
func moveOn(ctx context.Context, tx pgx.Tx, d *Drain) (fed bool, err error) {
	overdue := d.DeadlineAt != nil && !d.DeadlineAt.After(d.AsOf)
	for d.State == Closing || d.State == Draining {
		next, parks := d.State.next(d.Mode, d.Left, overdue)
		if next == d.State {
			return false, nil
		}
		if !parks {
			d.State = next
			continue
		}
		if fed, err = bindings.ParkDrained(ctx, tx, d.Node); err != nil {
			return false, err
		}
		// A create whose record was being written had its hold locked: parking waited for that, and its
		// binding has appeared since. It is the next pass's, for who has changed bindings waits for no other.
		left, err := bindings.CountLeft(ctx, tx, d.Node)
		if err != nil {
			return false, err
		}
		if d.Left = left[d.Node]; d.Left.All() == 0 {
			d.State = next
		}
		return fed, nil
	}
	return false, nil
}

const countDrainsSQL = `
SELECT  state, count(*)
FROM    drains
GROUP   BY state`

func (n *Nodes) showDrains(ctx context.Context) error {
	rows, err := n.db.Query(ctx, countDrainsSQL)
	if err != nil {
		return fmt.Errorf("count drains: %w", err)
	}
	counts := map[DrainState]int64{Closing: 0, Draining: 0, Done: 0, Expired: 0, Canceled: 0}
	var (
		state DrainState
		count int64
	)
	if _, err := pgx.ForEachRow(rows, []any{&state, &count}, func() error {
		counts[state] = count
		return nil
	}); err != nil {
		return fmt.Errorf("count drains: %w", err)
	}
	for state, count := range counts {
		n.metrics.drains.WithLabelValues(string(state)).Set(float64(count))
	}
	return nil
}

const forgetDrainsSQL = `
DELETE  FROM drains
WHERE   ended_at < clock_timestamp() - @keep::interval`

func (n *Nodes) forgetDrains(ctx context.Context) error {
	if _, err := n.db.Exec(ctx, forgetDrainsSQL, pgx.StrictNamedArgs{"keep": drainsKept}); err != nil {
		return fmt.Errorf("forget old drains: %w", err)
	}
	return nil
}
