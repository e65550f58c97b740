package placement

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// deleteListedHoldsSQL locks in key order, as whoever locks several holds does.
const deleteListedHoldsSQL = `
WITH    listed AS MATERIALIZED (
        SELECT reservation_id, n
        FROM   reservations
        WHERE  node_id = @node AND sandbox_id = ANY (@ids::text[])
        ORDER  BY reservation_id, n
        FOR    UPDATE)
DELETE  FROM reservations AS r
USING   listed
WHERE   r.reservation_id = listed.reservation_id AND r.n = listed.n`

// Listed deletes the holds on n of the sandboxes that a roster of n lists: its report counts them now.
// It joins the transaction that stores the same heartbeat's snapshot.
func Listed(ctx context.Context, tx pgx.Tx, n node.ID, ids []sandbox.ID) error {
	if len(ids) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, deleteListedHoldsSQL, pgx.StrictNamedArgs{"node": n, "ids": ids}); err != nil {
		return fmt.Errorf("delete holds that %s reports: %w", n, err)
	}
	return nil
}

// adoptHoldsSQL ends one open hold for each sandbox: of the reservation its entry names, or of the one
// whose placement drew its id. A reservation of several sandboxes gives one row to each.
const adoptHoldsSQL = `
WITH    listed AS MATERIALIZED (
        SELECT id, reservation::uuid AS reservation
        FROM   unnest(@ids::text[], @reservations::text[]) AS entry (id, reservation)),
        wanted AS MATERIALIZED (
        SELECT DISTINCT ON (listed.id) listed.id, p.reservation_id, p.placement_id
        FROM   listed
        JOIN   (SELECT DISTINCT reservation_id, placement_id FROM reservations WHERE node_id = @node AND sandbox_id IS NULL) AS open ON true
        JOIN   placements AS p ON p.placement_id = open.placement_id AND p.reservation_id = open.reservation_id
        WHERE  p.reservation_id = listed.reservation OR listed.id = ANY (p.sandbox_ids)
        ORDER  BY listed.id, p.reservation_id = listed.reservation DESC NULLS LAST),
        numbered AS (
        SELECT wanted.*, row_number() OVER (PARTITION BY reservation_id ORDER BY id) AS place FROM wanted),
        locked AS MATERIALIZED (
        SELECT r.reservation_id, r.n
        FROM   reservations AS r
        WHERE  r.node_id = @node AND r.sandbox_id IS NULL AND r.reservation_id IN (SELECT reservation_id FROM wanted)
        ORDER  BY r.reservation_id, r.n
        FOR    UPDATE),
        opened AS (
        SELECT locked.*, row_number() OVER (PARTITION BY reservation_id ORDER BY n) AS place FROM locked)
DELETE  FROM reservations AS r
USING   opened, numbered
WHERE   opened.reservation_id = numbered.reservation_id AND opened.place = numbered.place
AND     r.reservation_id = opened.reservation_id AND r.n = opened.n AND r.sandbox_id IS NULL
RETURNING numbered.id, r.reservation_id::text AS reservation, r.placement_id, r.tenant_id, r.spread_key, r.cpu_millis, r.memory_bytes`

