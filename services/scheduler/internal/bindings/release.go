package bindings

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/placement"
)

// markDeletedSQL turns another ending into a deletion, for which no roster brings the sandbox back.
// State and node stay, so gateways need not hear of it.
const markDeletedSQL = `
UPDATE  bindings
SET     ended_by = 'deleted', ended_at = clock_timestamp()
WHERE   sandbox_id = @id AND state = 'gone' AND ended_by <> 'deleted'`

// Release ends the binding of a sandbox that was deleted, and returns its revision after that. A
// revision that is neither 0 nor the row's gives sandbox.ErrChanged. What is gone already, or was
// forgotten since, is no error: then nothing changes, and the answer is its revision, or 0.
func (b *Bindings) Release(ctx context.Context, id sandbox.ID, revision sandbox.Revision) (sandbox.Revision, error) {
	var (
		ended sandbox.Revision
		fed   bool
	)
	err := b.db.Tx(ctx, func(tx pgx.Tx) error {
		ended, fed = 0, false
		held, err := lockHeld(ctx, tx, []sandbox.ID{id})
		if err != nil {
			return err
		}
		row, found := held[id]
		switch {
		case !found:
			return nil
		case row.State == sandbox.Gone:
			ended = row.Revision
			if _, err := tx.Exec(ctx, markDeletedSQL, pgx.StrictNamedArgs{"id": id}); err != nil {
				return fmt.Errorf("mark %s deleted: %w", id, err)
			}
			return nil
		case revision != 0 && revision != row.Revision:
			return sandbox.ErrChanged
		}
		if err := placement.DropHolds(ctx, tx, []sandbox.ID{id}); err != nil {
			return err
		}
		moved, err := end(ctx, tx, []sandbox.ID{id}, sandbox.Gone, sandbox.EndedByDelete)
		if err != nil {
			return err
		}
		for _, m := range moved {
			ended, fed = m.Revision, true
		}
		return Note(ctx, tx, Event{Kind: KindGone, Effect: Effect(sandbox.EndedByDelete), Node: row.NodeID, Sandbox: id})
	})
	if err != nil {
		b.store.Failed("release", err)
		return 0, fmt.Errorf("release %s: %w", id, err)
	}
	if fed {
		b.bell.Ring()
		b.CountMany(KindGone, Effect(sandbox.EndedByDelete), 1)
	}
	return ended, nil
}
