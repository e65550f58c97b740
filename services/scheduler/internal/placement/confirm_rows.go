package placement

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// hold is a row of reservations.
type hold struct {
	ReservationID string
	N             int16
	NodeID        node.ID
	Named         bool
	SandboxID     *sandbox.ID // nil: open
	openHold
}

// holdKey names a row of reservations.
type holdKey struct {
	reservation string
	n           int16
}

func (h *hold) key() holdKey { return holdKey{h.ReservationID, h.N} }

func keysOf(holds []hold) []holdKey {
	keys := make([]holdKey, len(holds))
	for i := range holds {
		keys[i] = holds[i].key()
	}
	return keys
}

// openHold is what an open hold knows about the sandbox that is to come.
type openHold struct {
	PlacementID *int64
	TenantID    string
	SpreadKey   string
	CPUMillis   int64
	MemoryBytes int64
}

func (h openHold) owner() Owner {
	owner := Owner{
		Tenant: h.TenantID, SpreadKey: h.SpreadKey,
		Size: sandbox.Size{CPUMillis: h.CPUMillis, MemoryBytes: h.MemoryBytes},
	}
	if h.PlacementID != nil {
		owner.PlacementID = *h.PlacementID
	}
	return owner
}

// lockHoldsSQL locks the confirmed holds of sandboxes and what is open of reservations, in key order. A
// row that was confirmed while it was waited for comes back as it is now.
const lockHoldsSQL = `
WITH    wanted AS MATERIALIZED (
        SELECT reservation_id, n
        FROM   reservations
        WHERE  sandbox_id = ANY (@ids::text[])
        UNION
        SELECT reservation_id, n
        FROM   reservations
        WHERE  reservation_id = ANY (@reservations::text[]::uuid[]) AND sandbox_id IS NULL)
SELECT  r.reservation_id::text AS reservation_id, r.n, r.node_id, r.named, r.sandbox_id,
        r.placement_id, r.tenant_id, r.spread_key, r.cpu_millis, r.memory_bytes
FROM    wanted
JOIN    reservations AS r ON r.reservation_id = wanted.reservation_id AND r.n = wanted.n
ORDER   BY r.reservation_id, r.n
FOR     UPDATE OF r`

// lockedHolds are rows by what they stand for.
type lockedHolds struct {
	of   map[sandbox.ID]hold
	open map[string][]hold // by reservation, in order of n
}

