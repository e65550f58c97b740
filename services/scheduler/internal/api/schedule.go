package api

import (
	"context"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/node"
	"berth/services/scheduler/internal/placement"
)

// Schedule finds a node. Called by gateways; with a request_id a second call returns the same placement,
// with a create_key any call of the tenant learns what became of the one create it stands for.
func (s *Server) Schedule(ctx context.Context, r *schedulerv1.ScheduleRequest) (*schedulerv1.ScheduleResponse, error) {
	ours := hasBerthField(r.ProtoReflect())
	if r.GetHint() == nil && !ours {
		id, endpoint, err := s.Placer.Pick(ctx)
		if err != nil {
			return nil, err
		}
		return &schedulerv1.ScheduleResponse{Node: &schedulerv1.Node{NodeId: string(id), Endpoint: endpoint}}, nil
	}
	request, err := s.create(r, ours)
	if err != nil {
		return nil, err
	}
	placed, err := s.Placer.Schedule(ctx, request)
	if err != nil {
		return nil, err
	}
	if placed.State == placement.KeyPending {
		return &schedulerv1.ScheduleResponse{State: schedulerv1.PlacementState_PLACEMENT_STATE_PENDING}, nil
	}
	out := &schedulerv1.ScheduleResponse{Node: &schedulerv1.Node{NodeId: string(placed.Node), Endpoint: placed.Endpoint}}
	if !ours {
		return out, nil
	}
	out.State, out.SealedAnswer = stateOf(placed.State), placed.SealedAnswer
	out.PlacementId, out.ReservationId, out.HoldMs = placed.ID, placed.Reservation, uint32(placed.Hold.Milliseconds())
	out.NodeCapabilities = placed.Capabilities
	if len(placed.SandboxIDs) > 0 {
		out.SandboxId = string(placed.SandboxIDs[0])
	}
	if len(placed.SandboxIDs) > 1 || placed.State == placement.KeyDone {
		out.SandboxIds = make([]string, len(placed.SandboxIDs))
		for i, id := range placed.SandboxIDs {
			out.SandboxIds[i] = string(id)
		}
	}
	return out, nil
}

// create checks a create before anything is stored.
func (s *Server) create(r *schedulerv1.ScheduleRequest, ours bool) (placement.Request, error) {
	refuse := func(err error) (placement.Request, error) { return placement.Request{}, err }
	switch {
	case (r.GetCreateKey() == "") != (len(r.GetCreateDigest()) == 0):
		return refuse(invalid("create_key and create_digest go together"))
	case len(r.GetCreateDigest()) > maxDigestBytes:
		return refuse(invalid("create_digest has %d bytes, at most %d", len(r.GetCreateDigest()), maxDigestBytes))
	}
	if err := text("create_key", r.GetCreateKey(), maxKeyBytes); err != nil {
		return refuse(err)
	}
	if err := text("request_id", r.GetRequestId(), maxKeyBytes); err != nil {
		return refuse(err)
	}
	if err := node.CheckTag("tenant_id", r.GetTenantId()); err != nil {
		return refuse(err)
	}
	if err := node.CheckTag("cluster_id", r.GetClusterId()); err != nil {
		return refuse(err)
	}
	if r.GetCount() > maxCount {
		return refuse(invalid("count must be 1 to %d, not %d", maxCount, r.GetCount()))
	}
	if len(r.GetExcludeNodeIds()) > maxExcluded {
		return refuse(invalid("exclude_node_ids has %d ids, at most %d", len(r.GetExcludeNodeIds()), maxExcluded))
	}
	if err := text("sandbox.name", r.GetSandbox().GetName(), maxKeyBytes); err != nil {
		return refuse(err)
	}
	if r.GetSandbox().GetIdleAfterMs() < 0 {
		return refuse(invalid("sandbox.idle_after_ms must not be negative"))
	}
	out := placement.Request{
		Tenant: r.GetTenantId(), RequestID: r.GetRequestId(), CreateKey: r.GetCreateKey(), Digest: r.GetCreateDigest(), Cluster: r.GetClusterId(), Count: int(max(r.GetCount(), 1)),
		Named: ours, DryRun: r.GetDryRun(), Managed: r.GetSandbox() != nil,
	}
	var err error
	if out.Size, err = sizeOf(r, s.DefaultSize); err != nil {
		return refuse(err)
	}
	if out.TTL, err = hold("reservation_ttl_ms", r.GetReservationTtlMs()); err != nil {
		return refuse(err)
	}
	if out.Replaces, err = reservationID("replace_reservation_id", r.GetReplaceReservationId()); err != nil {
		return refuse(err)
	}
	if out.Constraints, err = constraints(r.GetConstraints()); err != nil {
		return refuse(err)
	}
	for _, excluded := range r.GetExcludeNodeIds() {
		id, err := node.ParseID(excluded)
		if err != nil {
			return refuse(err)
		}
		out.Exclude = append(out.Exclude, id)
	}
	if out.RequestID != "" {
		if out.Fingerprint, err = fingerprint(r); err != nil {
			return refuse(err)
		}
	}
	return out, nil
}

// stateOf is what a create key stands for, on the wire; without a key there is no state.
func stateOf(s placement.State) schedulerv1.PlacementState {
	switch s {
	case placement.KeyNew:
		return schedulerv1.PlacementState_PLACEMENT_STATE_NEW
	case placement.KeyPending:
		return schedulerv1.PlacementState_PLACEMENT_STATE_PENDING
	case placement.KeyDone:
		return schedulerv1.PlacementState_PLACEMENT_STATE_DONE
	case placement.KeyTakeover:
		return schedulerv1.PlacementState_PLACEMENT_STATE_TAKEOVER
	}
	return schedulerv1.PlacementState_PLACEMENT_STATE_UNSPECIFIED
}
