package nodes

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/scheduler/internal/bindings"
)

// DrainState is where a drain is.
type DrainState string

// The states of a drain, as the rows spell them.
const (
	Closing  DrainState = "closing"  // nothing new is placed; creates that were promised room may still come
	Draining DrainState = "draining" // nothing can land any more; what is there leaves
	Done     DrainState = "done"     // nothing is left; the node stays cordoned
	Expired  DrainState = "expired"  // the deadline passed; what is left was left alone, the node stays cordoned
	Canceled DrainState = "canceled" // an operator ended it; the node stays cordoned if it was before
)

// DrainMode is how a node is emptied.
type DrainMode string

// The modes of a drain, as the rows spell them.
const (
	Wait DrainMode = "wait" // sandboxes end by themselves
	Move DrainMode = "move" // managed ones go to other nodes; observed ones are in the way until they end
	Park DrainMode = "park" // at the deadline, what is left loses its route
)

// maxBlockers is how many blockers a drain names.
const maxBlockers = 100

// Drain is the emptying of one node.
type Drain struct {
	ID          int64
	Node        node.ID
	State       DrainState
	Mode        DrainMode
	Reason      string
	RequestedBy string
	WasCordoned bool
	Total       int           // sandboxes and open holds there were
	Left        bindings.Left // now; once it ended, Bound has all that was left then
	CreatedAt   time.Time
	DeadlineAt  *time.Time // nil: none
	EndedAt     *time.Time // nil: open
	AsOf        time.Time  // the database's time of this answer

	Blockers []bindings.Blocker // the oldest, holds first; only Drain and an order's answer have them
	More     int                // how many there are besides; of what is left now, for an expired one
}

// next returns what becomes of an open drain of which left is left, and whether that parks what is left.
// overdue says that its deadline has passed. It is asked until the state stays.
func (s DrainState) next(mode DrainMode, left bindings.Left, overdue bool) (next DrainState, parks bool) {
	switch {
	case s == Closing && left.Holds == 0:
		return Draining, false
	case s == Draining && left.All() == 0:
		return Done, false
	case !overdue:
		return s, false
	case mode == Park:
		return Done, true
	}
	return Expired, false
}

// DrainOrder is what an operator asks for.
type DrainOrder struct {
	Node        node.ID
	Mode        DrainMode
	Deadline    time.Duration // from now; 0: none, which Park may not have
	Reason      string
	RequestedBy string
}

const insertDrainSQL = `
INSERT  INTO drains (node_id, state, mode, reason, requested_by, was_cordoned, total, deadline_at)
SELECT  @node, 'closing', @mode, @reason, @by, @was_cordoned, @total, clock_timestamp() + nullif(@deadline::interval, interval '0')
RETURNING drain_id`

const closeNodeSQL = `
UPDATE  nodes
SET     cordoned = true, cordon_reason = CASE WHEN cordoned THEN cordon_reason ELSE @reason END, drain_id = @drain,
        changed_at = clock_timestamp()
WHERE   node_id = @node`

// StartDrain cordons a node and begins to empty it. Once it returned, no placement chooses the node.
// Errors: node.ErrUnknown; *node.DrainOpen where one is open already.
func (n *Nodes) StartDrain(ctx context.Context, o DrainOrder) (Drain, error) {
	var (
		started Drain
		noted   []bindings.Event
	)
	err := n.withNode(ctx, o.Node, func(tx pgx.Tx, known *row) error {
		if known.DrainID != nil {
			return &node.DrainOpen{ID: *known.DrainID}
		}
		left, err := bindings.CountLeft(ctx, tx, o.Node)
		if err != nil {
			return err
		}
		var id int64
		err = tx.QueryRow(ctx, insertDrainSQL, pgx.StrictNamedArgs{
			"node": o.Node, "mode": o.Mode, "reason": o.Reason, "by": o.RequestedBy, "was_cordoned": known.Cordoned,
			"total": left[o.Node].All(), "deadline": o.Deadline,
		}).Scan(&id)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, closeNodeSQL, pgx.StrictNamedArgs{"node": o.Node, "reason": o.Reason, "drain": id}); err != nil {
			return err
		}
		started, err = readDrain(ctx, tx, drainQuestion{ID: id, Most: 1})
		if err != nil {
			return err
		}
		if err := started.readBlockers(ctx, tx); err != nil {
			return err
		}
		noted = []bindings.Event{started.event(known.ClusterID)}
		return bindings.Note(ctx, tx, noted...)
	})
	if err != nil {
		return Drain{}, fmt.Errorf("drain %s: %w", o.Node, err)
	}
	n.routes.Count(noted...)
	return started, nil
}

