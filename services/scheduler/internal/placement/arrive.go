package placement

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// Arrival is a sandbox that its node tells of before a record or a roster has named it.
type Arrival struct {
	Sandbox sandbox.ID
	Size    sandbox.Size // zero, or zero in part: not told

	// Created says that it comes of a create, and nobody knew the id: a hold that nobody can name may be
	// this sandbox's. A fork's child, or one that is resumed, was placed by nobody.
	Created bool
}

// size returns the size that was told, and what was not told of asked.
func (a Arrival) size(asked sandbox.Size) sandbox.Size {
	if a.Size.CPUMillis != 0 {
		asked.CPUMillis = a.Size.CPUMillis
	}
	if a.Size.MemoryBytes != 0 {
		asked.MemoryBytes = a.Size.MemoryBytes
	}
	return asked
}

// lockDrawnSQL locks the open holds of placements that drew one of the ids, in key order.
const lockDrawnSQL = `
SELECT  r.reservation_id::text AS reservation_id, r.n, r.node_id, r.named, r.sandbox_id,
        r.placement_id, r.tenant_id, r.spread_key, r.cpu_millis, r.memory_bytes,
        ARRAY(SELECT drawn FROM unnest(p.sandbox_ids) AS drawn WHERE drawn = ANY (@ids::text[])) AS drawn
FROM    reservations AS r
JOIN    placements AS p ON p.placement_id = r.placement_id AND p.reservation_id = r.reservation_id
WHERE   r.node_id = @node AND r.sandbox_id IS NULL AND p.sandbox_ids && @ids::text[]
ORDER   BY r.reservation_id, r.n
FOR     UPDATE OF r`

// selectOtherNamedSQL: a create whose caller can name its hold, and whose id the node draws.
const selectOtherNamedSQL = `
SELECT  EXISTS (
        SELECT 1
        FROM   reservations AS r
        LEFT   JOIN placements AS p ON p.placement_id = r.placement_id AND p.reservation_id = r.reservation_id
        WHERE  r.node_id = @node AND r.sandbox_id IS NULL AND r.named AND COALESCE(p.sandbox_ids, '{}') = '{}')`

// takeHoldsSQL confirms holds for sandboxes whose size is known better by now.
const takeHoldsSQL = `
UPDATE  reservations AS r
SET     sandbox_id = taken.id, expires_at = NULL, cpu_millis = taken.cpu_millis, memory_bytes = taken.memory_bytes
FROM    unnest(@reservations::text[], @ns::smallint[], @ids::text[], @cpus::bigint[], @memories::bigint[])
        AS taken (reservation, n, id, cpu_millis, memory_bytes)
WHERE   r.reservation_id = taken.reservation::uuid AND r.n = taken.n AND r.sandbox_id IS NULL`

// Arrive gives each sandbox one confirmed hold of its size on n, and tells whose it is. The hold is, in this
// order, that of the placement which drew its id; for what was created the smallest open one of n that nobody
// can name, as an AgentENV gateway's record would take it; or one that was not asked for, because the sandbox
// exists. Where creates are open that can name their holds, the sandbox may be one of theirs: then no hold
// is taken that nobody can name, and the node is the fuller one until the record comes, or the hold expires.
//
// It joins the caller's transaction, which holds advisory.Sandbox of all ids, knows that none is bound, and
// has changed no binding yet.
func Arrive(ctx context.Context, tx pgx.Tx, n node.ID, arrivals []Arrival) (map[sandbox.ID]Owner, error) {
	if len(arrivals) == 0 {
		return nil, nil
	}
	drawn, err := lockDrawn(ctx, tx, n, arrivals)
	if err != nil {
		return nil, err
	}
	unnamed, err := lockForCreated(ctx, tx, n, arrivals, drawn)
	if err != nil {
		return nil, err
	}
	var (
		owners = make(map[sandbox.ID]Owner, len(arrivals))
		all    confirming
		sizes  []sandbox.Size
	)
	for _, a := range arrivals {
		found, ours := drawn[a.Sandbox]
		if !ours && a.Created {
			if next := unnamed.next(1); len(next) > 0 {
				found, ours = next[0], true
			}
		}
		owner := Owner{Size: a.Size}
		if ours {
			owner = found.owner()
			owner.Size = a.size(owner.Size)
			all.take, sizes = append(all.take, taken{found.key(), a.Sandbox}), append(sizes, owner.Size)
			if owner.PlacementID != 0 {
				all.settled = append(all.settled, settlement{
					placement: owner.PlacementID, reservation: found.ReservationID, sandboxes: []sandbox.ID{a.Sandbox},
				})
			}
		} else {
			all.insert = append(all.insert, inserted{node: n, sandbox: a.Sandbox, owner: owner})
		}
		owners[a.Sandbox] = owner
	}
	if err := takeHolds(ctx, tx, all.take, sizes); err != nil {
		return nil, err
	}
	if err := insertConfirmed(ctx, tx, all.insert); err != nil {
		return nil, err
	}
	return owners, settle(ctx, tx, all.settled)
}

