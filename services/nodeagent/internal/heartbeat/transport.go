package heartbeat

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	"berth/pkg/twirpkit"
	schedulerv1 "berth/rpc/scheduler/v1"
)

// Remote is where to find the schedulers.
type Remote struct {
	Addresses  []string // host:port for gRPC, URLs for Twirp; equal replicas
	Token      string   // of a node
	Tracers    trace.TracerProvider
	Propagator propagation.TextMapPropagator
}

// Scheduler is what a node asks of the schedulers.
type Scheduler interface {
	Heartbeat(ctx context.Context, r *schedulerv1.HeartbeatRequest) (*schedulerv1.HeartbeatResponse, error)
	UnregisterNode(ctx context.Context, r *schedulerv1.UnregisterNodeRequest) (*schedulerv1.UnregisterNodeResponse, error)
}

// NewTwirp returns the schedulers behind Twirp URLs, and a function that closes their connections.
func NewTwirp(r Remote) (Scheduler, func(), error) {
	client, err := twirpkit.NewFailover(r.Addresses, twirpkit.FailoverOptions{Token: r.Token, Tracers: r.Tracers, Propagator: r.Propagator})
	if err != nil {
		return nil, nil, fmt.Errorf("scheduler addresses: %w", err)
	}
	return twirpScheduler{schedulerv1.NewSchedulerProtobufClient(client.Base(), client)}, client.CloseIdleConnections, nil
}

type twirpScheduler struct{ client schedulerv1.Scheduler }

func (s twirpScheduler) Heartbeat(ctx context.Context, r *schedulerv1.HeartbeatRequest) (*schedulerv1.HeartbeatResponse, error) {
	return s.client.Heartbeat(twirpkit.Repeatable(ctx), r) // seq makes a second one harmless
}

func (s twirpScheduler) UnregisterNode(ctx context.Context, r *schedulerv1.UnregisterNodeRequest) (*schedulerv1.UnregisterNodeResponse, error) {
	return s.client.UnregisterNode(twirpkit.Repeatable(ctx), r)
}

// Connection behaviour: a dead scheduler is noticed and passed over within seconds.
const (
	pingEvery      = 20 * time.Second
	pingTimeout    = 5 * time.Second
	connectTimeout = 2 * time.Second
)

// NewGRPC returns the schedulers behind gRPC addresses, and a function that closes the connection. One connection is held, to the
// first address that takes it; when it breaks the next call goes to the next.
func NewGRPC(r Remote) (Scheduler, func(), error) {
	addresses := manual.NewBuilderWithScheme("berth")
	var state resolver.State
	for _, a := range r.Addresses {
		state.Endpoints = append(state.Endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: a}}})
	}
	addresses.InitialState(state)
	conn, err := grpc.NewClient("berth:///scheduler",
		grpc.WithResolvers(addresses),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"pick_first":{}}]}`),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("scheduler"),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingEvery, Timeout: pingTimeout}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second}, MinConnectTimeout: connectTimeout,
		}),
		grpc.WithStatsHandler(otelgrpc.NewClientHandler(otelgrpc.WithTracerProvider(r.Tracers), otelgrpc.WithPropagators(r.Propagator))),
	)
	if err != nil {
		return nil, nil, fmt.Errorf("scheduler addresses: %w", err)
	}
	return grpcScheduler{schedulerv1.NewSchedulerClient(conn), r.Token}, func() { _ = conn.Close() }, nil
}

type grpcScheduler struct {
	client schedulerv1.SchedulerClient
	token  string
}

func (s grpcScheduler) Heartbeat(ctx context.Context, r *schedulerv1.HeartbeatRequest) (*schedulerv1.HeartbeatResponse, error) {
	return twice(ctx, func() (*schedulerv1.HeartbeatResponse, error) {
		return s.client.Heartbeat(s.withToken(ctx), r, grpc.WaitForReady(true))
	})
}

func (s grpcScheduler) UnregisterNode(ctx context.Context, r *schedulerv1.UnregisterNodeRequest) (*schedulerv1.UnregisterNodeResponse, error) {
	return twice(ctx, func() (*schedulerv1.UnregisterNodeResponse, error) {
		return s.client.UnregisterNode(s.withToken(ctx), r, grpc.WaitForReady(true))
	})
}

func (s grpcScheduler) withToken(ctx context.Context) context.Context {
	if s.token == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+s.token)
}

// twice repeats a call whose connection broke under it, on the next address: both calls here may run twice. A call that waits for
// a connection fails with the deadline only, so Unavailable is a scheduler that died or stops.
func twice[T any](ctx context.Context, call func() (T, error)) (T, error) {
	answer, err := call()
	if status.Code(err) == codes.Unavailable && ctx.Err() == nil {
		var second error
		if answer, second = call(); second != nil {
			return answer, errors.Join(second, err)
		}
		return answer, nil
	}
	return answer, err
}
