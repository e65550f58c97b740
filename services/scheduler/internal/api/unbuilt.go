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
