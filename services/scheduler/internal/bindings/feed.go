package bindings

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
)

// NodeChange is a node whose endpoint, capabilities or trust are about to change.
type NodeChange struct {
	Node     node.ID
	Cluster  string
	Endpoint string
	Above    int64 // the endpoint_revision of now; 0: a new node
}

const announceNodeSQL = `
INSERT  INTO route_feed (kind, key, revision, cluster_id, node_id, endpoint)
SELECT  'node', @node::text, GREATEST(@above::bigint + 1, nextval('revisions')), @cluster::text, @node::text, @endpoint::text
RETURNING revision`

// AnnounceNode writes the feed row of c and returns its revision, which the caller stores as the
// node's endpoint_revision in the same transaction, and rings after the commit.
func AnnounceNode(ctx context.Context, tx pgx.Tx, c NodeChange) (int64, error) {
	var revision int64
	err := tx.QueryRow(ctx, announceNodeSQL, pgx.StrictNamedArgs{
		"node": c.Node, "above": c.Above, "cluster": c.Cluster, "endpoint": c.Endpoint,
	}).Scan(&revision)
	if err != nil {
		return 0, fmt.Errorf("announce node %s: %w", c.Node, err)
	}
	return revision, nil
}

const insertMarkSQL = `INSERT INTO feed_marks DEFAULT VALUES`

// raiseFloorSQL takes the newest mark that is old enough: all transactions below its horizon had
// ended when it was made, so whoever polled since has seen their rows.
const raiseFloorSQL = `
UPDATE  feed_meta
SET     floor = mark.horizon
FROM    (SELECT horizon FROM feed_marks WHERE at < clock_timestamp() - @keep::interval ORDER BY at DESC LIMIT 1) AS mark
WHERE   feed_meta.floor < mark.horizon`

const deleteOldMarksSQL = `
DELETE  FROM feed_marks
WHERE   at < (SELECT max(at) FROM feed_marks WHERE at < clock_timestamp() - @keep::interval)`

const deleteFeedSQL = `
WITH    old AS MATERIALIZED (
        SELECT xid, feed_id
        FROM   route_feed
        WHERE  xid < (SELECT floor FROM feed_meta)
        ORDER  BY xid, feed_id
        LIMIT  @most::bigint)
DELETE  FROM route_feed AS f
USING   old
WHERE   f.xid = old.xid AND f.feed_id = old.feed_id`

const feedDeleteBatch = 5000

const loopFeed = "feed"

// trimFeed makes a mark, raises the floor and deletes what is below it. The floor is committed before
// the first row goes: a reader that is too far behind must see that before it misses anything.
func (b *Bindings) trimFeed(ctx context.Context) error {
	mine := false
	err := b.db.Tx(ctx, func(tx pgx.Tx) (err error) {
		if mine, err = pgdb.TryLock(ctx, tx, advisory.Loop(loopFeed)); err != nil || !mine {
			return err
		}
		keep := pgx.StrictNamedArgs{"keep": b.cfg.FeedRetention}
		if _, err := tx.Exec(ctx, insertMarkSQL); err != nil {
			return fmt.Errorf("mark the feed: %w", err)
		}
		if _, err := tx.Exec(ctx, raiseFloorSQL, keep); err != nil {
			return fmt.Errorf("raise the feed's floor: %w", err)
		}
		if _, err := tx.Exec(ctx, deleteOldMarksSQL, keep); err != nil {
			return fmt.Errorf("delete old marks: %w", err)
		}
		return nil
	})
	for err == nil && mine {
		var deleted int64
		err = b.db.Tx(ctx, func(tx pgx.Tx) (err error) {
			if mine, err = pgdb.TryLock(ctx, tx, advisory.Loop(loopFeed)); err != nil || !mine {
				return err
			}
			tag, err := tx.Exec(ctx, deleteFeedSQL, pgx.StrictNamedArgs{"most": feedDeleteBatch})
			deleted = tag.RowsAffected()
			if err != nil {
				return fmt.Errorf("delete old feed rows: %w", err)
			}
			return nil
		})
		if deleted < feedDeleteBatch {
			break
		}
	}
	return err
}
