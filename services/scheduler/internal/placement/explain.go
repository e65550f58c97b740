package placement

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// Decision is one placement as it is kept, with the reasons for it.
type Decision struct {
	PlacementID   int64
	TenantID      string
	RequestID     *string
	ClusterID     string
	Outcome       Outcome
	Refusal       *string
	Tries         int
	Count         int
	NodeID        *node.ID
	ReservationID *string
	SandboxIDs    []sandbox.ID `db:"sandbox_ids"`
	CPUMillis     int64        `db:"cpu_millis"` // of each sandbox, as is MemoryBytes
	MemoryBytes   int64
	Strategy      Strategy
	Reasons       map[Reason]int
	Candidates    []Candidate
	CreatedAt     time.Time
	ChangedAt     time.Time
}

// Question names one placement: by its id, by tenant and request id, or by a sandbox it made; the first
// that is given counts.
type Question struct {
	PlacementID int64
	Tenant      string
	RequestID   string
	Sandbox     sandbox.ID
}

const selectDecisionSQL = `
SELECT  p.placement_id, p.tenant_id, p.request_id, p.cluster_id, p.outcome, p.refusal, p.tries, p.count, p.node_id,
        p.reservation_id::text AS reservation_id, p.sandbox_ids, p.cpu_millis, p.memory_bytes, p.strategy, p.reasons, p.candidates,
        p.created_at, p.changed_at
FROM    placements AS p
WHERE   p.placement_id = (CASE
        WHEN @placement::bigint <> 0 THEN @placement
        WHEN @request::text <> '' THEN (SELECT placement_id FROM placements WHERE tenant_id = @tenant::text AND request_id = @request)
        ELSE COALESCE((SELECT placement_id FROM bindings WHERE sandbox_id = @sandbox::text),
                      (SELECT placement_id FROM reservations WHERE sandbox_id = @sandbox)) END)`

// Explain returns one placement. The error is node.ErrNoPlacement where there is none, or none any more.
func (p *Placer) Explain(ctx context.Context, q Question) (Decision, error) {
	rows, err := p.db.Query(ctx, selectDecisionSQL, pgx.StrictNamedArgs{
		"placement": q.PlacementID, "tenant": q.Tenant, "request": q.RequestID, "sandbox": q.Sandbox,
	})
	if err != nil {
		return Decision{}, fmt.Errorf("explain a placement: %w", err)
	}
	decision, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Decision])
	if errors.Is(err, pgx.ErrNoRows) {
		return Decision{}, node.ErrNoPlacement
	}
	if err != nil {
		return Decision{}, fmt.Errorf("explain a placement: %w", err)
	}
	return decision, nil
}

// Page says which placements to list, newest first. What is zero does not narrow.
type Page struct {
	Tenant  string
	Outcome Outcome
	Node    node.ID
	Limit   int   // from 1
	Before  int64 // placements with a lower id
}

const listDecisionsSQL = `
SELECT  p.placement_id, p.tenant_id, p.request_id, p.cluster_id, p.outcome, p.refusal, p.tries, p.count, p.node_id,
        p.reservation_id::text AS reservation_id, p.sandbox_ids, p.cpu_millis, p.memory_bytes, p.strategy, p.reasons, p.candidates,
        p.created_at, p.changed_at
FROM    placements AS p
WHERE   (@tenant::text = '' OR p.tenant_id = @tenant)
AND     (@outcome::text = '' OR p.outcome = @outcome)
AND     (@node::text = '' OR p.node_id = @node)
AND     (@before::bigint = 0 OR p.placement_id < @before)
ORDER   BY p.placement_id DESC
LIMIT   @limit`

// List returns placements, newest first.
func (p *Placer) List(ctx context.Context, page Page) ([]Decision, error) {
	rows, err := p.db.Query(ctx, listDecisionsSQL, pgx.StrictNamedArgs{
		"tenant": page.Tenant, "outcome": page.Outcome, "node": page.Node, "before": page.Before, "limit": page.Limit,
	})
	if err != nil {
		return nil, fmt.Errorf("list placements: %w", err)
	}
	decisions, err := pgx.CollectRows(rows, pgx.RowToStructByName[Decision])
	if err != nil {
		return nil, fmt.Errorf("list placements: %w", err)
	}
	return decisions, nil
}
