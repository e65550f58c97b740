package bindings

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

const lookupSandboxSQL = `
SELECT  b.node_id, n.endpoint, b.revision, b.incarnation, n.present,
        n.lingering OR n.cordoned OR n.drain_id IS NOT NULL AS leaving,
        COALESCE(l.ended_at IS NULL AND l.expires_at > clock_timestamp(), false) AS lease_held,
        COALESCE(l.reported_status, 0) AS reported
FROM    bindings AS b
JOIN    nodes AS n ON n.node_id = b.node_id
LEFT JOIN node_leases AS l ON l.node_id = b.node_id
WHERE   b.sandbox_id = @id AND b.state = 'bound'`

// Lookup returns the node of a bound sandbox. One that is unknown, parked or gone is
// sandbox.ErrNotFound.
func (b *Bindings) Lookup(ctx context.Context, id sandbox.ID) (Found, error) {
	var (
		found    Found
		standing node.Standing
	)
	err := b.db.QueryRow(ctx, lookupSandboxSQL, pgx.StrictNamedArgs{"id": id}).Scan(
		&found.Node, &found.Endpoint, &found.Revision, &found.Incarnation,
		&standing.Present, &standing.Leaving, &standing.LeaseHeld, &standing.Reported)
	if errors.Is(err, pgx.ErrNoRows) {
		return Found{}, sandbox.ErrNotFound
	}
	if err != nil {
		return Found{}, fmt.Errorf("look up %s: %w", id, err)
	}
	found.Status = standing.Effective()
	return found, nil
}
