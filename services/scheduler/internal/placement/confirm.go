package placement

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// ErrAlone is returned by Confirm when a named reservation has ended and Confirmation.Alone is not set:
// the caller leaves its batch, begins a transaction for this one, takes advisory.Node and calls again
// with Alone set.
var ErrAlone = errors.New("reservation has ended: confirm alone, under the node's lock")

// Confirmation says that sandboxes of one reservation exist on a node.
type Confirmation struct {
	Sandbox       []sandbox.ID // at least one, each once
	Node          node.ID
	ReservationID string // "": an AgentENV caller, who cannot name its hold
	PlacementID   int64  // 0: not told; then an ended reservation is not found again
	Tenant        string // "": not told; a reservation of another tenant counts as ended
	Size          sandbox.Size

	// AlreadyBoundHere has the ids whose row is bound to Node already: they are counted in its report
	// or by a hold of their own.
	AlreadyBoundHere map[sandbox.ID]bool

	SealedAnswer []byte // kept with the placement; nil: what is there stays

	// Alone says that the caller's transaction holds advisory.Node of Node, taken in an earlier
	// statement, and has no other confirmation in it.
	Alone bool

	// Limits are the configured limits of nodes; they are asked only when Alone is set.
	Limits Limits
}

// Owner is what a placement knows about its sandboxes.
type Owner struct {
	Tenant      string
	Size        sandbox.Size // of each sandbox
	SpreadKey   string
	PlacementID int64 // 0: no placement is known
}

// Confirmed is whose the confirmed sandboxes are. Where no placement is known, it repeats the
// confirmation's tenant and size.
type Confirmed = Owner

// Confirm turns open holds into confirmed ones, joining the caller's transaction, which has locked the
// bindings of all ids. Each id gets one hold on the node, unless it is bound there already: an open row
// of the reservation, or for an AgentENV caller the smallest open unnamed one of the node, or a row that
// was not asked for, because the sandbox exists. Holds of these ids on other nodes are deleted, and so
// are open rows of the reservation that are left over; its placement becomes confirmed.
//
// Errors: ErrAlone, see there; node.ErrReservationOver when the reservation has ended and the node has
// no room. A second call with the same confirmation changes nothing.
func Confirm(ctx context.Context, tx pgx.Tx, c Confirmation) (Confirmed, error) {
	owner := Owner{Tenant: c.Tenant, Size: c.Size}
	counted, err := holdsOf(ctx, tx, c)
	if err != nil {
		return Owner{}, err
	}
	var missing []sandbox.ID
	for _, id := range c.Sandbox {
		if !counted[id] && !c.AlreadyBoundHere[id] {
			missing = append(missing, id)
		}
	}
	if c.ReservationID == "" {
		return confirmUnnamed(ctx, tx, c, owner, missing)
	}
	return confirmNamed(ctx, tx, c, owner, missing)
}

// deleteMovedHoldsSQL ends the holds of sandboxes that are confirmed on another node now.
const deleteMovedHoldsSQL = `
DELETE  FROM reservations
WHERE   sandbox_id = ANY (@ids::text[]) AND node_id <> @node`

const selectHeldSandboxesSQL = `
SELECT  sandbox_id
FROM    reservations
WHERE   sandbox_id = ANY (@ids::text[])`

// holdsOf returns which of the ids have a confirmed hold on the node, and deletes those elsewhere.
func holdsOf(ctx context.Context, tx pgx.Tx, c Confirmation) (map[sandbox.ID]bool, error) {
	if _, err := tx.Exec(ctx, deleteMovedHoldsSQL, pgx.StrictNamedArgs{"ids": c.Sandbox, "node": c.Node}); err != nil {
		return nil, fmt.Errorf("delete holds that moved to %s: %w", c.Node, err)
	}
	rows, err := tx.Query(ctx, selectHeldSandboxesSQL, pgx.StrictNamedArgs{"ids": c.Sandbox})
	if err != nil {
		return nil, fmt.Errorf("read holds on %s: %w", c.Node, err)
	}
	held, err := pgx.CollectRows(rows, pgx.RowTo[sandbox.ID])
	if err != nil {
		return nil, fmt.Errorf("read holds on %s: %w", c.Node, err)
	}
	counted := make(map[sandbox.ID]bool, len(held))
	for _, id := range held {
		counted[id] = true
	}
	return counted, nil
}

// lockOpenHoldsSQL locks what is left of a reservation, in key order.
const lockOpenHoldsSQL = `
SELECT  n, placement_id, tenant_id, spread_key, cpu_millis, memory_bytes
FROM    reservations
WHERE   reservation_id = @reservation::uuid AND node_id = @node AND sandbox_id IS NULL
AND     (@tenant::text = '' OR tenant_id = @tenant)
ORDER   BY n
FOR     UPDATE`

