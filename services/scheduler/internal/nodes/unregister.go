package nodes

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
)

const endLeaseSQL = `
UPDATE  node_leases
SET     ended_at = clock_timestamp(), expires_at = clock_timestamp()
WHERE   node_id = @node`

// Unregister ends the lease of a node, parks what is bound to it and forgets what its store holds; the
// next roster that lists a parked sandbox, of this or another node, brings it back. It may repeat. Errors:
// node.ErrInstanceMismatch when another instance has the lease and has not ended it.
func (n *Nodes) Unregister(ctx context.Context, id node.ID, instance string) error {
	var (
		parked int
		events []bindings.Event
	)
	err := n.db.Tx(ctx, func(tx pgx.Tx) error {
		parked, events = 0, nil
		if err := n.lock(ctx, tx, id); err != nil {
			return err
		}
		held, err := lockLease(ctx, tx, id)
		switch {
		case err != nil:
			return err
		case held == nil:
		case held.EndedAt != nil:
			return nil
		case held.ServiceInstanceID != instance:
			return node.ErrInstanceMismatch
		}
		if _, err := tx.Exec(ctx, endLeaseSQL, pgx.StrictNamedArgs{"node": id}); err != nil {
			return fmt.Errorf("end the lease: %w", err)
		}
		if err := forgetPeers(ctx, tx, id); err != nil {
			return err
		}
		if held != nil {
			events = []bindings.Event{{
				Kind: bindings.KindUnregistered, Node: id, Instance: instance,
				Detail: map[string]any{"epoch": held.Epoch},
			}}
		}
		if parked, err = bindings.ParkNode(ctx, tx, id); err != nil {
			return err
		}
		return bindings.Note(ctx, tx, events...)
	})
	if err != nil {
		n.store.Failed("unregister", err)
		return fmt.Errorf("unregister %s: %w", id, err)
	}
	n.rosters.forget(id)
	n.routes.Count(events...)
	n.routes.CountMany(bindings.KindParked, bindings.Effect(sandbox.EndedByUnregister), parked)
	if parked > 0 {
		n.routes.Doorbell().Ring()
	}
	return nil
}
