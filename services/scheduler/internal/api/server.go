// Package api serves scheduler.v1 over gRPC and Twirp: one implementation, two transports, one table of
// errors. A method checks what came, asks one subject, and returns domain errors; the interceptors give
// them their codes.
package api

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/nodes"
	"berth/services/scheduler/internal/p2p"
	"berth/services/scheduler/internal/placement"
)

// Deps is what a Server works with.
type Deps struct {
	Placer      *placement.Placer
	Bindings    *bindings.Bindings
	Nodes       *nodes.Nodes
	P2P         *p2p.Index
	Tokens      *Tokens
	DefaultSize sandbox.Size // of a create that names none
	Register    bool         // a heartbeat with a node token may make a node known

	// QueryOnly, where set, answers LookupNode, and nothing else is served; the subjects may then be nil.
	QueryOnly interface {
		Lookup(ctx context.Context, id sandbox.ID) (bindings.Found, error)
	}

	Log        *slog.Logger
	Registry   prometheus.Registerer         // may be nil
	Tracers    trace.TracerProvider          // may be nil
	Propagator propagation.TextMapPropagator // may be nil
}

// Server is the Scheduler and the Placements service. Its methods may be called at once.
type Server struct {
	Deps
	calls *prometheus.HistogramVec
}

// One type for both transports: a method that is missing does not compile.
var (
	_ schedulerv1.Scheduler        = (*Server)(nil)
	_ schedulerv1.SchedulerServer  = (*Server)(nil)
	_ schedulerv1.Placements       = (*Server)(nil)
	_ schedulerv1.PlacementsServer = (*Server)(nil)
)

// New returns a Server. It listens to nothing: Twirp and GRPC are the caller's to serve.
func New(d Deps) *Server {
	return &Server{Deps: d, calls: newCallMetrics(d.Registry)}
}
