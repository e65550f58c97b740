package placement

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
)

const (
	retainEvery  = time.Minute
	retainName   = "forget placements"
	retainAtOnce = 500
)

// deletePlacementsSQL spares what holds room. now() may be an index condition.
const deletePlacementsSQL = `
WITH    old AS MATERIALIZED (
        SELECT placement_id
        FROM   placements
        WHERE  created_at < now() - @retention::interval AND changed_at < now() - @retention::interval AND outcome <> 'reserved'
        ORDER  BY placement_id
        LIMIT  @most
        FOR    UPDATE SKIP LOCKED)
DELETE  FROM placements AS p
USING   old
WHERE   p.placement_id = old.placement_id`

// RetentionLoop deletes placements that ended longer ago than the configured retention, each minute until
// ctx ends. With a placement goes its request id, which is free again. Any number of replicas may run it.
func (p *Placer) RetentionLoop(ctx context.Context) error {
	return p.db.Loop(ctx, retainName, retainEvery, p.retain, p.log)
}

func (p *Placer) retain(ctx context.Context) error {
	defer p.metrics.passed(retainName, time.Now())
	for {
		var deleted int64
		err := p.db.Tx(ctx, func(tx pgx.Tx) error {
			deleted = 0
			mine, err := pgdb.TryLock(ctx, tx, advisory.Loop(retainName))
			if err != nil || !mine {
				return err
			}
			tag, err := tx.Exec(ctx, deletePlacementsSQL, pgx.StrictNamedArgs{"retention": p.cfg.KeyRetention, "most": retainAtOnce})
			deleted = tag.RowsAffected()
			return err
		})
		if err != nil {
			return fmt.Errorf("forget placements: %w", err)
		}
		if deleted < retainAtOnce {
			return nil
		}
	}
}