// lockDrawn returns an open hold for each id that its placement drew.
func lockDrawn(ctx context.Context, tx pgx.Tx, n node.ID, arrivals []Arrival) (map[sandbox.ID]hold, error) {
	ids := make([]sandbox.ID, len(arrivals))
	for i, a := range arrivals {
		ids[i] = a.Sandbox
	}
	rows, err := tx.Query(ctx, lockDrawnSQL, pgx.StrictNamedArgs{"node": n, "ids": ids})
	if err != nil {
		return nil, fmt.Errorf("lock holds whose ids were drawn on %s: %w", n, err)
	}
	type drawnHold struct {
		hold
		Drawn []sandbox.ID
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[drawnHold])
	if err != nil {
		return nil, fmt.Errorf("lock holds whose ids were drawn on %s: %w", n, err)
	}
	found := make(map[sandbox.ID]hold, len(list))
	for _, h := range list {
		for _, id := range h.Drawn {
			if _, has := found[id]; !has { // a hold of several sandboxes gives one row to each
				found[id] = h.hold
				break
			}
		}
	}
	return found, nil
}

// lockForCreated takes as many holds that nobody can name as may be of these creates.
func lockForCreated(ctx context.Context, tx pgx.Tx, n node.ID, arrivals []Arrival, drawn map[sandbox.ID]hold) (*pile, error) {
	var count int64
	for _, a := range arrivals {
		if _, ours := drawn[a.Sandbox]; !ours && a.Created {
			count++
		}
	}
	if count == 0 {
		return nil, nil //nolint:nilnil // an empty pile
	}
	var others bool
	if err := tx.QueryRow(ctx, selectOtherNamedSQL, pgx.StrictNamedArgs{"node": n}).Scan(&others); err != nil {
		return nil, fmt.Errorf("read the open holds of %s: %w", n, err)
	}
	if others {
		return nil, nil //nolint:nilnil // an empty pile
	}
	rows, err := tx.Query(ctx, lockUnnamedSQL, pgx.StrictNamedArgs{"nodes": []node.ID{n}, "counts": []int64{count}})
	if err != nil {
		return nil, fmt.Errorf("lock unnamed holds on %s: %w", n, err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[hold])
	if err != nil {
		return nil, fmt.Errorf("lock unnamed holds on %s: %w", n, err)
	}
	return &pile{left: list}, nil
}

func takeHolds(ctx context.Context, tx pgx.Tx, take []taken, sizes []sandbox.Size) error {
	if len(take) == 0 {
		return nil
	}
	reservations, ns, ids := make([]string, len(take)), make([]int16, len(take)), make([]sandbox.ID, len(take))
	cpus, memories := make([]int64, len(take)), make([]int64, len(take))
	for i, t := range take {
		reservations[i], ns[i], ids[i] = t.key.reservation, t.key.n, t.sandbox
		cpus[i], memories[i] = sizes[i].CPUMillis, sizes[i].MemoryBytes
	}
	_, err := tx.Exec(ctx, takeHoldsSQL, pgx.StrictNamedArgs{
		"reservations": reservations, "ns": ns, "ids": ids, "cpus": cpus, "memories": memories,
	})
	if err != nil {
		return fmt.Errorf("take %d holds: %w", len(take), err)
	}
	return nil
}
