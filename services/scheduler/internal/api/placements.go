package api

import (
	"context"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/placement"
)

// ExtendPlacement lets an open reservation hold longer. Called by gateways while a create takes its
// time; a second call extends again.
func (s *Server) ExtendPlacement(ctx context.Context, r *schedulerv1.ExtendPlacementRequest) (*schedulerv1.ExtendPlacementResponse, error) {
	ttl, err := hold("ttl_ms", r.GetTtlMs())
	if err != nil {
		return nil, err
	}
	if ttl == 0 {
		return nil, invalid("ttl_ms must be 1 to %d", maxHold.Milliseconds())
	}
	reservation, err := reservationID("reservation_id", r.GetReservationId())
	if err != nil {
		return nil, err
	}
	if reservation == "" || r.GetPlacementId() <= 0 {
		return nil, node.ErrNotOpen
	}
	if err := s.Placer.Extend(ctx, r.GetPlacementId(), reservation, ttl); err != nil {
		return nil, err
	}
	return &schedulerv1.ExtendPlacementResponse{HoldMs: r.GetTtlMs()}, nil
}

// ReleasePlacement gives an open reservation's room back. Called by gateways; a second call answers
// false.
func (s *Server) ReleasePlacement(ctx context.Context, r *schedulerv1.ReleasePlacementRequest) (*schedulerv1.ReleasePlacementResponse, error) {
	reservation, err := reservationID("reservation_id", r.GetReservationId())
	if err != nil {
		return nil, err
	}
	reason, err := releaseReason(r.GetReason())
	if err != nil {
		return nil, err
	}
	if reservation == "" || r.GetPlacementId() <= 0 {
		return &schedulerv1.ReleasePlacementResponse{}, nil
	}
	released, err := s.Placer.Release(ctx, r.GetPlacementId(), reservation, reason)
	if err != nil {
		return nil, err
	}
	return &schedulerv1.ReleasePlacementResponse{Released: released}, nil
}

func releaseReason(r schedulerv1.ReleaseReason) (string, error) {
	switch r {
	case schedulerv1.ReleaseReason_RELEASE_REASON_NODE_FULL:
		return placement.NodeFull, nil
	case schedulerv1.ReleaseReason_RELEASE_REASON_DIAL_FAILED:
		return placement.DialFailed, nil
	case schedulerv1.ReleaseReason_RELEASE_REASON_NODE_ERROR:
		return placement.NodeError, nil
	case schedulerv1.ReleaseReason_RELEASE_REASON_CANCELED, schedulerv1.ReleaseReason_RELEASE_REASON_UNSPECIFIED:
		return placement.Canceled, nil
	}
	return "", invalid("reason %d is not known", r)
}

// ReleaseSandbox ends the binding of a sandbox that was deleted. Called by gateways; a second call is
// answered like the first.
func (s *Server) ReleaseSandbox(ctx context.Context, r *schedulerv1.ReleaseSandboxRequest) (*schedulerv1.ReleaseSandboxResponse, error) {
	if blank(r.GetSandboxId()) {
		return nil, sandbox.ErrIDRequired
	}
	id, err := sandbox.ParseID(r.GetSandboxId())
	if err != nil {
		return nil, err
	}
	if r.GetRevision() < 0 {
		return nil, invalid("revision must not be negative")
	}
	revision, err := s.Bindings.Release(ctx, id, sandbox.Revision(r.GetRevision()))
	if err != nil {
		return nil, err
	}
	return &schedulerv1.ReleaseSandboxResponse{Revision: int64(revision)}, nil
}
