package bindings

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// OrphanReason says why a sandbox may not be bound where a roster lists it.
type OrphanReason string

// The reasons, as the rows spell them.
const (
	OrphanDeleted    OrphanReason = "deleted"        // it was deleted or suspended: the node must end it
	OrphanSuperseded OrphanReason = "superseded"     // another incarnation of it lives: the node must end it
	OrphanHeld       OrphanReason = "held_elsewhere" // another node that is alive has it
)

// orphanTTL is how long an orphan is shown that no roster lists any more.
const orphanTTL = 10 * time.Minute

// orphanTouch is how old last_seen_at may become before a row is written for it alone.
const orphanTouch = time.Minute

// seen is a sandbox as an orphan of a node.
type seen struct {
	Sandbox sandbox.ID
	Reason  OrphanReason
	Holder  node.ID // "": none
}

const selectOrphansSQL = `
SELECT  sandbox_id, reason, COALESCE(holder_node_id, '') AS holder, last_seen_at < clock_timestamp() - @touch::interval AS old
FROM    orphans
WHERE   node_id = @node`

const upsertOrphansSQL = `
INSERT  INTO orphans AS o (node_id, sandbox_id, reason, holder_node_id)
SELECT  @node, id, reason, nullif(holder, '')
FROM    unnest(@ids::text[], @reasons::text[], @holders::text[]) AS now (id, reason, holder)
ORDER   BY id COLLATE "C"
ON CONFLICT (node_id, sandbox_id) DO UPDATE
SET     reason = EXCLUDED.reason, holder_node_id = EXCLUDED.holder_node_id, last_seen_at = clock_timestamp(),
        first_seen_at = CASE WHEN o.reason = EXCLUDED.reason THEN o.first_seen_at ELSE clock_timestamp() END`

const deleteOrphansSQL = `
DELETE  FROM orphans
WHERE   node_id = @node AND sandbox_id = ANY (@ids::text[])`

// showOrphans makes the rows of n's orphans what was seen now, and forgets those of the sandboxes that are
// no orphans any more. It reads before it writes, for an orphan is listed again with each comparison: one
// whose row says the same is touched once a minute at most. It returns the events of those that are new, or
// are orphans for another reason; the caller writes them. It joins the caller's transaction, which has
// locked the lease of n, so nobody else writes these rows.
func showOrphans(ctx context.Context, tx pgx.Tx, n node.ID, cluster string, now []seen, over func(sandbox.ID) bool) ([]Event, error) {
	rows, err := tx.Query(ctx, selectOrphansSQL, pgx.StrictNamedArgs{"node": n, "touch": orphanTouch})
	if err != nil {
		return nil, fmt.Errorf("read the orphans of %s: %w", n, err)
	}
	type shown struct {
		SandboxID sandbox.ID
		Reason    OrphanReason
		Holder    node.ID
		Old       bool
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[shown])
	if err != nil {
		return nil, fmt.Errorf("read the orphans of %s: %w", n, err)
	}
	known := make(map[sandbox.ID]shown, len(list))
	var forget []sandbox.ID
	for _, row := range list {
		known[row.SandboxID] = row
		if over(row.SandboxID) {
			forget = append(forget, row.SandboxID)
		}
	}
	var (
		events           []Event
		ids              []sandbox.ID
		reasons, holders []string
	)
	for _, s := range now {
		row, found := known[s.Sandbox]
		if found && row.Reason == s.Reason && row.Holder == s.Holder && !row.Old {
			continue
		}
		ids, reasons, holders = append(ids, s.Sandbox), append(reasons, string(s.Reason)), append(holders, string(s.Holder))
		if !found || row.Reason != s.Reason {
			events = append(events, s.event(n, cluster))
		}
	}
	if len(ids) > 0 {
		_, err := tx.Exec(ctx, upsertOrphansSQL, pgx.StrictNamedArgs{"node": n, "ids": ids, "reasons": reasons, "holders": holders})
		if err != nil {
			return nil, fmt.Errorf("write %d orphans of %s: %w", len(ids), n, err)
		}
	}
	if len(forget) > 0 {
		if _, err := tx.Exec(ctx, deleteOrphansSQL, pgx.StrictNamedArgs{"node": n, "ids": forget}); err != nil {
			return nil, fmt.Errorf("forget %d orphans of %s: %w", len(forget), n, err)
		}
	}
	return events, nil
}

func (s seen) event(n node.ID, cluster string) Event {
	e := Event{Kind: KindOrphan, Effect: Effect(s.Reason), Node: n, Cluster: cluster, Sandbox: s.Sandbox}
	if s.Holder != "" {
		e.Detail = map[string]any{"holder_node_id": s.Holder}
	}
	return e
}

const deleteUnseenOrphansSQL = `
WITH    old AS MATERIALIZED (
        SELECT node_id, sandbox_id
        FROM   orphans
        WHERE  last_seen_at < clock_timestamp() - @ttl::interval
        ORDER  BY node_id, sandbox_id
        LIMIT  @most::bigint
        FOR    UPDATE SKIP LOCKED)
DELETE  FROM orphans AS o
USING   old
WHERE   o.node_id = old.node_id AND o.sandbox_id = old.sandbox_id`

// forgetOrphans deletes the rows of orphans that no roster has listed for a while.
func (b *Bindings) forgetOrphans(ctx context.Context) error {
	for deleted := int64(passBatch); deleted == passBatch; {
		err := b.db.Tx(ctx, func(tx pgx.Tx) error {
			deleted = 0
			if mine, err := pgdb.TryLock(ctx, tx, advisory.Loop(loopRetention)); err != nil || !mine {
				return err
			}
			tag, err := tx.Exec(ctx, deleteUnseenOrphansSQL, pgx.StrictNamedArgs{"ttl": orphanTTL, "most": passBatch})
			deleted = tag.RowsAffected()
			if err != nil {
				return fmt.Errorf("forget orphans: %w", err)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

const countOrphansSQL = `
SELECT  reason, count(*)
FROM    orphans
GROUP   BY reason`

// showOrphanCounts shows how many orphans there are by reason.
func (b *Bindings) showOrphanCounts(ctx context.Context) error {
	rows, err := b.db.Query(ctx, countOrphansSQL)
	if err != nil {
		return fmt.Errorf("count orphans: %w", err)
	}
	type counted struct {
		Reason OrphanReason
		Count  int64
	}
	counts, err := pgx.CollectRows(rows, pgx.RowToStructByPos[counted])
	if err != nil {
		return fmt.Errorf("count orphans: %w", err)
	}
	for _, reason := range []OrphanReason{OrphanDeleted, OrphanSuperseded, OrphanHeld} {
		b.metrics.orphans.WithLabelValues(string(reason)).Set(0)
	}
	for _, c := range counts {
		b.metrics.orphans.WithLabelValues(string(c.Reason)).Set(float64(c.Count))
	}
	return nil
}
