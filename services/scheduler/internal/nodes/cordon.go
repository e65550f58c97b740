package nodes

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/scheduler/internal/bindings"
)

// cordonNodeSQL keeps the reason of an earlier order where none is given.
const cordonNodeSQL = `
UPDATE  nodes
SET     cordoned = true, changed_at = clock_timestamp(),
        cordon_reason = CASE WHEN cordoned AND @reason = '' THEN cordon_reason ELSE @reason END
WHERE   node_id = @node AND NOT (cordoned AND (@reason = '' OR cordon_reason = @reason))`

// keepCordonSQL lets a drain that is under way leave the node cordoned when it is canceled.
const keepCordonSQL = `
UPDATE  drains
SET     was_cordoned = true
WHERE   node_id = @node AND ended_at IS NULL AND NOT was_cordoned`

// Cordon closes a node: once it returned, no placement chooses the node, for placements decide under the
// same lock. What is there stays. A second call changes the reason at most. Errors: node.ErrUnknown.
func (n *Nodes) Cordon(ctx context.Context, id node.ID, reason string) error {
	var noted []bindings.Event
	err := n.withNode(ctx, id, func(tx pgx.Tx, known *row) error {
		noted = nil
		tag, err := tx.Exec(ctx, cordonNodeSQL, pgx.StrictNamedArgs{"node": id, "reason": reason})
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, keepCordonSQL, pgx.StrictNamedArgs{"node": id}); err != nil {
			return err
		}
		if tag.RowsAffected() > 0 {
			noted = []bindings.Event{{Kind: bindings.KindCordoned, Cluster: known.ClusterID, Node: id, Detail: map[string]any{"reason": reason}}}
		}
		return bindings.Note(ctx, tx, noted...)
	})
	if err != nil {
		return fmt.Errorf("cordon %s: %w", id, err)
	}
	n.routes.Count(noted...)
	return nil
}

const uncordonNodeSQL = `
UPDATE  nodes
SET     cordoned = false, cordon_reason = '', changed_at = clock_timestamp()
WHERE   node_id = @node AND cordoned`

// compareNextSQL waits for a heartbeat that is writing the lease, unlike the sweep: nobody comes again.
const compareNextSQL = `
UPDATE  node_leases
SET     reconcile_due = '-infinity'
WHERE   node_id = @node`

// Uncordon opens a node again. Its next heartbeat is compared in full, which brings back what a drain
// parked there. A second call changes nothing. Errors: node.ErrUnknown; node.ErrDraining while a drain is
// open, which is to be canceled instead.
func (n *Nodes) Uncordon(ctx context.Context, id node.ID) error {
	var noted []bindings.Event
	err := n.withNode(ctx, id, func(tx pgx.Tx, known *row) error {
		noted = nil
		if known.DrainID != nil {
			return node.ErrDraining
		}
		tag, err := tx.Exec(ctx, uncordonNodeSQL, pgx.StrictNamedArgs{"node": id})
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		if _, err := tx.Exec(ctx, compareNextSQL, pgx.StrictNamedArgs{"node": id}); err != nil {
			return err
		}
		if err := bindings.KeepDrained(ctx, tx, id); err != nil {
			return err
		}
		noted = []bindings.Event{{Kind: bindings.KindUncordoned, Cluster: known.ClusterID, Node: id}}
		return bindings.Note(ctx, tx, noted...)
	})
	if err != nil {
		return fmt.Errorf("uncordon %s: %w", id, err)
	}
	n.routes.Count(noted...)
	return nil
}

// withNode runs f in a transaction that holds advisory.Node of id and has locked its row after that, or
// returns node.ErrUnknown.
func (n *Nodes) withNode(ctx context.Context, id node.ID, f func(tx pgx.Tx, known *row) error) error {
	return n.db.Tx(ctx, func(tx pgx.Tx) error {
		known, _, err := lockNode(ctx, tx, id)
		if err != nil {
			return err
		}
		if known == nil {
			return node.ErrUnknown
		}
		return f(tx, known)
	})
}

// lockNode takes advisory.Node of id and locks its row and lease after that; either is nil where there is
// none. It is the order of heartbeats.
func lockNode(ctx context.Context, tx pgx.Tx, id node.ID) (*row, *lease, error) {
	if err := pgdb.Lock(ctx, tx, advisory.Node(id)); err != nil {
		return nil, nil, err
	}
	known, err := lockRow(ctx, tx, id)
	if err != nil {
		return nil, nil, err
	}
	held, err := lockLease(ctx, tx, id)
	return known, held, err
}
