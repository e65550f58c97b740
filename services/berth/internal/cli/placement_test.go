package cli_test

import (
	"context"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	adminv1 "berth/rpc/admin/v1"
)

// explained is a scheduler that knows one placement, one refusal by a quota, and what it was asked last.
type explained struct {
	adminv1.Placements
	asked chan *adminv1.ExplainPlacementRequest
}

func (e *explained) ExplainPlacement(_ context.Context, r *adminv1.ExplainPlacementRequest) (*adminv1.ExplainPlacementResponse, error) {
	e.asked <- r
	p := &adminv1.Placement{
		PlacementId: 42, TenantId: "t", RequestId: "r", Outcome: "confirmed", Tries: 2, Count: 1, NodeId: "good", SandboxIds: []string{"s"},
		CpuMillis: 1500, MemoryBytes: 512 << 20, Strategy: "best_of_k", Reasons: map[string]uint32{"unhealthy": 2, "declared_sandboxes": 1},
		Candidates: []*adminv1.Candidate{
			{NodeId: "full", Verdict: "refused", Reason: "declared_sandboxes", Value: 3, Limit: 2},
			{NodeId: "gone", Verdict: "refused", Reason: "unhealthy"},
			{NodeId: "near", Verdict: "passed", Score: 0.51},
			{NodeId: "good", Verdict: "chosen", Score: 0.25},
		},
	}
	if r.GetPlacementId() == 43 {
		p = &adminv1.Placement{PlacementId: 43, TenantId: "t", Outcome: "refused", Refusal: "quota", Candidates: []*adminv1.Candidate{
			{Verdict: "refused", Reason: "quota_sandboxes", Value: 3, Limit: 2},
		}}
	}
	return &adminv1.ExplainPlacementResponse{Placement: p}, nil
}

func TestAPlacementIsExplainedWithCandidatesRefusalsAndScores(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		args  []string
		asks  *adminv1.ExplainPlacementRequest
		lines []string // fields of lines that are there
	}{
		"of a sandbox": {
			[]string{"s"},
			&adminv1.ExplainPlacementRequest{SandboxId: "s"},
			[]string{
				"Placement 42", "Outcome confirmed", "Node good", "Sandboxes s", "Tenant t", "Request r", "Strategy best_of_k",
				"Asked for 1 × 1500 millicores, 512 MiB", "Tries 2", "Refused 1 declared_sandboxes, 2 unhealthy",
				"CANDIDATE VERDICT SCORE BECAUSE", "full refused - declared_sandboxes: 3 of 2", "gone refused - unhealthy", "near passed 0.510", "good chosen 0.250",
			},
		},
		"of a request": {
			[]string{"--tenant", "t", "--request", "r"}, &adminv1.ExplainPlacementRequest{TenantId: "t", RequestId: "r"}, []string{"Placement 42"},
		},
		"that a quota refused": {
			[]string{"--placement", "43"},
			&adminv1.ExplainPlacementRequest{PlacementId: 43},
			[]string{"Outcome refused", "Refusal quota", "tenant t refused - quota_sandboxes: 3 of 2"},
		},
		"for a script": {[]string{"s", "-o", "json"}, &adminv1.ExplainPlacementRequest{SandboxId: "s"}, []string{`"score": 0.51`, `"reason": "declared_sandboxes",`, `"limit": 2,`}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := &explained{asked: make(chan *adminv1.ExplainPlacementRequest, 1)}
			server := httptest.NewServer(adminv1.NewPlacementsServer(e))
			t.Cleanup(server.Close)
			code, stdout, stderr := run(append(append([]string{"placement", "explain"}, tt.args...), "--scheduler-url", server.URL)...)
			if code != 0 || stderr != "" {
				t.Fatalf("berth placement explain %q = %d, stderr %q", tt.args, code, stderr)
			}
			if diff := cmp.Diff(tt.asks, <-e.asked, protocmp.Transform()); diff != "" {
				t.Errorf("the scheduler was asked (-want +got):\n%s", diff)
			}
			there := map[string]bool{}
			for line := range strings.Lines(stdout) {
				there[strings.Join(strings.Fields(line), " ")] = true
			}
			for _, line := range tt.lines {
				if !there[line] {
					t.Errorf("no line %q in:\n%s", line, stdout)
				}
			}
		})
	}
}