type openHold struct {
	N           int16
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

func confirmNamed(ctx context.Context, tx pgx.Tx, c Confirmation, owner Owner, missing []sandbox.ID) (Confirmed, error) {
	if !isReservation(c.ReservationID) {
		return Owner{}, node.ErrReservationOver // it never was
	}
	rows, err := tx.Query(ctx, lockOpenHoldsSQL, pgx.StrictNamedArgs{
		"reservation": c.ReservationID, "node": c.Node, "tenant": c.Tenant,
	})
	if err != nil {
		return Owner{}, fmt.Errorf("lock reservation %s: %w", c.ReservationID, err)
	}
	open, err := pgx.CollectRows(rows, pgx.RowToStructByNameLax[openHold])
	if err != nil {
		return Owner{}, fmt.Errorf("lock reservation %s: %w", c.ReservationID, err)
	}
	if len(open) > 0 {
		owner = open[0].owner()
		return owner, confirmOpen(ctx, tx, c, owner, missing, open)
	}

	placed, found, err := placementOf(ctx, tx, c)
	if err != nil {
		return Owner{}, err
	}
	if found {
		owner = placed.Owner
	}
	if len(missing) == 0 {
		if found {
			return owner, settle(ctx, tx, c, owner)
		}
		return owner, nil
	}
	if found && placed.Confirmed {
		// A further sandbox of a reservation that was confirmed, like a fork's child.
		return owner, insertConfirmed(ctx, tx, c, owner, missing)
	}
	if !c.Alone {
		return Owner{}, ErrAlone
	}
	room, err := roomFor(ctx, tx, c.Node, c.Limits, owner.Size, len(missing))
	if err != nil {
		return Owner{}, err
	}
	if !room {
		return Owner{}, node.ErrReservationOver
	}
	if err := insertConfirmed(ctx, tx, c, owner, missing); err != nil {
		return Owner{}, err
	}
	if found {
		return owner, settle(ctx, tx, c, owner)
	}
	return owner, nil
}

const confirmHoldsSQL = `
UPDATE  reservations AS r
SET     sandbox_id = taken.id, expires_at = NULL
FROM    unnest(@ns::smallint[], @ids::text[]) AS taken (n, id)
WHERE   r.reservation_id = @reservation::uuid AND r.n = taken.n AND r.sandbox_id IS NULL`

const deleteLeftOverHoldsSQL = `
DELETE  FROM reservations
WHERE   reservation_id = @reservation::uuid AND sandbox_id IS NULL`

// confirmOpen gives the open rows, which are locked, to the missing ids; what is left over is deleted,
// for what is bound already needs no second count.
func confirmOpen(ctx context.Context, tx pgx.Tx, c Confirmation, owner Owner, missing []sandbox.ID, open []openHold) error {
	taken := missing[:min(len(missing), len(open))]
	ns := make([]int16, len(taken))
	for i := range taken {
		ns[i] = open[i].N
	}
	args := pgx.StrictNamedArgs{"reservation": c.ReservationID, "ns": ns, "ids": taken}
	if _, err := tx.Exec(ctx, confirmHoldsSQL, args); err != nil {
		return fmt.Errorf("confirm %d holds of %s: %w", len(taken), c.ReservationID, err)
	}
	if err := insertConfirmed(ctx, tx, c, owner, missing[len(taken):]); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, deleteLeftOverHoldsSQL, pgx.StrictNamedArgs{"reservation": c.ReservationID}); err != nil {
		return fmt.Errorf("delete what is left of %s: %w", c.ReservationID, err)
	}
	return settle(ctx, tx, c, owner)
}

// insertConfirmedSQL holds room for sandboxes that exist, under a reservation id of their own.
const insertConfirmedSQL = `
INSERT  INTO reservations (reservation_id, n, placement_id, node_id, tenant_id, spread_key, cpu_millis, memory_bytes, named, sandbox_id)
SELECT  @reservation::uuid, row_number() OVER (), nullif(@placement::bigint, 0), @node, @tenant, @spread_key, @cpu_millis, @memory_bytes, true, id
FROM    unnest(@ids::text[]) AS id`

func insertConfirmed(ctx context.Context, tx pgx.Tx, c Confirmation, owner Owner, ids []sandbox.ID) error {
	if len(ids) == 0 {
		return nil
	}
	_, err := tx.Exec(ctx, insertConfirmedSQL, pgx.StrictNamedArgs{
		"reservation": uuid.NewString(), "placement": owner.PlacementID, "node": c.Node, "tenant": owner.Tenant,
		"spread_key": owner.SpreadKey, "cpu_millis": owner.Size.CPUMillis, "memory_bytes": owner.Size.MemoryBytes, "ids": ids,
	})
	if err != nil {
		return fmt.Errorf("hold room for %d sandboxes on %s: %w", len(ids), c.Node, err)
	}
	return nil
}

const selectPlacementOfSQL = `
SELECT  placement_id, tenant_id, cpu_millis, memory_bytes, outcome
FROM    placements
WHERE   placement_id = @placement AND reservation_id = @reservation::uuid AND node_id = @node
AND     (@tenant::text = '' OR tenant_id = @tenant)`

