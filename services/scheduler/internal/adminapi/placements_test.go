package adminapi

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/migrations"
	"berth/pkg/pgtest"
	adminv1 "berth/rpc/admin/v1"
	"berth/services/internal/rpcerr"
	"berth/services/scheduler/internal/placement"
)

func TestWhatAnOperatorMayNotAsk(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	service := New(placement.New(db.As(t, "berth_scheduler"), placement.DefaultConfig(), slog.New(slog.DiscardHandler), nil))
	type refusal struct{ Code, Text string }
	tests := map[string]struct {
		explain *adminv1.ExplainPlacementRequest
		list    *adminv1.ListPlacementsRequest
		want    refusal
	}{
		"nothing is named":       {explain: &adminv1.ExplainPlacementRequest{TenantId: "t"}, want: refusal{"invalid_argument", "placement_id, request_id or sandbox_id is required"}},
		"an odd sandbox":         {explain: &adminv1.ExplainPlacementRequest{SandboxId: "A b"}, want: refusal{"invalid_argument", "sandbox_id is not valid"}},
		"a control character":    {explain: &adminv1.ExplainPlacementRequest{RequestId: "a\x00"}, want: refusal{"invalid_argument", "field is not valid"}},
		"an unknown placement":   {explain: &adminv1.ExplainPlacementRequest{PlacementId: 7}, want: refusal{"not_found", "placement not found"}},
		"an unknown request":     {explain: &adminv1.ExplainPlacementRequest{RequestId: "r"}, want: refusal{"not_found", "placement not found"}},
		"an unknown sandbox":     {explain: &adminv1.ExplainPlacementRequest{SandboxId: "s"}, want: refusal{"not_found", "placement not found"}},
		"a page without bounds":  {list: &adminv1.ListPlacementsRequest{Limit: 1001}, want: refusal{"invalid_argument", "limit must be 1 to 1000, and before_placement_id not negative"}},
		"a page before the past": {list: &adminv1.ListPlacementsRequest{BeforePlacementId: -1}, want: refusal{"invalid_argument", "limit must be 1 to 1000, and before_placement_id not negative"}},
		"an unknown outcome":     {list: &adminv1.ListPlacementsRequest{Outcome: "lost"}, want: refusal{"invalid_argument", "outcome must be reserved, confirmed, released, expired or refused"}},
		"an odd node":            {list: &adminv1.ListPlacementsRequest{NodeId: strings.Repeat("a", 254)}, want: refusal{"invalid_argument", "node_id is not valid"}},
		"an empty page is none":  {list: &adminv1.ListPlacementsRequest{TenantId: "t"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var err error
			if tt.explain != nil {
				_, err = service.ExplainPlacement(t.Context(), tt.explain)
			} else {
				_, err = service.ListPlacements(t.Context(), tt.list)
			}
			var got refusal
			if told := rpcerr.Twirp(err); told != nil {
				got = refusal{string(told.Code()), told.Msg()}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
