package migrate

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

const renewEpochSQL = `UPDATE feed_meta SET epoch = gen_random_uuid() WHERE one`

// skipRevisionsSQL leaves a gap that no gateway can have read into.
const skipRevisionsSQL = `SELECT setval('revisions', nextval('revisions') + 1000000)`

// NewEpoch gives the database another identity, so that every reader empties its caches, and moves
// revisions ahead, so that none is handed out twice. It must run after a backup was restored or a
// disk was copied, before services start; more often does no harm.
func NewEpoch(ctx context.Context, url string) error {
	conn, err := connect(ctx, url)
	if err != nil {
		return err
	}
	defer closeConn(ctx, conn)
	if err := becomeMigrator(ctx, conn); err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, skipRevisionsSQL); err != nil {
			return fmt.Errorf("move revisions ahead: %w", err)
		}
		tag, err := tx.Exec(ctx, renewEpochSQL)
		if err != nil {
			return fmt.Errorf("renew the epoch: %w", err)
		}
		if tag.RowsAffected() != 1 {
			return fmt.Errorf("renew the epoch: feed_meta has %d rows; run berth migrate up first", tag.RowsAffected())
		}
		return nil
	})
}
