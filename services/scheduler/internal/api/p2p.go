package api

import (
	"context"
	"strings"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/node"
	"berth/services/scheduler/internal/p2p"
)

// ListP2PPeers returns ready peers by id. Called by nodes; it refuses nothing and changes nothing.
func (s *Server) ListP2PPeers(ctx context.Context, r *schedulerv1.ListP2PPeersRequest) (*schedulerv1.ListP2PPeersResponse, error) {
	w := p2p.Wanted{
		Cluster: strings.TrimSpace(r.GetClusterId()), Backend: strings.TrimSpace(r.GetBackend()), Exclude: excluded(r.GetExcludeNodeId()),
	}
	if node.CheckTag("cluster_id", w.Cluster) != nil || node.CheckTag("backend", w.Backend) != nil {
		return &schedulerv1.ListP2PPeersResponse{}, nil //nolint:nilerr // nobody can be in it
	}
	peers, err := s.P2P.Peers(ctx, w)
	if err != nil {
		return nil, err
	}
	return &schedulerv1.ListP2PPeersResponse{Peers: peersOf(peers)}, nil
}

// RecordP2PArtifact adds a holder of an artifact. Called by nodes; it may repeat.
func (s *Server) RecordP2PArtifact(ctx context.Context, r *schedulerv1.RecordP2PArtifactRequest) (*schedulerv1.RecordP2PArtifactResponse, error) {
	a, err := heldArtifact(r)
	if err != nil {
		return nil, err
	}
	id, err := node.ParseID(r.GetNodeId())
	if err != nil {
		return nil, node.ErrNotListed // no list has an id like that
	}
	if err := s.P2P.Record(ctx, a, id); err != nil {
		return nil, err
	}
	return &schedulerv1.RecordP2PArtifactResponse{}, nil
}

// ForgetP2PArtifact removes a holder of an artifact. Called by nodes; it may repeat.
func (s *Server) ForgetP2PArtifact(ctx context.Context, r *schedulerv1.ForgetP2PArtifactRequest) (*schedulerv1.ForgetP2PArtifactResponse, error) {
	a, err := heldArtifact(r)
	if err != nil {
		return nil, err
	}
	id, err := node.ParseID(r.GetNodeId())
	if err != nil {
		return &schedulerv1.ForgetP2PArtifactResponse{}, nil //nolint:nilerr // no node has it, so there is nothing to forget
	}
	if err := s.P2P.Forget(ctx, a, id); err != nil {
		return nil, err
	}
	return &schedulerv1.ForgetP2PArtifactResponse{}, nil
}

// LookupP2PArtifact returns ready holders of an artifact, in an order drawn by lot; one that nobody
// recorded has none. Called by nodes; it may repeat.
func (s *Server) LookupP2PArtifact(ctx context.Context, r *schedulerv1.LookupP2PArtifactRequest) (*schedulerv1.LookupP2PArtifactResponse, error) {
	if blank(r.GetClusterId()) || blank(r.GetBackend()) || blank(r.GetKey()) {
		return nil, invalid("cluster_id, backend, and key are required")
	}
	a, err := artifact(r)
	if err != nil {
		return nil, err
	}
	peers, err := s.P2P.Lookup(ctx, a, excluded(r.GetExcludeNodeId()))
	if err != nil {
		return nil, err
	}
	return &schedulerv1.LookupP2PArtifactResponse{Peers: peersOf(peers)}, nil
}
