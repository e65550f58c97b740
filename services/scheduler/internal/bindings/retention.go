package bindings

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
)

const (
	retentionEvery = time.Minute
	loopRetention  = "binding retention"
)

// RetentionLoop deletes bindings that are gone long enough, orphans that nobody lists any more, and feed
// rows that every reader has seen, until ctx ends.
func (b *Bindings) RetentionLoop(ctx context.Context) error {
	return b.db.Loop(ctx, loopRetention, retentionEvery, b.store.Pass(loopRetention, func(ctx context.Context) error {
		return errors.Join(b.forgetGone(ctx), b.forgetOrphans(ctx), b.trimFeed(ctx))
	}), b.log)
}

// deleteGoneSQL: no gateway need hear of it, for the row's last F said gone, and should the id return,
// the sequence gives it a higher revision.
const deleteGoneSQL = `
WITH    old AS MATERIALIZED (
        SELECT sandbox_id
        FROM   bindings
        WHERE  state <> 'bound' AND state = 'gone' AND ended_at < now() - @keep::interval
        ORDER  BY sandbox_id
        LIMIT  @most::bigint
        FOR    UPDATE SKIP LOCKED)
DELETE  FROM bindings AS b
USING   old
WHERE   b.sandbox_id = old.sandbox_id`

func (b *Bindings) forgetGone(ctx context.Context) error {
	for deleted := int64(passBatch); deleted == passBatch; {
		err := b.db.Tx(ctx, func(tx pgx.Tx) error {
			deleted = 0
			if mine, err := pgdb.TryLock(ctx, tx, advisory.Loop(loopRetention)); err != nil || !mine {
				return err
			}
			tag, err := tx.Exec(ctx, deleteGoneSQL, pgx.StrictNamedArgs{"keep": b.cfg.TombstoneRetention, "most": passBatch})
			deleted = tag.RowsAffected()
			if err != nil {
				return fmt.Errorf("delete gone bindings: %w", err)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
