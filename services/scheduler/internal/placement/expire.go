package placement

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
)

const (
	expireEvery = time.Second
	expireName  = "expire reservations"

	// expireAtOnce bounds the rows of one transaction.
	expireAtOnce = 500
)

// expireHoldsSQL takes now(), which an index condition may: it is the first statement that waits for
// nothing but the try of the pass's lock. Rows that a record has locked are left to it. The claim of a
// create key waits for a takeover a while longer; where the node draws the ids, bindings settles it.
const expireHoldsSQL = `
WITH    due AS MATERIALIZED (
        SELECT r.reservation_id, r.n
        FROM   reservations AS r
        LEFT   JOIN placements AS p ON p.placement_id = r.placement_id AND p.reservation_id = r.reservation_id AND p.create_key IS NOT NULL
        WHERE  r.sandbox_id IS NULL AND r.expires_at < now()
        AND    (p.placement_id IS NULL OR p.sandbox_ids <> '{}' AND r.expires_at < now() - @key_grace::interval)
        ORDER  BY r.reservation_id, r.n
        LIMIT  @most
        FOR    UPDATE OF r SKIP LOCKED),
        gone AS (
        DELETE FROM reservations AS r
        USING  due
        WHERE  r.reservation_id = due.reservation_id AND r.n = due.n AND r.sandbox_id IS NULL
        RETURNING r.reservation_id, r.placement_id),
        settled AS (
        UPDATE placements AS p
        SET    outcome = 'expired', changed_at = clock_timestamp()
        FROM   (SELECT DISTINCT reservation_id, placement_id FROM gone) AS ended
        WHERE  p.placement_id = ended.placement_id AND p.reservation_id = ended.reservation_id AND p.outcome = 'reserved'
        RETURNING p.placement_id)
SELECT  count(*)
FROM    gone`

// ExpireLoop ends open holds past their time, each second until ctx ends. Expiry is an act, not a
// moment: until a pass has deleted it a hold counts and can be confirmed, so no two clocks can disagree.
// Any number of replicas may run it.
func (p *Placer) ExpireLoop(ctx context.Context) error {
	return p.db.Loop(ctx, expireName, expireEvery, p.expire, p.log)
}

func (p *Placer) expire(ctx context.Context) error {
	defer p.metrics.passed(expireName, time.Now())
	for {
		var ended int
		err := p.db.Tx(ctx, func(tx pgx.Tx) error {
			ended = 0
			mine, err := pgdb.TryLock(ctx, tx, advisory.Loop(expireName))
			if err != nil || !mine {
				return err
			}
			return tx.QueryRow(ctx, expireHoldsSQL, pgx.StrictNamedArgs{"most": expireAtOnce, "key_grace": p.cfg.KeyGrace}).Scan(&ended)
		})
		if err != nil {
			return fmt.Errorf("expire holds: %w", err)
		}
		p.metrics.holdsEnded("expired", ended)
		if ended < expireAtOnce {
			return p.measure(ctx)
		}
	}
}

const countHoldsSQL = `
SELECT  count(*) FILTER (WHERE sandbox_id IS NULL) AS open, count(*) FILTER (WHERE sandbox_id IS NOT NULL) AS confirmed
FROM    reservations`

// measure shows how many holds there are.
func (p *Placer) measure(ctx context.Context) error {
	if p.metrics.measured() {
		return nil
	}
	var open, confirmed int64
	if err := p.db.QueryRow(ctx, countHoldsSQL).Scan(&open, &confirmed); err != nil {
		return fmt.Errorf("count holds: %w", err)
	}
	p.metrics.holding(open, confirmed)
	return nil
}

const sumHoldsSQL = `
SELECT  node_id, count(*) AS sandboxes, count(*) FILTER (WHERE sandbox_id IS NULL) AS open,
        LEAST(sum(cpu_millis), 9223372036854775807)::bigint AS cpu_millis, LEAST(sum(memory_bytes), 9223372036854775807)::bigint AS memory_bytes
FROM    reservations
WHERE   @node::text = '' OR node_id = @node
GROUP   BY node_id`

// Held returns what is held on each node that has holds; n "" is all nodes.
func (p *Placer) Held(ctx context.Context, n node.ID) (map[node.ID]Held, error) {
	rows, err := p.db.Query(ctx, sumHoldsSQL, pgx.StrictNamedArgs{"node": n})
	if err != nil {
		return nil, fmt.Errorf("sum holds: %w", err)
	}
	held := map[node.ID]Held{}
	var (
		id node.ID
		h  Held
	)
	if _, err := pgx.ForEachRow(rows, []any{&id, &h.Sandboxes, &h.Open, &h.CPUMillis, &h.MemoryBytes}, func() error {
		held[id] = h
		return nil
	}); err != nil {
		return nil, fmt.Errorf("sum holds: %w", err)
	}
	return held, nil
}
