// Package adminapi serves admin.v1: what operators ask. It runs behind the interceptor of api, which
// lets operators through only.
package adminapi

import (
	"context"
	"fmt"
	"net/http"

	"github.com/twitchtv/twirp"

	adminv1 "berth/rpc/admin/v1"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/placement"
)

const (
	defaultPage = 100
	maxPage     = 1000
)

// Placements is the service of that name.
type Placements struct{ placer *placement.Placer }

// New returns the service.
func New(placer *placement.Placer) *Placements { return &Placements{placer} }

// Twirp returns the service's path and its handler behind intercept.
func (p *Placements) Twirp(intercept twirp.Interceptor) (prefix string, handler http.Handler) {
	server := adminv1.NewPlacementsServer(p, twirp.WithServerInterceptors(intercept))
	return server.PathPrefix(), server
}

// ExplainPlacement returns one placement with its refusals. Called by operators; it changes nothing.
func (p *Placements) ExplainPlacement(ctx context.Context, r *adminv1.ExplainPlacementRequest) (*adminv1.ExplainPlacementResponse, error) {
	if r.GetPlacementId() <= 0 && r.GetRequestId() == "" && r.GetSandboxId() == "" {
		return nil, &rpcerr.Invalid{Text: "placement_id, request_id or sandbox_id is required"}
	}
	question := placement.Question{PlacementID: max(r.GetPlacementId(), 0), Tenant: r.GetTenantId(), RequestID: r.GetRequestId()}
	if question.PlacementID == 0 && question.RequestID == "" {
		id, err := sandbox.ParseID(r.GetSandboxId())
		if err != nil {
			return nil, err
		}
		question.Sandbox = id
	}
	for _, t := range []struct{ field, value string }{{"tenant_id", question.Tenant}, {"request_id", question.RequestID}} {
		if err := node.CheckText(t.field, t.value); err != nil {
			return nil, err
		}
	}
	found, err := p.placer.Explain(ctx, question)
	if err != nil {
		return nil, err
	}
	return &adminv1.ExplainPlacementResponse{Placement: toWire(&found)}, nil
}

// ListPlacements returns placements, newest first. Called by operators; it changes nothing.
func (p *Placements) ListPlacements(ctx context.Context, r *adminv1.ListPlacementsRequest) (*adminv1.ListPlacementsResponse, error) {
	page := placement.Page{Tenant: r.GetTenantId(), Limit: int(r.GetLimit()), Before: r.GetBeforePlacementId()}
	if page.Limit == 0 {
		page.Limit = defaultPage
	}
	if page.Limit > maxPage || page.Before < 0 {
		return nil, &rpcerr.Invalid{Text: fmt.Sprintf("limit must be 1 to %d, and before_placement_id not negative", maxPage)}
	}
	switch outcome := placement.Outcome(r.GetOutcome()); outcome {
	case "", placement.Reserved, placement.Recorded, placement.Released, placement.Expired, placement.Rejected:
		page.Outcome = outcome
	default:
		return nil, &rpcerr.Invalid{Text: "outcome must be reserved, confirmed, released, expired or refused"}
	}
	if r.GetNodeId() != "" {
		id, err := node.ParseID(r.GetNodeId())
		if err != nil {
			return nil, err
		}
		page.Node = id
	}
	if err := node.CheckText("tenant_id", page.Tenant); err != nil {
		return nil, err
	}
	found, err := p.placer.List(ctx, page)
	if err != nil {
		return nil, err
	}
	out := &adminv1.ListPlacementsResponse{Placements: make([]*adminv1.Placement, len(found))}
	for i := range found {
		out.Placements[i] = toWire(&found[i])
	}
	return out, nil
}

func toWire(d *placement.Decision) *adminv1.Placement {
	out := &adminv1.Placement{
		PlacementId: d.PlacementID, TenantId: d.TenantID, RequestId: deref(d.RequestID), ClusterId: d.ClusterID,
		Outcome: string(d.Outcome), Refusal: deref(d.Refusal), Tries: uint32(d.Tries), Count: uint32(d.Count),
		ReservationId: deref(d.ReservationID), CpuMillis: d.CPUMillis, MemoryBytes: d.MemoryBytes, Strategy: string(d.Strategy),
		Reasons: make(map[string]uint32, len(d.Reasons)), CreatedUnixMs: d.CreatedAt.UnixMilli(), ChangedUnixMs: d.ChangedAt.UnixMilli(),
	}
	if d.NodeID != nil {
		out.NodeId = string(*d.NodeID)
	}
	for _, id := range d.SandboxIDs {
		out.SandboxIds = append(out.SandboxIds, string(id))
	}
	for reason, nodes := range d.Reasons {
		out.Reasons[string(reason)] = uint32(nodes)
	}
	for _, c := range d.Candidates {
		out.Candidates = append(out.Candidates, &adminv1.Candidate{
			NodeId: string(c.Node), Verdict: c.Verdict, Reason: string(c.Reason), Value: c.Value, Limit: c.Limit, Score: c.Score,
		})
	}
	return out
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