func lockHolds(ctx context.Context, tx pgx.Tx, all []Confirmation) (lockedHolds, error) {
	var ids []sandbox.ID
	var reservations []string
	for i := range all {
		ids = append(ids, all[i].Sandbox...)
		if isReservation(all[i].ReservationID) {
			reservations = append(reservations, all[i].ReservationID)
		}
	}
	rows, err := tx.Query(ctx, lockHoldsSQL, pgx.StrictNamedArgs{"ids": ids, "reservations": reservations})
	if err != nil {
		return lockedHolds{}, fmt.Errorf("lock the holds of %d sandboxes: %w", len(ids), err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[hold])
	if err != nil {
		return lockedHolds{}, fmt.Errorf("lock the holds of %d sandboxes: %w", len(ids), err)
	}
	out := lockedHolds{of: make(map[sandbox.ID]hold, len(list)), open: make(map[string][]hold, len(list))}
	for _, h := range list {
		if h.SandboxID != nil {
			out.of[*h.SandboxID] = h
		} else {
			out.open[h.ReservationID] = append(out.open[h.ReservationID], h)
		}
	}
	return out, nil
}

// about sorts out what concerns c.
func (l lockedHolds) about(c *Confirmation) facts {
	var f facts
	for _, id := range c.Sandbox {
		h, held := l.of[id]
		if held && h.NodeID != c.Node {
			f.moved = append(f.moved, h)
			held = false
		}
		if !held && !c.AlreadyBoundHere[id] {
			f.missing = append(f.missing, id)
		}
	}
	for _, h := range l.open[c.ReservationID] {
		if h.NodeID == c.Node && (c.Tenant == "" || h.TenantID == c.Tenant) {
			f.open = append(f.open, h)
		}
	}
	return f
}

// lockUnnamedSQL takes the smallest open holds of each node that nobody can name. SKIP LOCKED: two who
// record at once take different rows.
const lockUnnamedSQL = `
SELECT  smallest.reservation_id, smallest.n, smallest.node_id, smallest.named, smallest.sandbox_id, smallest.placement_id,
        smallest.tenant_id, smallest.spread_key, smallest.cpu_millis, smallest.memory_bytes
FROM    unnest(@nodes::text[], @counts::bigint[]) AS wanted (node_id, count)
CROSS   JOIN LATERAL (
        SELECT r.reservation_id::text AS reservation_id, r.n, r.node_id, r.named, r.sandbox_id,
               r.placement_id, r.tenant_id, r.spread_key, r.cpu_millis, r.memory_bytes
        FROM   reservations AS r
        WHERE  r.node_id = wanted.node_id AND NOT r.named AND r.sandbox_id IS NULL
        ORDER  BY r.memory_bytes, r.cpu_millis, r.reservation_id, r.n
        LIMIT  wanted.count
        FOR    UPDATE SKIP LOCKED) AS smallest
ORDER   BY smallest.node_id, smallest.memory_bytes, smallest.cpu_millis, smallest.reservation_id, smallest.n`

// pile is holds that go out one after another.
type pile struct{ left []hold }

// next takes up to count holds.
func (p *pile) next(count int) []hold {
	if p == nil {
		return nil
	}
	count = min(count, len(p.left))
	out := p.left[:count]
	p.left = p.left[count:]
	return out
}

func lockUnnamed(ctx context.Context, tx pgx.Tx, all []Confirmation, facts []facts) (map[node.ID]*pile, error) {
	counts := map[node.ID]int64{}
	for i := range all {
		if all[i].ReservationID == "" && len(facts[i].missing) > 0 {
			counts[all[i].Node] += int64(len(facts[i].missing))
		}
	}
	if len(counts) == 0 {
		return nil, nil
	}
	piles := make(map[node.ID]*pile, len(counts))
	nodes, most := make([]node.ID, 0, len(counts)), make([]int64, 0, len(counts))
	for n, count := range counts {
		nodes, most = append(nodes, n), append(most, count)
		piles[n] = &pile{}
	}
	rows, err := tx.Query(ctx, lockUnnamedSQL, pgx.StrictNamedArgs{"nodes": nodes, "counts": most})
	if err != nil {
		return nil, fmt.Errorf("lock unnamed holds on %d nodes: %w", len(nodes), err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[hold])
	if err != nil {
		return nil, fmt.Errorf("lock unnamed holds on %d nodes: %w", len(nodes), err)
	}
	for _, h := range list {
		piles[h.NodeID].left = append(piles[h.NodeID].left, h)
	}
	return piles, nil
}

// placedBefore is the placement of a reservation without open rows.
type placedBefore struct {
	Owner
	Confirmed bool
	Settled   bool // with these sandboxes and this answer: there is nothing to write
}

const selectPlacedSQL = `
SELECT  asked.i, p.placement_id, p.tenant_id, p.cpu_millis, p.memory_bytes, p.outcome = 'confirmed' AS confirmed,
        p.outcome = 'confirmed' AND p.sandbox_ids @> string_to_array(asked.ids, ',')
        AND (asked.sealed_answer IS NULL OR asked.sealed_answer IS NOT DISTINCT FROM p.sealed_answer) AS settled
FROM    unnest(@numbers::bigint[], @placements::bigint[], @reservations::text[], @nodes::text[], @tenants::text[], @ids::text[],
               @sealed_answers::bytea[]) AS asked (i, placement, reservation, node, tenant, ids, sealed_answer)
JOIN    placements AS p ON p.placement_id = asked.placement AND p.reservation_id = asked.reservation::uuid
AND     p.node_id = asked.node AND (asked.tenant = '' OR p.tenant_id = asked.tenant)`

// readPlaced finds the placement of each reservation without open rows, if it was told and still says
// this reservation.
func readPlaced(ctx context.Context, tx pgx.Tx, all []Confirmation, facts []facts) error {
	var (
		numbers, placements               []int64
		reservations, nodes, tenants, ids []string
		sealed                            [][]byte
	)
	for i := range all {
		c := &all[i]
		if c.PlacementID == 0 || !isReservation(c.ReservationID) || len(facts[i].open) > 0 {
			continue
		}
		numbers, placements = append(numbers, int64(i)), append(placements, c.PlacementID)
		reservations, nodes = append(reservations, c.ReservationID), append(nodes, string(c.Node))
		tenants, ids, sealed = append(tenants, c.Tenant), append(ids, joinIDs(c.Sandbox)), append(sealed, c.SealedAnswer)
	}
	if len(numbers) == 0 {
		return nil
	}
	rows, err := tx.Query(ctx, selectPlacedSQL, pgx.StrictNamedArgs{
		"numbers": numbers, "placements": placements, "reservations": reservations, "nodes": nodes, "tenants": tenants, "ids": ids,
		"sealed_answers": sealed,
	})
	if err != nil {
		return fmt.Errorf("read %d placements: %w", len(numbers), err)
	}
	type placedRow struct {
		I                      int64
		PlacementID            int64
		TenantID               string
		CPUMillis, MemoryBytes int64
		Confirmed, Settled     bool
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[placedRow])
	if err != nil {
		return fmt.Errorf("read %d placements: %w", len(numbers), err)
	}
	for _, r := range list {
		facts[r.I].placed = &placedBefore{
			Owner: Owner{
				Tenant: r.TenantID, PlacementID: r.PlacementID,
				Size: sandbox.Size{CPUMillis: r.CPUMillis, MemoryBytes: r.MemoryBytes},
			},
			Confirmed: r.Confirmed, Settled: r.Settled,
		}
	}
	return nil
}

const deleteHoldsSQL = `
DELETE  FROM reservations AS r
USING   unnest(@reservations::text[], @ns::smallint[]) AS over (reservation, n)
WHERE   r.reservation_id = over.reservation::uuid AND r.n = over.n`

const confirmHoldsSQL = `
UPDATE  reservations AS r
SET     sandbox_id = taken.id, expires_at = NULL
FROM    unnest(@reservations::text[], @ns::smallint[], @ids::text[]) AS taken (reservation, n, id)
WHERE   r.reservation_id = taken.reservation::uuid AND r.n = taken.n AND r.sandbox_id IS NULL`

// insertConfirmedSQL holds room for sandboxes that exist, each under a reservation id of its own.
const insertConfirmedSQL = `
INSERT  INTO reservations (reservation_id, n, placement_id, node_id, tenant_id, spread_key, cpu_millis, memory_bytes, named, sandbox_id)
SELECT  reservation::uuid, 1, nullif(placement, 0), node, tenant, spread_key, cpu_millis, memory_bytes, true, id
FROM    unnest(@reservations::text[], @placements::bigint[], @nodes::text[], @tenants::text[], @spread_keys::text[],
               @cpus::bigint[], @memories::bigint[], @ids::text[])
        AS w (reservation, placement, node, tenant, spread_key, cpu_millis, memory_bytes, id)
ORDER   BY id COLLATE "C"`

// writeConfirmed writes what was decided, but for the refused and the skipped. The rows are locked. late
// says that the placement had ended, so that its create key may be another's by now.
func writeConfirmed(ctx context.Context, tx pgx.Tx, decided []confirming, skip []bool, late bool) error {
	var all confirming
	for i := range decided {
		d := &decided[i]
		if d.err != nil || skip != nil && skip[i] {
			continue
		}
		all.drop, all.take = append(all.drop, d.drop...), append(all.take, d.take...)
		all.insert, all.settled = append(all.insert, d.insert...), append(all.settled, d.settled...)
	}
	if err := deleteHolds(ctx, tx, all.drop); err != nil {
		return err
	}
	if err := confirmHolds(ctx, tx, all.take); err != nil {
		return err
	}
	if err := insertConfirmed(ctx, tx, all.insert); err != nil {
		return err
	}
	if late {
		return settleLate(ctx, tx, all.settled)
	}
	return settle(ctx, tx, all.settled)
}

func deleteHolds(ctx context.Context, tx pgx.Tx, over []holdKey) error {
	if len(over) == 0 {
		return nil
	}
	reservations, ns := make([]string, len(over)), make([]int16, len(over))
	for i, key := range over {
		reservations[i], ns[i] = key.reservation, key.n
	}
	if _, err := tx.Exec(ctx, deleteHoldsSQL, pgx.StrictNamedArgs{"reservations": reservations, "ns": ns}); err != nil {
		return fmt.Errorf("delete %d holds that moved or are left over: %w", len(over), err)
	}
	return nil
}

func confirmHolds(ctx context.Context, tx pgx.Tx, take []taken) error {
	if len(take) == 0 {
		return nil
	}
	reservations, ns, ids := make([]string, len(take)), make([]int16, len(take)), make([]sandbox.ID, len(take))
	for i, t := range take {
		reservations[i], ns[i], ids[i] = t.key.reservation, t.key.n, t.sandbox
	}
	_, err := tx.Exec(ctx, confirmHoldsSQL, pgx.StrictNamedArgs{"reservations": reservations, "ns": ns, "ids": ids})
	if err != nil {
		return fmt.Errorf("confirm %d holds: %w", len(take), err)
	}
	return nil
}

func insertConfirmed(ctx context.Context, tx pgx.Tx, insert []inserted) error {
	if len(insert) == 0 {
		return nil
	}
	var (
		reservations, nodes, tenants, spreadKeys, ids []string
		placements, cpus, memories                    []int64
	)
	for _, w := range insert {
		reservations, nodes = append(reservations, uuid.NewString()), append(nodes, string(w.node))
		tenants, spreadKeys = append(tenants, w.owner.Tenant), append(spreadKeys, w.owner.SpreadKey)
		ids, placements = append(ids, string(w.sandbox)), append(placements, w.owner.PlacementID)
		cpus, memories = append(cpus, w.owner.Size.CPUMillis), append(memories, w.owner.Size.MemoryBytes)
	}
	_, err := tx.Exec(ctx, insertConfirmedSQL, pgx.StrictNamedArgs{
		"reservations": reservations, "placements": placements, "nodes": nodes, "tenants": tenants, "spread_keys": spreadKeys,
		"cpus": cpus, "memories": memories, "ids": ids,
	})
	if err != nil {
		return fmt.Errorf("hold room for %d sandboxes: %w", len(insert), err)
	}
	return nil
}

// settlePlacementsSQL keeps the ids that were drawn, if these are among them. A late confirmation does
// not take a create key back that another placement has by now. Locked in key order, as by whoever
// writes several.
const settlePlacementsSQL = `
WITH    settled AS MATERIALIZED (
        SELECT p.placement_id, p.reservation_id, string_to_array(said.ids, ',') AS ids, said.sealed_answer
        FROM   unnest(@placements::bigint[], @reservations::text[], @ids::text[], @sealed_answers::bytea[])
               AS said (placement, reservation, ids, sealed_answer)
        JOIN   placements AS p ON p.placement_id = said.placement AND p.reservation_id = said.reservation::uuid
        ORDER  BY p.placement_id
        FOR    UPDATE OF p)
UPDATE  placements AS p
SET     outcome = 'confirmed', changed_at = clock_timestamp(), sealed_answer = COALESCE(settled.sealed_answer, p.sealed_answer),
        sandbox_ids = CASE WHEN p.sandbox_ids @> settled.ids THEN p.sandbox_ids
                      WHEN p.outcome = 'confirmed' THEN p.sandbox_ids || ARRAY(SELECT unnest(settled.ids) EXCEPT SELECT unnest(p.sandbox_ids))
                      ELSE settled.ids END
FROM    settled
WHERE   p.placement_id = settled.placement_id AND p.reservation_id = settled.reservation_id
AND     (p.outcome IN ('reserved', 'confirmed') OR p.create_key IS NULL OR NOT EXISTS (
        SELECT 1 FROM placements AS other
        WHERE  other.tenant_id = p.tenant_id AND other.create_key = p.create_key AND other.outcome IN ('reserved', 'confirmed')))`

// settle marks placements confirmed, with their sandboxes. What comes twice is settled once, with the
// sandboxes of both: a statement updates a row once.
func settle(ctx context.Context, tx pgx.Tx, settled []settlement) error {
	settled = merge(settled)
	if len(settled) == 0 {
		return nil
	}
	placements, reservations := make([]int64, len(settled)), make([]string, len(settled))
	ids, sealed := make([]string, len(settled)), make([][]byte, len(settled))
	for i, s := range settled {
		placements[i], reservations[i], ids[i], sealed[i] = s.placement, s.reservation, joinIDs(s.sandboxes), s.sealed
	}
	_, err := tx.Exec(ctx, settlePlacementsSQL, pgx.StrictNamedArgs{
		"placements": placements, "reservations": reservations, "ids": ids, "sealed_answers": sealed,
	})
	if err != nil {
		return fmt.Errorf("settle %d placements: %w", len(settled), err)
	}
	return nil
}

func merge(settled []settlement) []settlement {
	if len(settled) < 2 {
		return settled
	}
	slices.SortStableFunc(settled, func(x, y settlement) int {
		if x.placement != y.placement {
			return int(min(max(x.placement-y.placement, -1), 1))
		}
		return strings.Compare(x.reservation, y.reservation)
	})
	out := settled[:1]
	for _, s := range settled[1:] {
		last := &out[len(out)-1]
		if last.placement != s.placement || last.reservation != s.reservation {
			out = append(out, s)
			continue
		}
		last.sandboxes = append(slices.Clip(last.sandboxes), s.sandboxes...)
		if s.sealed != nil {
			last.sealed = s.sealed
		}
	}
	return out
}