// Adopt tells whose the sandboxes are that a roster of n lists and nobody recorded. Where an open
// reservation on n is named by the entry, or its placement drew the id, the hold ends, for the node's
// report counts the sandbox now, and the placement is confirmed. What is not in the answer has no
// known placement. It joins the caller's transaction, which holds advisory.Node of n.
func Adopt(ctx context.Context, tx pgx.Tx, n node.ID, entries []node.Entry) (map[sandbox.ID]Owner, error) {
	if len(entries) == 0 {
		return nil, nil
	}
	ids := make([]sandbox.ID, len(entries))
	reservations := make([]*string, len(entries))
	for i, entry := range entries {
		ids[i] = entry.Sandbox
		if id, err := uuid.Parse(entry.Reservation); err == nil { // a node may spell it in its own way
			reservations[i] = new(id.String())
		}
	}
	rows, err := tx.Query(ctx, adoptHoldsSQL, pgx.StrictNamedArgs{"node": n, "ids": ids, "reservations": reservations})
	if err != nil {
		return nil, fmt.Errorf("adopt %d sandboxes of %s: %w", len(ids), n, err)
	}
	type adopted struct {
		ID          sandbox.ID
		Reservation string
		PlacementID *int64
		TenantID    string
		SpreadKey   string
		CPUMillis   int64
		MemoryBytes int64
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[adopted])
	if err != nil {
		return nil, fmt.Errorf("adopt %d sandboxes of %s: %w", len(ids), n, err)
	}
	owners := make(map[sandbox.ID]Owner, len(found))
	var settled []settlement
	for _, a := range found {
		owner := openHold{
			PlacementID: a.PlacementID, TenantID: a.TenantID, SpreadKey: a.SpreadKey,
			CPUMillis: a.CPUMillis, MemoryBytes: a.MemoryBytes,
		}.owner()
		owners[a.ID] = owner
		if owner.PlacementID != 0 {
			settled = append(settled, settlement{owner.PlacementID, a.Reservation, []sandbox.ID{a.ID}, nil})
		}
	}
	if err := settle(ctx, tx, settled); err != nil {
		return nil, err
	}
	return owners, nil
}

const deleteSandboxHoldsSQL = `
WITH    ended AS MATERIALIZED (
        SELECT reservation_id, n
        FROM   reservations
        WHERE  sandbox_id = ANY (@ids::text[])
        ORDER  BY reservation_id, n
        FOR    UPDATE)
DELETE  FROM reservations AS r
USING   ended
WHERE   r.reservation_id = ended.reservation_id AND r.n = ended.n`

// DropHolds deletes the confirmed holds of sandboxes whose bindings ended, moved or were parked. It
// joins the caller's transaction.
func DropHolds(ctx context.Context, tx pgx.Tx, ids []sandbox.ID) error {
	if len(ids) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, deleteSandboxHoldsSQL, pgx.StrictNamedArgs{"ids": ids}); err != nil {
		return fmt.Errorf("delete holds of %d sandboxes: %w", len(ids), err)
	}
	return nil
}

// releaseNodeSQL ends all holds of a node; the placements of the open ones are released.
const releaseNodeSQL = `
WITH    held AS MATERIALIZED (
        SELECT reservation_id, n
        FROM   reservations
        WHERE  node_id = @node
        ORDER  BY reservation_id, n
        FOR    UPDATE),
        gone AS (
        DELETE FROM reservations AS r
        USING  held
        WHERE  r.reservation_id = held.reservation_id AND r.n = held.n
        RETURNING r.reservation_id, r.placement_id)
UPDATE  placements AS p
SET     outcome = 'released', changed_at = clock_timestamp()
FROM    (SELECT DISTINCT reservation_id, placement_id FROM gone) AS ended
WHERE   p.placement_id = ended.placement_id AND p.reservation_id = ended.reservation_id AND p.outcome = 'reserved'`

// ReleaseNode deletes every hold of n, which has unregistered, and releases the placements that waited
// there. It joins the caller's transaction, which holds advisory.Node of n.
func ReleaseNode(ctx context.Context, tx pgx.Tx, n node.ID) error {
	if _, err := tx.Exec(ctx, releaseNodeSQL, pgx.StrictNamedArgs{"node": n}); err != nil {
		return fmt.Errorf("release the holds of %s: %w", n, err)
	}
	return nil
}

const selectOverdueNodesSQL = `
SELECT  DISTINCT node_id
FROM    reservations
WHERE   sandbox_id IS NOT NULL AND created_at < clock_timestamp() - @grace::interval
ORDER   BY node_id`

// OverdueNodes returns the nodes, by id, with a confirmed hold that is older than grace: their next
// roster must be compared in full, or a sandbox that never came up would keep its binding.
func OverdueNodes(ctx context.Context, tx pgx.Tx, grace time.Duration) ([]node.ID, error) {
	rows, err := tx.Query(ctx, selectOverdueNodesSQL, pgx.StrictNamedArgs{"grace": grace})
	if err != nil {
		return nil, fmt.Errorf("read overdue holds: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[node.ID])
	if err != nil {
		return nil, fmt.Errorf("read overdue holds: %w", err)
	}
	return ids, nil
}
