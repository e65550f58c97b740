package placement

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// OverdueClaim is the claim of a create key on a node that draws its own ids, past its expiry: whether
// the node made a sandbox for it, only its rosters can tell.
type OverdueClaim struct {
	Owner
	Reservation string
	Count       int
	Since       time.Time // when the room was held, by the database's clock
	Alone       bool      // nothing else is open on the node
}

const selectOverdueClaimNodesSQL = `
SELECT  DISTINCT r.node_id
FROM    reservations AS r
JOIN    placements AS p ON p.placement_id = r.placement_id AND p.reservation_id = r.reservation_id
WHERE   r.sandbox_id IS NULL AND r.expires_at < now() - @grace::interval
AND     p.create_key IS NOT NULL AND p.sandbox_ids = '{}' AND p.outcome = 'reserved'
ORDER   BY r.node_id
LIMIT   100`

// OverdueClaimNodes returns up to 100 nodes, by id, with a claim that expired longer ago than grace.
func OverdueClaimNodes(ctx context.Context, db *pgdb.DB, grace time.Duration) ([]node.ID, error) {
	rows, err := db.Query(ctx, selectOverdueClaimNodesSQL, pgx.StrictNamedArgs{"grace": grace})
	if err != nil {
		return nil, fmt.Errorf("read overdue claims: %w", err)
	}
	nodes, err := pgx.CollectRows(rows, pgx.RowTo[node.ID])
	if err != nil {
		return nil, fmt.Errorf("read overdue claims: %w", err)
	}
	return nodes, nil
}

const selectOverdueClaimsSQL = `
SELECT  p.placement_id, p.tenant_id, max(r.spread_key) AS spread_key, p.cpu_millis, p.memory_bytes, p.reservation_id::text, p.count,
        min(r.created_at) AS since,
        NOT EXISTS (
        SELECT 1 FROM reservations AS other
        WHERE  other.node_id = @node AND other.sandbox_id IS NULL AND other.reservation_id <> p.reservation_id) AS alone
FROM    reservations AS r
JOIN    placements AS p ON p.placement_id = r.placement_id AND p.reservation_id = r.reservation_id
WHERE   r.node_id = @node AND r.sandbox_id IS NULL AND r.expires_at < clock_timestamp() - @grace::interval
AND     p.create_key IS NOT NULL AND p.sandbox_ids = '{}' AND p.outcome = 'reserved'
GROUP   BY p.placement_id
ORDER   BY p.placement_id`

// OverdueClaims returns the claims on n that expired longer ago than grace. The caller's transaction
// holds advisory.Node of n, so what is open there stays what it is.
func OverdueClaims(ctx context.Context, tx pgx.Tx, n node.ID, grace time.Duration) ([]OverdueClaim, error) {
	rows, err := tx.Query(ctx, selectOverdueClaimsSQL, pgx.StrictNamedArgs{"node": n, "grace": grace})
	if err != nil {
		return nil, fmt.Errorf("read overdue claims on %s: %w", n, err)
	}
	claims, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (c OverdueClaim, err error) {
		err = row.Scan(&c.PlacementID, &c.Tenant, &c.SpreadKey, &c.Size.CPUMillis, &c.Size.MemoryBytes, &c.Reservation, &c.Count, &c.Since, &c.Alone)
		return c, err
	})
	if err != nil {
		return nil, fmt.Errorf("read overdue claims on %s: %w", n, err)
	}
	return claims, nil
}

// endClaimSQL ends the holds of a claim, for the node's report counts what it made, and settles the key.
// Rows that a record has confirmed meanwhile are not open, and what is not open is not settled here.
const endClaimSQL = `
WITH    open AS MATERIALIZED (
        SELECT reservation_id, n
        FROM   reservations
        WHERE  reservation_id = @reservation::uuid AND sandbox_id IS NULL
        ORDER  BY n
        FOR    UPDATE),
        gone AS (
        DELETE FROM reservations AS r
        USING  open
        WHERE  r.reservation_id = open.reservation_id AND r.n = open.n AND r.sandbox_id IS NULL
        RETURNING r.n)
UPDATE  placements AS p
SET     outcome = CASE WHEN cardinality(@ids::text[]) > 0 THEN 'confirmed' ELSE 'expired' END,
        sandbox_ids = @ids::text[], changed_at = clock_timestamp()
WHERE   p.placement_id = @placement AND p.reservation_id = @reservation::uuid AND p.outcome = 'reserved'
AND     EXISTS (SELECT 1 FROM gone)`

// EndClaim ends an overdue claim: as the create of ids, whose bindings the caller has locked, or with no
// ids as one that came to nothing, which frees the key. It reports false, and has changed nothing, where
// the claim was recorded or released meanwhile. It joins the caller's transaction.
func EndClaim(ctx context.Context, tx pgx.Tx, c OverdueClaim, ids []sandbox.ID) (bool, error) {
	if ids == nil {
		ids = []sandbox.ID{}
	}
	tag, err := tx.Exec(ctx, endClaimSQL, pgx.StrictNamedArgs{"reservation": c.Reservation, "placement": c.PlacementID, "ids": ids})
	if err != nil {
		return false, fmt.Errorf("end the claim of placement %d: %w", c.PlacementID, err)
	}
	return tag.RowsAffected() > 0, nil
}
