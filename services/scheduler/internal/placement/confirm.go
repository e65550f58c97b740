package placement

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
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

// HoldAppeared reports whether err says that another transaction has held room for a sandbox between
// the reading and the writing of a Confirm: the caller begins anew.
func HoldAppeared(err error) bool { return pgdb.Constraint(err) == "reservations_one_per_sandbox" }

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

// ConfirmResult is what became of one confirmation of several.
type ConfirmResult struct {
	Owner Confirmed
	Err   error // ErrAlone or node.ErrReservationOver: nothing was decided for it
}

// Confirm is ConfirmAll for one.
func Confirm(ctx context.Context, tx pgx.Tx, c Confirmation) (Confirmed, error) {
	results, write, err := ConfirmAll(ctx, tx, []Confirmation{c})
	if err != nil {
		return Owner{}, err
	}
	if results[0].Err != nil {
		return Owner{}, results[0].Err
	}
	return results[0].Owner, write(ctx, nil)
}

// ConfirmAll turns open holds into confirmed ones, joining the caller's transaction, which has locked
// the bindings of all ids. Each id gets one hold on its node, unless it is bound there already: an open
// row of the reservation, or for an AgentENV caller the smallest open unnamed one of the node, or a row
// that was not asked for, because the sandbox exists. Holds of these ids on other nodes are deleted, and
// so are open rows of the reservation that are left over; its placement becomes confirmed.
//
// No id and no reservation comes twice in all. It locks and decides; nothing has changed before the
// caller calls write, which leaves out the confirmations that skip, by index, is true for. Results are
// in the order of all. A second call with the same confirmations changes nothing.
func ConfirmAll(ctx context.Context, tx pgx.Tx, all []Confirmation) (results []ConfirmResult, write func(ctx context.Context, skip []bool) error, err error) {
	alone := len(all) == 1 && all[0].Alone
	if alone {
		if all, err = renewedClaim(ctx, tx, all[0]); err != nil {
			return nil, nil, err
		}
	}
	holds, err := lockHolds(ctx, tx, all)
	if err != nil {
		return nil, nil, err
	}
	facts := make([]facts, len(all))
	for i := range all {
		facts[i] = holds.about(&all[i])
	}
	unnamed, err := lockUnnamed(ctx, tx, all, facts)
	if err != nil {
		return nil, nil, err
	}
	if err := readPlaced(ctx, tx, all, facts); err != nil {
		return nil, nil, err
	}
	results = make([]ConfirmResult, len(all))
	decided := make([]confirming, len(all))
	for i := range all {
		c, f := &all[i], &facts[i]
		if c.Alone && f.needsRoom(c) {
			if f.room, err = roomFor(ctx, tx, c.Node, c.Limits, f.owner(c).Size, len(f.missing)); err != nil {
				return nil, nil, err
			}
		}
		if c.ReservationID == "" {
			f.open = unnamed[c.Node].next(len(f.missing))
			decided[i] = decideUnnamed(c, f)
		} else {
			decided[i] = decideNamed(c, f)
		}
		results[i] = ConfirmResult{Owner: decided[i].owner, Err: decided[i].err}
	}
	return results, func(ctx context.Context, skip []bool) error { return writeConfirmed(ctx, tx, decided, skip, alone) }, nil
}

// facts are what the rows say about one confirmation. All rows in it are locked.
type facts struct {
	moved   []hold       // confirmed holds of its ids on other nodes
	missing []sandbox.ID // its ids without a hold on the node, that are not bound there either
	open    []hold       // what is left of its reservation; unnamed: one for each missing id, or fewer
	placed  *placedBefore
	room    bool // for the missing ones; read where needsRoom
}

// owner is whose the sandboxes are: what placement knows goes before what the caller says.
func (f *facts) owner(c *Confirmation) Owner {
	if f.placed != nil {
		return f.placed.Owner
	}
	return Owner{Tenant: c.Tenant, Size: c.Size}
}

// ended reports whether the named reservation of c has ended, so that its missing sandboxes are held
// only if there is room.
func (f *facts) needsRoom(c *Confirmation) bool {
	further := f.placed != nil && f.placed.Confirmed // of a reservation that was confirmed, like a fork's child
	return c.ReservationID != "" && isReservation(c.ReservationID) && len(f.open) == 0 && len(f.missing) > 0 && !further
}

// confirming is what is to be written for one confirmation, or why not.
type confirming struct {
	owner   Owner
	err     error
	drop    []holdKey
	take    []taken
	insert  []inserted
	settled []settlement
}

// taken is an open hold that becomes a sandbox's.
type taken struct {
	key     holdKey
	sandbox sandbox.ID
}

// inserted is a hold for a sandbox that exists, under a reservation id of its own.
type inserted struct {
	sandbox sandbox.ID
	node    node.ID
	owner   Owner
}

// settlement makes a placement confirmed, with these sandboxes.
type settlement struct {
	placement   int64
	reservation string
	sandboxes   []sandbox.ID
	sealed      []byte
}

func decideNamed(c *Confirmation, f *facts) confirming {
	out := confirming{owner: f.owner(c), drop: keysOf(f.moved)}
	switch {
	case !isReservation(c.ReservationID):
		return confirming{err: node.ErrReservationOver} // it never was
	case len(f.open) > 0:
		out.owner = f.open[0].owner()
		out.takeOpen(f.missing, f.open)
		out.drop = append(out.drop, keysOf(f.open[len(out.take):])...) // what is bound already needs no second count
		out.insertAll(c.Node, f.missing[len(out.take):])
		out.settle(c, c.ReservationID, c.Sandbox)
		return out
	case f.needsRoom(c) && !c.Alone:
		return confirming{err: ErrAlone}
	case f.needsRoom(c) && !f.room:
		return confirming{err: node.ErrReservationOver}
	}
	out.insertAll(c.Node, f.missing)
	further := len(f.missing) > 0 && f.placed != nil && f.placed.Confirmed
	if f.placed != nil && !f.placed.Settled && !further {
		out.settle(c, c.ReservationID, c.Sandbox)
	}
	return out
}

// decideUnnamed gives each missing sandbox the next open hold that nobody can name, erring towards a
// fuller node: the smallest go first.
func decideUnnamed(c *Confirmation, f *facts) confirming {
	out := confirming{owner: Owner{Tenant: c.Tenant, Size: c.Size}, drop: keysOf(f.moved)}
	out.takeOpen(f.missing, f.open)
	for i, h := range f.open {
		out.owner = h.owner()
		if c.Tenant != "" {
			out.owner.Tenant = c.Tenant
		}
		out.settle(c, h.ReservationID, f.missing[i:i+1])
	}
	out.insertAll(c.Node, f.missing[len(f.open):])
	return out
}

func (d *confirming) takeOpen(missing []sandbox.ID, open []hold) {
	for i := range min(len(missing), len(open)) {
		d.take = append(d.take, taken{open[i].key(), missing[i]})
	}
}

func (d *confirming) insertAll(n node.ID, ids []sandbox.ID) {
	for _, id := range ids {
		d.insert = append(d.insert, inserted{id, n, d.owner})
	}
}

// settle settles the owner's placement, if there is one.
func (d *confirming) settle(c *Confirmation, reservation string, ids []sandbox.ID) {
	if d.owner.PlacementID != 0 {
		d.settled = append(d.settled, settlement{d.owner.PlacementID, reservation, ids, c.SealedAnswer})
	}
}
