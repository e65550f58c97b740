package api

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/twitchtv/twirp"
	"google.golang.org/grpc/metadata"

	"berth/pkg/pgdb"
	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
	"berth/services/scheduler/internal/placement"
)

// schedule calls Schedule as a generated client of the transport does, and returns its error decoded.
func (h *harness) schedule(ctx context.Context, t *testing.T, transport, token string, r *schedulerv1.ScheduleRequest) error {
	t.Helper()
	if transport == "grpc" {
		if token != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
		}
		_, err := schedulerv1.NewSchedulerClient(h.conn).Schedule(ctx, r)
		return rpcerr.Decode(err)
	}
	header := http.Header{}
	if token != "" {
		header.Set("Authorization", "Bearer "+token)
	}
	ctx, err := twirp.WithHTTPRequestHeaders(ctx, header)
	if err != nil {
		t.Fatal(err)
	}
	_, err = schedulerv1.NewSchedulerProtobufClient(h.twirpURL, http.DefaultClient).Schedule(ctx, r)
	return rpcerr.Decode(err)
}

// TestARefusalTellsWhatStoodInTheWay is what a caller of either transport can act on.
func TestARefusalTellsWhatStoodInTheWay(t *testing.T) {
	t.Parallel()
	h := newHarness(t, allTokens(), placement.Limits{})
	fill(t, h)
	if _, err := h.db.Exec(t.Context(), "INSERT INTO tenant_quotas (tenant_id, max_cpu_millis) VALUES ('t', 1500)"); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		token   string
		request *schedulerv1.ScheduleRequest
		cause   error
		check   func(*node.Refused) bool
	}{
		"no room: how many nodes for which reason, a row and a hint": {
			gatewayToken, &schedulerv1.ScheduleRequest{Count: 1}, node.ErrNoRoom,
			func(r *node.Refused) bool {
				return r.Reasons["declared_sandboxes"] == 1 && r.Placement != 0 && r.RetryAfter >= 160*time.Millisecond && r.RetryAfter <= 240*time.Millisecond
			},
		},
		"constraints: no hint, for trying again does not help": {
			gatewayToken, &schedulerv1.ScheduleRequest{ClusterId: "nowhere"}, node.ErrConstraints,
			func(r *node.Refused) bool { return r.Reasons["cluster"] == 1 && r.Placement != 0 && r.RetryAfter == 0 },
		},
		"over the quota: what of, how much there may be and is": {
			gatewayToken, &schedulerv1.ScheduleRequest{TenantId: "t"}, node.ErrQuota,
			func(r *node.Refused) bool {
				return r.Resource == "cpu_millis" && r.Limit == 1500 && r.Used == 0 && r.RetryAfter > 0 && r.Reasons == nil
			},
		},
		"AgentENV's caller learns nothing that it does not know": {
			"", hinted(), node.ErrNoneReady, func(r *node.Refused) bool { return r.Reasons == nil && r.Resource == "" },
		},
	}
	for name, tt := range tests {
		for _, transport := range transports {
			t.Run(name+" over "+transport, func(t *testing.T) {
				err := h.schedule(t.Context(), t, transport, tt.token, tt.request)
				told, ok := errors.AsType[*node.Refused](err)
				if !ok || !errors.Is(err, tt.cause) || !tt.check(told) {
					t.Errorf("Schedule = %v (%+v), want %v with what is named above", err, told, tt.cause)
				}
			})
		}
	}
}

// TestAContendedPlacementSaysSo: another replica holds the only node for longer than the callers wait.
func TestAContendedPlacementSaysSo(t *testing.T) {
	t.Parallel()
	for who, tt := range map[string]struct {
		token   string
		request *schedulerv1.ScheduleRequest
		want    error
	}{
		"Berth's caller":    {gatewayToken, &schedulerv1.ScheduleRequest{Count: 1}, node.ErrContended},
		"AgentENV's caller": {"", hinted(), node.ErrNoneReady},
	} {
		for _, transport := range transports {
			t.Run(who+" over "+transport, func(t *testing.T) {
				t.Parallel()
				h := newHarness(t, allTokens(), placement.Limits{})
				h.ready(t, "n1", 5)
				tx, err := h.db.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
				if err := pgdb.Lock(t.Context(), tx, advisory.Node("n1")); err != nil {
					t.Fatal(err)
				}
				// No deadline of the client: the server's own ends the wait, and its answer arrives.
				err = h.schedule(t.Context(), t, transport, tt.token, tt.request)
				told, ok := errors.AsType[*node.Refused](err)
				if !ok || !errors.Is(err, tt.want) || told.RetryAfter == 0 {
					t.Errorf("Schedule = %v (%+v), want %v with a hint", err, told, tt.want)
				}
			})
		}
	}
}
