package api

import (
	"context"
	"log/slog"

	schedulerv1 "berth/rpc/scheduler/v1"
)

// Heartbeat renews a node's lease. Called by nodes; it may repeat. Ids that are no sandbox ids fail
// nothing: an AgentENV node may have made them.
func (s *Server) Heartbeat(ctx context.Context, r *schedulerv1.HeartbeatRequest) (*schedulerv1.HeartbeatResponse, error) {
	beat, skipped, err := beatOf(r, callerOf(ctx).address)
	if err != nil {
		return nil, err
	}
	if len(skipped) > 0 {
		s.Log.DebugContext(ctx, "ids of a roster are no sandbox ids", slog.Any("node", beat.Node), slog.Int("skipped", len(skipped)))
	}
	beat.MayRegister = s.Register && s.Tokens.may(ctx, Node)
	answer, err := s.Nodes.Heartbeat(ctx, beat)
	if err != nil {
		return nil, err
	}
	out := &schedulerv1.HeartbeatResponse{
		CpuConfigJson: answer.CPUConfigJSON,
		LeaseTtlMs:    uint32(answer.LeaseTTL.Milliseconds()), NextHeartbeatMs: uint32(answer.NextHeartbeat.Milliseconds()),
		SendFullRoster: answer.SendFullRoster, Epoch: answer.Epoch, Cordoned: answer.Cordoned, Draining: answer.Draining,
		OrphanSandboxIds: make([]string, len(answer.Orphans)),
	}
	for i, id := range answer.Orphans {
		out.OrphanSandboxIds[i] = string(id)
	}
	return out, nil
}
