package adminapi

import (
	"log/slog"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"berth/migrations"
	"berth/pkg/pgtest"
	adminv1 "berth/rpc/admin/v1"
	"berth/services/scheduler/internal/placement"
)

// TestAnOperatorSeesAllThatARowSays compares each field of the answers with rows that have something in each column.
func TestAnOperatorSeesAllThatARowSays(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	const at, reservation = 1_700_000_000_000, "019a7c2e-3b5d-7f10-8a44-0c2d9e6f1b23"
	for _, sql := range []string{
		`INSERT INTO placements (tenant_id, request_id, fingerprint, count, cluster_id, outcome, tries, node_id, reservation_id, sandbox_ids, cpu_millis, memory_bytes,
		        strategy, reasons, candidates, created_at, changed_at)
		 VALUES ('t', 'r', '\x01', 2, 'c', 'confirmed', 3, 'n', '` + reservation + `', '{s1,s2}', 1500, 512, 'best_of_k', '{"unhealthy": 2}',
		        '[{"node": "m", "verdict": "refused", "reason": "max_sandbox_count", "value": 51, "limit": 50}, {"node": "n", "verdict": "chosen", "score": 0.25}]',
		        to_timestamp(1700000000), to_timestamp(1700000001))`,
		`INSERT INTO placements (tenant_id, outcome, refusal, cpu_millis, memory_bytes, strategy, created_at, changed_at)
		 VALUES ('t', 'refused', 'no_ready_node', 1, 2, 'random', to_timestamp(1700000000), to_timestamp(1700000000))`,
		`INSERT INTO bindings (sandbox_id, state, node_id, origin, placement_id, ended_at, ended_by) VALUES ('s2', 'gone', 'n', 'recorded', 1, now(), 'roster')`,
	} {
		if _, err := db.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	service := New(placement.New(db.As(t, "berth_scheduler"), placement.DefaultConfig(), slog.New(slog.DiscardHandler), nil))
	placed := &adminv1.Placement{
		PlacementId: 1, TenantId: "t", RequestId: "r", ClusterId: "c", Outcome: "confirmed", Tries: 3, Count: 2, NodeId: "n", ReservationId: reservation,
		SandboxIds: []string{"s1", "s2"}, CpuMillis: 1500, MemoryBytes: 512, Strategy: "best_of_k", Reasons: map[string]uint32{"unhealthy": 2},
		Candidates: []*adminv1.Candidate{
			{NodeId: "m", Verdict: "refused", Reason: "max_sandbox_count", Value: 51, Limit: 50}, {NodeId: "n", Verdict: "chosen", Score: 0.25},
		},
		CreatedUnixMs: at, ChangedUnixMs: at + time.Second.Milliseconds(),
	}
	refused := &adminv1.Placement{
		PlacementId: 2, TenantId: "t", Outcome: "refused", Refusal: "no_ready_node", Tries: 1, Count: 1, CpuMillis: 1, MemoryBytes: 2, Strategy: "random",
		CreatedUnixMs: at, ChangedUnixMs: at,
	}
	for name, ask := range map[string]*adminv1.ExplainPlacementRequest{
		"by id": {PlacementId: 1}, "by request": {TenantId: "t", RequestId: "r"}, "by its second sandbox, which is gone": {SandboxId: "s2"},
	} {
		answer, err := service.ExplainPlacement(t.Context(), ask)
		if err != nil {
			t.Fatalf("%s: ExplainPlacement = %v", name, err)
		}
		if diff := cmp.Diff(placed, answer.GetPlacement(), protocmp.Transform()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	for name, tt := range map[string]struct {
		ask  *adminv1.ListPlacementsRequest
		want []*adminv1.Placement
	}{
		"all, newest first":     {&adminv1.ListPlacementsRequest{}, []*adminv1.Placement{refused, placed}},
		"a page of one":         {&adminv1.ListPlacementsRequest{Limit: 1}, []*adminv1.Placement{refused}},
		"the page after it":     {&adminv1.ListPlacementsRequest{Limit: 1, BeforePlacementId: 2}, []*adminv1.Placement{placed}},
		"of a node":             {&adminv1.ListPlacementsRequest{NodeId: "n"}, []*adminv1.Placement{placed}},
		"by outcome and tenant": {&adminv1.ListPlacementsRequest{TenantId: "t", Outcome: "refused"}, []*adminv1.Placement{refused}},
		"of another tenant":     {&adminv1.ListPlacementsRequest{TenantId: "u"}, nil},
	} {
		answer, err := service.ListPlacements(t.Context(), tt.ask)
		if err != nil {
			t.Fatalf("%s: ListPlacements = %v", name, err)
		}
		if diff := cmp.Diff(&adminv1.ListPlacementsResponse{Placements: tt.want}, answer, protocmp.Transform()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
