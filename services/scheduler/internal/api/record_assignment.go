package api

import (
	"context"
	"slices"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
)

// RecordAssignment binds sandboxes to their node. Called by gateways; it may repeat.
func (s *Server) RecordAssignment(ctx context.Context, r *schedulerv1.RecordAssignmentRequest) (*schedulerv1.RecordAssignmentResponse, error) {
	assignment, err := s.assignment(r)
	if err != nil {
		return nil, err
	}
	recorded, err := s.Bindings.Record(ctx, assignment)
	if err != nil {
		return nil, err
	}
	out := &schedulerv1.RecordAssignmentResponse{Assigned: make([]*schedulerv1.Assigned, len(recorded))}
	for i, a := range recorded {
		out.Assigned[i] = &schedulerv1.Assigned{
			SandboxId: string(a.Sandbox), Revision: int64(a.Revision), Incarnation: int64(a.Incarnation),
		}
	}
	return out, nil
}

// assignment checks a record before anything is stored.
func (s *Server) assignment(r *schedulerv1.RecordAssignmentRequest) (bindings.Assignment, error) {
	refuse := func(err error) (bindings.Assignment, error) { return bindings.Assignment{}, err }
	switch {
	case blank(r.GetSandboxId()):
		return refuse(sandbox.ErrIDRequired)
	case blank(r.GetNode().GetNodeId()) || blank(r.GetNode().GetEndpoint()):
		return refuse(node.ErrAssignmentRequired)
	case len(r.GetMoreSandboxIds()) >= maxCount:
		return refuse(invalid("more_sandbox_ids has %d ids, at most %d", len(r.GetMoreSandboxIds()), maxCount-1))
	case len(r.GetTokenHashes()) > 0:
		return refuse(invalid("token_hashes is not supported yet"))
	case len(r.GetSealedAnswer()) > maxSealedBytes:
		return refuse(invalid("sealed_answer has %d bytes, at most %d", len(r.GetSealedAnswer()), maxSealedBytes))
	case r.GetExpectedRevision() < 0:
		return refuse(invalid("expected_revision must not be negative"))
	case r.GetPlacementId() < 0:
		return refuse(invalid("placement_id must not be negative"))
	}
	if err := node.CheckTag("tenant_id", r.GetTenantId()); err != nil {
		return refuse(err)
	}
	out := bindings.Assignment{
		Endpoint: r.GetNode().GetEndpoint(), PlacementID: r.GetPlacementId(), Tenant: r.GetTenantId(),
		SealedAnswer: r.GetSealedAnswer(), ExpectedRevision: sandbox.Revision(r.GetExpectedRevision()),
	}
	for _, text := range append([]string{r.GetSandboxId()}, r.GetMoreSandboxIds()...) {
		id, err := sandbox.ParseID(text)
		if err != nil {
			return refuse(err)
		}
		if slices.Contains(out.Sandboxes, id) {
			return refuse(invalid("more_sandbox_ids repeats %s", id))
		}
		out.Sandboxes = append(out.Sandboxes, id)
	}
	var err error
	if out.Node, err = node.ParseID(r.GetNode().GetNodeId()); err != nil {
		return refuse(node.ErrNotListed) // no list has an id like that
	}
	if out.ReservationID, err = reservationID("reservation_id", r.GetReservationId()); err != nil {
		return refuse(err)
	}
	if out.Size, err = resources(r.GetResources()); err != nil {
		return refuse(err)
	}
	if out.Size.CPUMillis == 0 {
		out.Size.CPUMillis = s.DefaultSize.CPUMillis
	}
	if out.Size.MemoryBytes == 0 {
		out.Size.MemoryBytes = s.DefaultSize.MemoryBytes
	}
	return out, nil
}
