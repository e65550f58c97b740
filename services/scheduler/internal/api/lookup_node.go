package api

import (
	"context"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/sandbox"
)

// LookupNode returns the node of a bound sandbox. Called by AgentENV's gateways; it changes nothing.
func (s *Server) LookupNode(ctx context.Context, r *schedulerv1.LookupNodeRequest) (*schedulerv1.LookupNodeResponse, error) {
	if blank(r.GetSandboxId()) {
		return nil, sandbox.ErrIDRequired
	}
	id, err := sandbox.ParseID(r.GetSandboxId())
	if err != nil {
		return nil, sandbox.ErrNotFound // nobody can have it
	}
	lookup := s.QueryOnly
	if lookup == nil {
		lookup = s.Bindings
	}
	found, err := lookup.Lookup(ctx, id)
	if err != nil {
		return nil, err
	}
	return &schedulerv1.LookupNodeResponse{
		Node:     &schedulerv1.Node{NodeId: string(found.Node), Endpoint: found.Endpoint},
		Revision: int64(found.Revision), Incarnation: int64(found.Incarnation), NodeStatus: schedulerv1.NodeStatus(found.Status),
	}, nil
}