// event returns what the log says of d when it has come to its state.
func (d *Drain) event(cluster string) bindings.Event {
	return bindings.Event{
		Kind: bindings.KindDrain, Effect: bindings.Effect(d.State), Cluster: cluster, Node: d.Node,
		Detail: map[string]any{"drain": d.ID, "mode": d.Mode, "reason": d.Reason, "left": d.Left.All(), "total": d.Total},
	}
}

// drainQuestion says which drains are asked for, newest first.
type drainQuestion struct {
	ID     int64   // 0: any
	Node   node.ID // "": any
	Open   bool    // only those
	Before int64   // 0: from the newest
	Most   int
}

const selectDrainsSQL = `
SELECT  drain_id AS id, node_id AS node, state, mode, reason, requested_by, was_cordoned, total, COALESCE(left_at_end, 0) AS left_at_end,
        created_at, deadline_at, ended_at, clock_timestamp() AS as_of
FROM    drains
WHERE   (@drain::bigint = 0 OR drain_id = @drain) AND (@node::text = '' OR node_id = @node)
AND     (NOT @open::boolean OR ended_at IS NULL) AND (@before::bigint = 0 OR drain_id < @before)
ORDER   BY drain_id DESC
LIMIT   @most::bigint`

type drainRow struct {
	ID          int64
	Node        node.ID
	State       DrainState
	Mode        DrainMode
	Reason      string
	RequestedBy string
	WasCordoned bool
	Total       int
	LeftAtEnd   int
	CreatedAt   time.Time
	DeadlineAt  *time.Time
	EndedAt     *time.Time
	AsOf        time.Time
}

func (r *drainRow) drain() Drain {
	return Drain{
		ID: r.ID, Node: r.Node, State: r.State, Mode: r.Mode, Reason: r.Reason, RequestedBy: r.RequestedBy,
		WasCordoned: r.WasCordoned, Total: r.Total, Left: bindings.Left{Bound: r.LeftAtEnd},
		CreatedAt: r.CreatedAt, DeadlineAt: r.DeadlineAt, EndedAt: r.EndedAt, AsOf: r.AsOf,
	}
}

