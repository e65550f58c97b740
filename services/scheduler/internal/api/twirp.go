package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"runtime/debug"
	"strings"
	"time"

	"github.com/twitchtv/twirp"

	"berth/pkg/twirpkit"
	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/rpcerr"
)

const (
	// callTimeout is the deadline of a call that brings none.
	callTimeout = 10 * time.Second

	// answerIn is kept from a call's time, at most a twentieth of it, so that its caller hears what it
	// waited for.
	answerIn = 250 * time.Millisecond
)

// lookupMethod is the one that a query-only replica serves.
const lookupMethod = "scheduler.v1.Scheduler/LookupNode"

// Mount is another Twirp service on the same listener, behind the same interceptor.
type Mount struct {
	Prefix  string
	Handler http.Handler
}

// Twirp serves scheduler.v1 over HTTP/1.1, JSON or protobuf, and what is mounted beside it.
func (s *Server) Twirp(mounts ...Mount) http.Handler {
	intercept := twirp.WithServerInterceptors(s.Interceptor())
	mux := http.NewServeMux()
	scheduler := schedulerv1.NewSchedulerServer(s, intercept)
	placements := schedulerv1.NewPlacementsServer(s, intercept)
	mux.Handle(scheduler.PathPrefix(), scheduler)
	mux.Handle(placements.PathPrefix(), placements)
	for _, m := range mounts {
		mux.Handle(m.Prefix, m.Handler)
	}
	identified := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := caller{authorization: r.Header.Get("Authorization")}
		if at, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
			c.address = at.Addr()
		}
		mux.ServeHTTP(w, r.WithContext(withCaller(r.Context(), c)))
	})
	return twirpkit.Server(identified, twirpkit.ServerOptions{
		Log: s.Log, Tracers: s.Tracers, Propagator: s.Propagator, DefaultTimeout: callTimeout,
	})
}

// Interceptor is what every Twirp method goes through: its caller's rights, the table of errors, the
// metric of calls.
func (s *Server) Interceptor() twirp.Interceptor {
	encode := rpcerr.TwirpInterceptor(s.Log)
	return func(next twirp.Method) twirp.Method {
		encoded := encode(func(ctx context.Context, request any) (any, error) {
			method, rpc := twirpMethod(ctx)
			return s.guarded(ctx, method, rpc, request, next)
		})
		return func(ctx context.Context, request any) (any, error) {
			started := time.Now()
			response, err := encoded(ctx, request)
			_, rpc := twirpMethod(ctx)
			s.observe(rpc, twirpStatus(rpcerr.Twirp(err)), started)
			return response, err
		}
	}
}

// twirpMethod returns the method as gRPC spells it, whole and by its last name.
func twirpMethod(ctx context.Context) (method, rpc string) {
	pkg, _ := twirp.PackageName(ctx)
	service, _ := twirp.ServiceName(ctx)
	rpc, _ = twirp.MethodName(ctx)
	rpc = strings.ReplaceAll(rpc, "P2P", "P2p")
	return pkg + "." + service + "/" + rpc, rpc
}

// guarded calls next if the caller may. A panic there is a bug of one method and ends that call only.
func (s *Server) guarded(ctx context.Context, method, rpc string, request any, next func(context.Context, any) (any, error)) (response any, err error) {
	defer func() {
		if r := recover(); r != nil {
			s.Log.ErrorContext(ctx, "method panicked", slog.String("method", method), slog.String("stack", string(debug.Stack())))
			response, err = nil, fmt.Errorf("%s panicked: %v", rpc, r)
		}
	}()
	if s.QueryOnly != nil && method != lookupMethod {
		return nil, &rpcerr.NotImplemented{RPC: rpc}
	}
	if err := s.Tokens.authorize(callerOf(ctx), method, request); err != nil {
		return nil, err
	}
	limited, cancel := withAnswerTime(ctx)
	defer cancel()
	response, err = next(limited, request)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		// A wait of ours ended, for the store or a connection to it, not the caller's patience.
		return nil, fmt.Errorf("%w: %w", rpcerr.ErrUnavailable, err)
	}
	return response, err
}

// withAnswerTime ends a little before ctx does.
func withAnswerTime(ctx context.Context) (context.Context, context.CancelFunc) {
	end, limited := ctx.Deadline()
	if !limited {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, end.Add(-min(time.Until(end)/20, answerIn)))
}
