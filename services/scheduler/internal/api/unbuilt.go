package api

import (
	"context"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/rpcerr"
)

// ReportSandboxEvent is not served by this build: rosters tell the same, a heartbeat later.
func (s *Server) ReportSandboxEvent(context.Context, *schedulerv1.ReportSandboxEventRequest) (*schedulerv1.ReportSandboxEventResponse, error) {
	return nil, &rpcerr.NotImplemented{RPC: "ReportSandboxEvent"}
}

// ListP2PPeers is not served by this build.
func (s *Server) ListP2PPeers(context.Context, *schedulerv1.ListP2PPeersRequest) (*schedulerv1.ListP2PPeersResponse, error) {
	return nil, &rpcerr.NotImplemented{RPC: "ListP2pPeers"}
}

// RecordP2PArtifact is not served by this build.
func (s *Server) RecordP2PArtifact(context.Context, *schedulerv1.RecordP2PArtifactRequest) (*schedulerv1.RecordP2PArtifactResponse, error) {
	return nil, &rpcerr.NotImplemented{RPC: "RecordP2pArtifact"}
}

// ForgetP2PArtifact is not served by this build.
func (s *Server) ForgetP2PArtifact(context.Context, *schedulerv1.ForgetP2PArtifactRequest) (*schedulerv1.ForgetP2PArtifactResponse, error) {
	return nil, &rpcerr.NotImplemented{RPC: "ForgetP2pArtifact"}
}

// LookupP2PArtifact is not served by this build.
func (s *Server) LookupP2PArtifact(context.Context, *schedulerv1.LookupP2PArtifactRequest) (*schedulerv1.LookupP2PArtifactResponse, error) {
	return nil, &rpcerr.NotImplemented{RPC: "LookupP2pArtifact"}
}
