package api

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/scheduler/internal/placement"
)

// TestWhatACreateKeyIsAnswered walks the states of a key as a gateway sees them, on both transports.
func TestWhatACreateKeyIsAnswered(t *testing.T) {
	t.Parallel()
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, allTokens(), placement.Limits{})
			h.ready(t, "n1", 9)
			h.must(t, scheduler+"Heartbeat", nodeToken, &schedulerv1.HeartbeatRequest{
				NodeId: "n1", ServiceInstanceId: "i1", ClusterId: "c", Capabilities: []string{"create_key"},
				Snapshot: &schedulerv1.NodeSnapshot{Status: schedulerv1.NodeStatus_NODE_STATUS_READY},
			}, &schedulerv1.HeartbeatResponse{})
			ask := func(request, digest string, want outcome) *schedulerv1.ScheduleResponse {
				t.Helper()
				var placed schedulerv1.ScheduleResponse
				got := h.call(t, transport, scheduler+"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{
					TenantId: "t", RequestId: request, CreateKey: "k", CreateDigest: []byte(digest), ReservationTtlMs: 30_000,
				}, &placed)
				if diff := cmp.Diff(want, got); diff != "" {
					t.Fatalf("Schedule(%s) (-want +got):\n%s", request, diff)
				}
				return &placed
			}
			fine := outcome{Code: "ok"}

			first := ask("r1", "d", fine)
			if first.GetState() != schedulerv1.PlacementState_PLACEMENT_STATE_NEW || first.GetSandboxId() == "" || first.GetReservationId() == "" {
				t.Fatalf("Schedule = %v, want NEW with an id", first)
			}
			pending := ask("r2", "d", fine)
			if pending.GetState() != schedulerv1.PlacementState_PLACEMENT_STATE_PENDING || pending.GetReservationId() != "" || pending.GetNode() != nil {
				t.Errorf("Schedule = %v, want PENDING and nothing to act on", pending)
			}
			reused := outcome{"already_exists", "create_key was used for a different request", "key_reused", false}
			ask("r3", "another", reused)

			if _, err := h.db.Exec(t.Context(), "UPDATE reservations SET expires_at = clock_timestamp() - interval '1 second'"); err != nil {
				t.Fatal(err)
			}
			taken := ask("r4", "d", fine)
			if taken.GetState() != schedulerv1.PlacementState_PLACEMENT_STATE_TAKEOVER || taken.GetPlacementId() != first.GetPlacementId() ||
				taken.GetSandboxId() != first.GetSandboxId() || taken.GetHoldMs() != 30_000 || !cmp.Equal(taken.GetNodeCapabilities(), []string{"create_key"}) {
				t.Errorf("Schedule = %v, want TAKEOVER of %v", taken, first)
			}
			h.must(t, scheduler+"RecordAssignment", gatewayToken, &schedulerv1.RecordAssignmentRequest{
				SandboxId: taken.GetSandboxId(), Node: taken.GetNode(), TenantId: "t", ReservationId: taken.GetReservationId(),
				PlacementId: taken.GetPlacementId(), SealedAnswer: []byte("sealed"),
			}, &schedulerv1.RecordAssignmentResponse{})
			done := ask("r5", "d", fine)
			if done.GetState() != schedulerv1.PlacementState_PLACEMENT_STATE_DONE || string(done.GetSealedAnswer()) != "sealed" ||
				!cmp.Equal(done.GetSandboxIds(), []string{first.GetSandboxId()}) || done.GetHoldMs() != 0 {
				t.Errorf("Schedule = %v, want DONE with the id and the answer", done)
			}
			ask("r6", "another", reused)
		})
	}
}
