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

const endLeaseSQL = `
UPDATE  node_leases
SET     ended_at = clock_timestamp(), expires_at = clock_timestamp()
WHERE   node_id = @node`

// Unregister ends the lease of a node, parks what is bound to it and forgets what its store holds; the
// next roster that lists a parked sandbox, of this or another node, brings it back. It may repeat. Errors:
// node.ErrInstanceMismatch when another instance has the lease and has not ended it.
func (n *Nodes) Unregister(ctx context.Context, id node.ID, instance string) error {
	var parked bool
	err := n.db.Tx(ctx, func(tx pgx.Tx) error {
		parked = false
		if err := pgdb.Lock(ctx, tx, advisory.Node(id)); err != nil {
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
		parked, err = bindings.ParkNode(ctx, tx, id)
		return err
	})
	if err != nil {
		return fmt.Errorf("unregister %s: %w", id, err)
	}
	n.rosters.forget(id)
	if parked {
		n.routes.Doorbell().Ring()
	}
	return nil
}
