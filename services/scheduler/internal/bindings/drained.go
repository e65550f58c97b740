package bindings

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// Left is what is on a node that is emptied.
type Left struct {
	Bound int // sandboxes
	Holds int // creates that were promised room and may still become sandboxes
}

// All returns how many there are of both.
func (l Left) All() int { return l.Bound + l.Holds }

// countLeftSQL counts both in one snapshot: a hold becomes a binding in one commit, so a sandbox is never in
// neither count.
const countLeftSQL = `
SELECT  asked.node_id, (SELECT count(*) FROM bindings AS b WHERE b.node_id = asked.node_id AND b.state = 'bound') AS bound,
        (SELECT count(*) FROM reservations AS r WHERE r.node_id = asked.node_id AND r.sandbox_id IS NULL) AS holds
FROM    unnest(@nodes::text[]) AS asked (node_id)`

// CountLeft returns what is left on each of nodes. q may be a transaction.
func CountLeft(ctx context.Context, q querier, nodes ...node.ID) (map[node.ID]Left, error) {
	rows, err := q.Query(ctx, countLeftSQL, pgx.StrictNamedArgs{"nodes": nodes})
	if err != nil {
		return nil, fmt.Errorf("count what is left on %d nodes: %w", len(nodes), err)
	}
	left := make(map[node.ID]Left, len(nodes))
	var (
		id node.ID
		l  Left
	)
	if _, err := pgx.ForEachRow(rows, []any{&id, &l.Bound, &l.Holds}, func() error {
		left[id] = l
		return nil
	}); err != nil {
		return nil, fmt.Errorf("count what is left on %d nodes: %w", len(nodes), err)
	}
	return left, nil
}

// Blocker is one sandbox, or one create that may become one, on a node that is emptied.
type Blocker struct {
	SandboxID sandbox.ID // "": a create whose id is not known yet
	Hold      bool       // a create with open room; else a bound sandbox
	Since     time.Time  // when it was bound, or the room was promised
	TenantID  string
}

// selectBlockersSQL counts all and returns the oldest, holds first: they are what closing waits for.
const selectBlockersSQL = `
SELECT  sandbox_id, hold, since, tenant_id, count(*) OVER () AS "all", count(*) FILTER (WHERE hold) OVER () AS holds
FROM    (SELECT COALESCE(p.sandbox_ids[r.n], '') AS sandbox_id, true AS hold, r.created_at AS since, r.tenant_id
        FROM   reservations AS r
        LEFT   JOIN placements AS p ON p.placement_id = r.placement_id AND p.reservation_id = r.reservation_id
        WHERE  r.node_id = @node AND r.sandbox_id IS NULL
        UNION  ALL
        SELECT sandbox_id, false, bound_at, tenant_id
        FROM   bindings
        WHERE  node_id = @node AND state = 'bound') AS blocker
WHERE   @until::timestamptz IS NULL OR since <= @until
ORDER   BY hold DESC, since, sandbox_id
LIMIT   @most::bigint`

// Blockers returns what is left on n, and up to most of it, the oldest first and open holds before all
// sandboxes. What came after until does not count; nil: all does. q may be a transaction.
func Blockers(ctx context.Context, q querier, n node.ID, until *time.Time, most int) ([]Blocker, Left, error) {
	rows, err := q.Query(ctx, selectBlockersSQL, pgx.StrictNamedArgs{"node": n, "until": until, "most": most})
	if err != nil {
		return nil, Left{}, fmt.Errorf("read what is left on %s: %w", n, err)
	}
	type counted struct {
		Blocker
		All   int
		Holds int
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[counted])
	if err != nil {
		return nil, Left{}, fmt.Errorf("read what is left on %s: %w", n, err)
	}
	var left Left
	blockers := make([]Blocker, len(list))
	for i, row := range list {
		blockers[i] = row.Blocker
		left = Left{Bound: row.All - row.Holds, Holds: row.Holds}
	}
	return blockers, left, nil
}

// ParkDrained parks what is bound to n when its drain runs out of time, ends every hold of n, and tells
// whether it wrote the feed. While n is cordoned its own roster does not bring these back; after that it
// does, and any other node's does at once. It joins the caller's transaction, which holds advisory.Node of n.
func ParkDrained(ctx context.Context, tx pgx.Tx, n node.ID) (fed bool, err error) {
	parked, err := parkBound(ctx, tx, n, sandbox.EndedByDrain, math.MaxInt)
	return parked > 0, err
}

const keepDrainedSQL = `
WITH    parked AS MATERIALIZED (
        SELECT sandbox_id
        FROM   bindings
        WHERE  state <> 'bound' AND state = 'parked' AND node_id = @node AND ended_by = 'drain'
        ORDER  BY sandbox_id
        FOR    UPDATE)
UPDATE  bindings AS b
SET     ended_at = clock_timestamp()
FROM    parked
WHERE   b.sandbox_id = parked.sandbox_id`

// KeepDrained lets what a drain parked on n count as parked just now: n is uncordoned, and its next roster
// brings back what is still there. It joins the caller's transaction, which holds advisory.Node of n.
func KeepDrained(ctx context.Context, tx pgx.Tx, n node.ID) error {
	if _, err := tx.Exec(ctx, keepDrainedSQL, pgx.StrictNamedArgs{"node": n}); err != nil {
		return fmt.Errorf("keep what a drain parked on %s: %w", n, err)
	}
	return nil
}