func readDrains(ctx context.Context, q querier, of drainQuestion) ([]Drain, error) {
	rows, err := q.Query(ctx, selectDrainsSQL, pgx.StrictNamedArgs{
		"drain": of.ID, "node": of.Node, "open": of.Open, "before": of.Before, "most": of.Most,
	})
	if err != nil {
		return nil, fmt.Errorf("read drains: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByName[drainRow])
	if err != nil {
		return nil, fmt.Errorf("read drains: %w", err)
	}
	drains := make([]Drain, len(list))
	for i, r := range list {
		drains[i] = r.drain()
	}
	return drains, nil
}

func readDrain(ctx context.Context, q querier, of drainQuestion) (Drain, error) {
	of.Most = 1
	drains, err := readDrains(ctx, q, of)
	if err != nil {
		return Drain{}, err
	}
	if len(drains) == 0 {
		return Drain{}, node.ErrNoDrain
	}
	return drains[0], nil
}

// readBlockers names what is in the way of an open drain, counts it and raises the total to that. Of an
// expired one it names what was in the way then and still is.
func (d *Drain) readBlockers(ctx context.Context, q querier) error {
	if d.EndedAt != nil && d.State != Expired {
		return nil
	}
	blockers, left, err := bindings.Blockers(ctx, q, d.Node, d.EndedAt, maxBlockers)
	if err != nil {
		return err
	}
	d.Blockers, d.More = blockers, left.All()-len(blockers)
	if d.EndedAt == nil {
		d.Left, d.Total = left, max(d.Total, left.All())
	}
	return nil
}

// Drain returns one drain with what is in its way: the one of id, or where id is 0 the newest of a node.
// Errors: node.ErrNoDrain.
func (n *Nodes) Drain(ctx context.Context, id int64, of node.ID) (Drain, error) {
	d, err := readDrain(ctx, n.db, drainQuestion{ID: id, Node: of})
	if err != nil {
		return Drain{}, err
	}
	return d, d.readBlockers(ctx, n.db)
}

// DrainList says which drains to return, newest first.
type DrainList struct {
	Node   node.ID // "": of all
	Open   bool    // only those
	Before int64   // drain id; 0: from the newest
	Limit  int
}

// ListDrains returns drains without their blockers.
func (n *Nodes) ListDrains(ctx context.Context, l DrainList) ([]Drain, error) {
	drains, err := readDrains(ctx, n.db, drainQuestion{Node: l.Node, Open: l.Open, Before: l.Before, Most: l.Limit})
	if err != nil {
		return nil, err
	}
	var open []node.ID
	for _, d := range drains {
		if d.EndedAt == nil {
			open = append(open, d.Node)
		}
	}
	if len(open) == 0 {
		return drains, nil
	}
	left, err := bindings.CountLeft(ctx, n.db, open...)
	if err != nil {
		return nil, err
	}
	for i := range drains {
		if d := &drains[i]; d.EndedAt == nil {
			d.Left = left[d.Node]
			d.Total = max(d.Total, d.Left.All())
		}
	}
	return drains, nil
}

// CancelDrain ends an open drain: the one of id, or where id is 0 the node's. The node stays cordoned only
// if it was. A second call changes nothing. Errors: node.ErrNoDrain; node.ErrDrainEnded where it is done or
// expired.
func (n *Nodes) CancelDrain(ctx context.Context, id int64, of node.ID) (Drain, error) {
	asked, err := readDrain(ctx, n.db, drainQuestion{ID: id, Node: of})
	if err != nil {
		return Drain{}, fmt.Errorf("cancel a drain: %w", err)
	}
	var (
		canceled Drain
		noted    []bindings.Event
	)
	err = n.withNode(ctx, asked.Node, func(tx pgx.Tx, known *row) error {
		var err error
		noted = nil
		if canceled, err = lockDrain(ctx, tx, asked.ID); err != nil {
			return err
		}
		switch {
		case canceled.State == Canceled:
			return nil
		case canceled.EndedAt != nil:
			return node.ErrDrainEnded
		}
		left, err := bindings.CountLeft(ctx, tx, canceled.Node)
		if err != nil {
			return err
		}
		if err := endDrain(ctx, tx, &canceled, Canceled, left[canceled.Node].All()); err != nil {
			return err
		}
		if canceled, err = readDrain(ctx, tx, drainQuestion{ID: canceled.ID}); err != nil {
			return err
		}
		noted = []bindings.Event{canceled.event(known.ClusterID)}
		return bindings.Note(ctx, tx, noted...)
	})
	if err != nil {
		return Drain{}, fmt.Errorf("cancel drain %d of %s: %w", asked.ID, asked.Node, err)
	}
	n.routes.Count(noted...)
	return canceled, nil
}

const lockDrainSQL = `SELECT drain_id FROM drains WHERE drain_id = @drain FOR UPDATE`

// lockDrain locks a drain and reads it after that. Its node's lock is held.
func lockDrain(ctx context.Context, tx pgx.Tx, id int64) (Drain, error) {
	err := tx.QueryRow(ctx, lockDrainSQL, pgx.StrictNamedArgs{"drain": id}).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) {
		return Drain{}, node.ErrNoDrain
	}
	if err != nil {
		return Drain{}, fmt.Errorf("lock drain %d: %w", id, err)
	}
	return readDrain(ctx, tx, drainQuestion{ID: id})
}

const endDrainSQL = `
UPDATE  drains
SET     state = @state, ended_at = clock_timestamp(), left_at_end = @left, total = GREATEST(total, @total)
WHERE   drain_id = @drain AND ended_at IS NULL`

// leaveDrainSQL ends the drain on its node; @opens tells that nothing else keeps the node cordoned.
const leaveDrainSQL = `
UPDATE  nodes
SET     drain_id = NULL, cordoned = cordoned AND NOT @opens::boolean, changed_at = clock_timestamp(),
        cordon_reason = CASE WHEN @opens THEN '' ELSE cordon_reason END
WHERE   node_id = @node AND drain_id = @drain`

// endDrain ends d, which is open and locked with its node, while left is left.
func endDrain(ctx context.Context, tx pgx.Tx, d *Drain, as DrainState, left int) error {
	_, err := tx.Exec(ctx, endDrainSQL, pgx.StrictNamedArgs{"drain": d.ID, "state": as, "left": left, "total": d.Total})
	if err != nil {
		return fmt.Errorf("end drain %d: %w", d.ID, err)
	}
	opens := as == Canceled && !d.WasCordoned
	_, err = tx.Exec(ctx, leaveDrainSQL, pgx.StrictNamedArgs{"node": d.Node, "drain": d.ID, "opens": opens})
	if err != nil {
		return fmt.Errorf("end drain %d on %s: %w", d.ID, d.Node, err)
	}
	return nil
}