type placedBefore struct {
	Owner
	Confirmed bool
}

// placementOf returns the placement of a reservation without open rows, if it was told and still says
// this reservation.
func placementOf(ctx context.Context, tx pgx.Tx, c Confirmation) (placedBefore, bool, error) {
	if c.PlacementID == 0 {
		return placedBefore{}, false, nil
	}
	var (
		placed  placedBefore
		outcome Outcome
	)
	err := tx.QueryRow(ctx, selectPlacementOfSQL, pgx.StrictNamedArgs{
		"placement": c.PlacementID, "reservation": c.ReservationID, "node": c.Node, "tenant": c.Tenant,
	}).Scan(&placed.PlacementID, &placed.Tenant, &placed.Size.CPUMillis, &placed.Size.MemoryBytes, &outcome)
	if errors.Is(err, pgx.ErrNoRows) {
		return placedBefore{}, false, nil
	}
	if err != nil {
		return placedBefore{}, false, fmt.Errorf("read placement %d: %w", c.PlacementID, err)
	}
	placed.Confirmed = outcome == Recorded
	return placed, true, nil
}

// settlePlacementSQL keeps the ids that were drawn, if these are among them. A late confirmation does
// not take a create key back that another placement has by now.
const settlePlacementSQL = `
UPDATE  placements AS p
SET     outcome = 'confirmed', changed_at = clock_timestamp(), sealed_answer = COALESCE(@sealed_answer, p.sealed_answer),
        sandbox_ids = CASE WHEN p.sandbox_ids @> @ids::text[] THEN p.sandbox_ids
                      WHEN p.outcome = 'confirmed' THEN p.sandbox_ids || ARRAY(SELECT unnest(@ids::text[]) EXCEPT SELECT unnest(p.sandbox_ids))
                      ELSE @ids::text[] END
WHERE   p.placement_id = @placement AND p.reservation_id = @reservation::uuid
AND     (p.outcome IN ('reserved', 'confirmed') OR p.create_key IS NULL OR NOT EXISTS (
        SELECT 1 FROM placements AS other
        WHERE  other.tenant_id = p.tenant_id AND other.create_key = p.create_key AND other.outcome IN ('reserved', 'confirmed')))`

// settle marks the placement confirmed, with its sandboxes.
func settle(ctx context.Context, tx pgx.Tx, c Confirmation, owner Owner) error {
	if owner.PlacementID == 0 {
		return nil
	}
	_, err := tx.Exec(ctx, settlePlacementSQL, pgx.StrictNamedArgs{
		"placement": owner.PlacementID, "reservation": c.ReservationID,
		"ids": slices.Clone(c.Sandbox), "sealed_answer": c.SealedAnswer,
	})
	if err != nil {
		return fmt.Errorf("settle placement %d: %w", owner.PlacementID, err)
	}
	return nil
}

// confirmUnnamedSQL takes the smallest open hold of the node that nobody can name, erring towards a
// fuller node. SKIP LOCKED: two records at once take two rows.
const confirmUnnamedSQL = `
WITH    smallest AS MATERIALIZED (
        SELECT reservation_id, n
        FROM   reservations
        WHERE  node_id = @node AND NOT named AND sandbox_id IS NULL
        ORDER  BY memory_bytes, cpu_millis, reservation_id, n
        LIMIT  1
        FOR    UPDATE SKIP LOCKED)
UPDATE  reservations AS r
SET     sandbox_id = @id, expires_at = NULL
FROM    smallest
WHERE   r.reservation_id = smallest.reservation_id AND r.n = smallest.n
RETURNING r.reservation_id::text, r.n, r.placement_id, r.tenant_id, r.spread_key, r.cpu_millis, r.memory_bytes`

func confirmUnnamed(ctx context.Context, tx pgx.Tx, c Confirmation, owner Owner, missing []sandbox.ID) (Confirmed, error) {
	for _, id := range missing {
		var (
			reservation string
			hold        openHold
		)
		err := tx.QueryRow(ctx, confirmUnnamedSQL, pgx.StrictNamedArgs{"node": c.Node, "id": id}).Scan(
			&reservation, &hold.N, &hold.PlacementID, &hold.TenantID, &hold.SpreadKey, &hold.CPUMillis, &hold.MemoryBytes)
		if errors.Is(err, pgx.ErrNoRows) {
			if err := insertConfirmed(ctx, tx, c, owner, []sandbox.ID{id}); err != nil {
				return Owner{}, err
			}
			continue
		}
		if err != nil {
			return Owner{}, fmt.Errorf("confirm an unnamed hold on %s: %w", c.Node, err)
		}
		owner = hold.owner()
		if c.Tenant != "" {
			owner.Tenant = c.Tenant
		}
		of := c
		of.ReservationID, of.Sandbox = reservation, []sandbox.ID{id}
		if err := settle(ctx, tx, of, owner); err != nil {
			return Owner{}, err
		}
	}
	return owner, nil
}
