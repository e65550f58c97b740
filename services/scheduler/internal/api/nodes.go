package api

import (
	"context"
	"strings"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/node"
)

// ListNodes returns all present nodes by id. Anybody may call it; it changes nothing.
func (s *Server) ListNodes(ctx context.Context, r *schedulerv1.ListNodesRequest) (*schedulerv1.ListNodesResponse, error) {
	cluster, possible := clusterOf(r)
	if !possible {
		return &schedulerv1.ListNodesResponse{}, nil
	}
	members, err := s.Nodes.ListPresent(ctx, cluster)
	if err != nil {
		return nil, err
	}
	out := &schedulerv1.ListNodesResponse{Nodes: make([]*schedulerv1.Node, len(members))}
	for i, m := range members {
		out.Nodes[i] = &schedulerv1.Node{NodeId: string(m.ID), Endpoint: m.Endpoint}
	}
	return out, nil
}

// ListObservedNodes returns the nodes that were heard, by id. Anybody may call it; it changes nothing.
func (s *Server) ListObservedNodes(ctx context.Context, r *schedulerv1.ListObservedNodesRequest) (*schedulerv1.ListObservedNodesResponse, error) {
	cluster, possible := clusterOf(r)
	if !possible {
		return &schedulerv1.ListObservedNodesResponse{}, nil
	}
	all, err := s.Nodes.ListObserved(ctx, cluster)
	if err != nil {
		return nil, err
	}
	held, err := s.Placer.Held(ctx, "")
	if err != nil {
		return nil, err
	}
	out := &schedulerv1.ListObservedNodesResponse{Nodes: make([]*schedulerv1.ObservedNode, len(all))}
	for i := range all {
		out.Nodes[i] = observed(&all[i], held[all[i].ID])
	}
	return out, nil
}

// GetNode returns one observed node. Anybody may call it; it changes nothing.
func (s *Server) GetNode(ctx context.Context, r *schedulerv1.GetNodeRequest) (*schedulerv1.GetNodeResponse, error) {
	if blank(r.GetNodeId()) {
		return nil, node.ErrIDRequired
	}
	id, err := node.ParseID(r.GetNodeId())
	if err != nil {
		return nil, node.ErrNotObserved // nobody can have it
	}
	cluster, possible := clusterOf(r)
	if !possible {
		return nil, node.ErrNotObserved
	}
	found, err := s.Nodes.Get(ctx, id, cluster)
	if err != nil {
		return nil, err
	}
	held, err := s.Placer.Held(ctx, id)
	if err != nil {
		return nil, err
	}
	return &schedulerv1.GetNodeResponse{Node: observed(&found, held[id])}, nil
}

// UnregisterNode ends a node's lease. Called by nodes; it may repeat.
func (s *Server) UnregisterNode(ctx context.Context, r *schedulerv1.UnregisterNodeRequest) (*schedulerv1.UnregisterNodeResponse, error) {
	if blank(r.GetNodeId()) || blank(r.GetServiceInstanceId()) {
		return nil, node.ErrInstanceRequired
	}
	id, err := node.ParseID(r.GetNodeId())
	if err != nil {
		return &schedulerv1.UnregisterNodeResponse{}, nil //nolint:nilerr // no node has it, so there is nothing to end
	}
	if err := node.CheckTag("service_instance_id", r.GetServiceInstanceId()); err != nil {
		return nil, err
	}
	if err := s.Nodes.Unregister(ctx, id, r.GetServiceInstanceId()); err != nil {
		return nil, err
	}
	return &schedulerv1.UnregisterNodeResponse{}, nil
}

// clusterOf returns the cluster that is asked for, trimmed, and whether any node can be in it: these calls
// refuse nothing, and the database would refuse some texts.
func clusterOf(r interface{ GetClusterId() string }) (cluster string, possible bool) {
	cluster = strings.TrimSpace(r.GetClusterId())
	return cluster, node.CheckTag("cluster_id", cluster) == nil
}
