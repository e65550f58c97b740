package api

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/rpcerr"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/placement"
)

const listNodes = "scheduler.v1.Scheduler/ListNodes"

// silentStore waits as a query does whose database does not answer.
func silentStore(ctx context.Context, _ any) (any, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestACallHearsThatTheStoreIsSilentBeforeItsTimeIsOver(t *testing.T) {
	t.Parallel()
	for name, limit := range map[string]time.Duration{
		"the default":       callTimeout,
		"a short deadline":  100 * time.Millisecond,
		"a single moment":   time.Millisecond,
		"minutes of a call": 5 * time.Minute,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := &Server{Deps: Deps{Tokens: NewTokens(TokenConfig{}), Log: slog.New(slog.DiscardHandler)}}
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				_, err := s.guarded(ctx, listNodes, "ListNodes", &schedulerv1.ListNodesRequest{}, silentStore)
				if ctx.Err() != nil {
					t.Errorf("the answer came when %s were over", limit)
				}
				if got := status.Convert(rpcerr.GRPC(err)); got.Code() != codes.Unavailable || got.Message() != "binding store unavailable" {
					t.Errorf("a silent store is answered as %s %q, want Unavailable and the contract's text", got.Code(), got.Message())
				}
			})
		})
	}
}

func TestACallerThatLeavesIsNotAnsweredForTheStore(t *testing.T) {
	t.Parallel()
	s := &Server{Deps: Deps{Tokens: NewTokens(TokenConfig{}), Log: slog.New(slog.DiscardHandler)}}
	ctx, leave := context.WithCancel(t.Context())
	leave()
	_, err := s.guarded(ctx, listNodes, "ListNodes", &schedulerv1.ListNodesRequest{}, silentStore)
	if !errors.Is(err, context.Canceled) || errors.Is(err, rpcerr.ErrUnavailable) {
		t.Errorf("a caller that left gets %v, want context.Canceled alone", err)
	}
}

func TestNoConnectionInTimeIsAStoreThatIsAway(t *testing.T) {
	t.Parallel()
	h := newHarness(t, allTokens(), placement.Limits{})
	db := h.db.As(t, "berth_scheduler")
	h.server.Bindings = bindings.New(db, bindings.DefaultConfig(), slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	for range db.Config().MaxConns {
		taken, err := db.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer taken.Release()
	}
	for _, transport := range transports {
		got := h.call(t, transport, scheduler+"LookupNode", "", &schedulerv1.LookupNodeRequest{SandboxId: "s"}, &schedulerv1.LookupNodeResponse{})
		if got.Code != "unavailable" || got.Text != "binding store unavailable" {
			t.Errorf("over %s a lookup without a connection is %+v, want unavailable and the contract's text", transport, got)
		}
	}
}
