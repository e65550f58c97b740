package api

import (
	"context"
	"crypto/tls"
	"net/netip"
	"strings"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/rpcerr"
)

const (
	maxMessageBytes = 4 << 20

	// pingsFrom is how often clients may ping. AgentENV's do every 10 s; a ping that the network held back is
	// followed by one that seems too early, and gRPC forgives two of those in the life of an idle connection.
	pingsFrom = 5 * time.Second

	// A client holds one connection, so connections end now and then: after a rollout, clients spread
	// over all replicas again.
	connectionAge   = 30 * time.Minute
	connectionGrace = 30 * time.Second

	// ReadyService is the health service's name for "the database answers".
	ReadyService = "berth.ready"

	watchEvery = 500 * time.Millisecond
)

// GRPC is scheduler.v1 over gRPC, with the health service.
type GRPC struct {
	*grpc.Server
	health *health.Server
}

// GRPC returns the gRPC side of s; tlsConfig nil is plain HTTP/2. It listens to nothing yet. The health
// service needs no token.
func (s *Server) GRPC(tlsConfig *tls.Config) *GRPC {
	return s.connections(tlsConfig, pingsFrom, keepalive.ServerParameters{MaxConnectionAge: connectionAge, MaxConnectionAgeGrace: connectionGrace})
}

// connections is GRPC with other rules for connections than those of the contract.
func (s *Server) connections(tlsConfig *tls.Config, pingsFrom time.Duration, lives keepalive.ServerParameters) *GRPC {
	var traced []otelgrpc.Option
	if s.Tracers != nil {
		traced = append(traced, otelgrpc.WithTracerProvider(s.Tracers))
	}
	if s.Propagator != nil {
		traced = append(traced, otelgrpc.WithPropagators(s.Propagator))
	}
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessageBytes), grpc.MaxSendMsgSize(maxMessageBytes),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingsFrom, PermitWithoutStream: true}),
		grpc.KeepaliveParams(lives),
		grpc.StatsHandler(otelgrpc.NewServerHandler(traced...)),
		grpc.ChainUnaryInterceptor(s.measured, rpcerr.GRPCInterceptor(s.Log), s.identified),
	}
	if tlsConfig != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(tlsConfig)))
	}
	g := &GRPC{Server: grpc.NewServer(options...), health: health.NewServer()}
	schedulerv1.RegisterSchedulerServer(g, s)
	schedulerv1.RegisterPlacementsServer(g, s)
	healthv1.RegisterHealthServer(g, g.health)
	g.health.SetServingStatus("", healthv1.HealthCheckResponse_SERVING)
	g.health.SetServingStatus(schedulerv1.Scheduler_ServiceDesc.ServiceName, healthv1.HealthCheckResponse_SERVING)
	g.health.SetServingStatus(ReadyService, healthv1.HealthCheckResponse_NOT_SERVING)
	return g
}

// Drain tells health watchers that this replica stops; open calls go on.
func (g *GRPC) Drain() { g.health.Shutdown() }

// Shut stops taking calls, lets open ones finish within ctx, and cuts the rest.
func (g *GRPC) Shut(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.GracefulStop()
	}()
	select {
	case <-done:
	case <-ctx.Done():
		g.Stop()
		<-done
	}
	return nil
}

// Watch lets ReadyService follow ready until ctx ends.
func (g *GRPC) Watch(ctx context.Context, ready func(context.Context) error) error {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		serving := healthv1.HealthCheckResponse_SERVING
		if ready(ctx) != nil {
			serving = healthv1.HealthCheckResponse_NOT_SERVING
		}
		g.health.SetServingStatus(ReadyService, serving)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// ours reports whether a method is scheduler.v1's; the health service has its own rules.
func ours(fullMethod string) (method, rpc string, ok bool) {
	method = strings.TrimPrefix(fullMethod, "/")
	rpc = method[strings.LastIndexByte(method, '/')+1:]
	return method, rpc, strings.HasPrefix(method, "scheduler.v1.")
}

func (s *Server) measured(ctx context.Context, request any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	started := time.Now()
	response, err := next(ctx, request)
	if _, rpc, ok := ours(info.FullMethod); ok {
		s.observe(rpc, grpcStatus(status.Code(err)), started)
	}
	return response, err
}

func (s *Server) identified(ctx context.Context, request any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	method, rpc, ok := ours(info.FullMethod)
	if !ok {
		return next(ctx, request)
	}
	if _, limited := ctx.Deadline(); !limited {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, callTimeout)
		defer cancel()
	}
	var c caller
	if sent := metadata.ValueFromIncomingContext(ctx, "authorization"); len(sent) > 0 {
		c.authorization = sent[0]
	}
	if p, found := peer.FromContext(ctx); found {
		if at, err := netip.ParseAddrPort(p.Addr.String()); err == nil {
			c.address = at.Addr()
		}
	}
	return s.guarded(withCaller(ctx, c), method, rpc, request, next)
}
