package launch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/pkg/twirpkit"
	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
	"berth/services/internal/sandbox"
)

// ErrSchedulerAway means that no scheduler replica answered.
var ErrSchedulerAway = errors.New("scheduler unavailable")

// Limits of the calls to a scheduler.
const (
	callLimit  = 5 * time.Second // one call with its failover
	callTries  = 3
	firstPause = 50 * time.Millisecond
)

// Buckets of the request durations, in seconds; AgentENV's.
var Buckets = []float64{ //nolint:gochecknoglobals // a constant list
	.001, .002, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 900, 1200, 1800,
}

// Scheduler is what a gateway asks of the scheduler. Every call carries an id or may repeat, so each is
// tried again where no answer came: by the client below on another replica, and here after a pause.
type Scheduler struct {
	rpc        schedulerv1.Scheduler
	placements schedulerv1.Placements
	durations  *prometheus.HistogramVec
}

// NewScheduler returns a Scheduler that calls by these clients.
func NewScheduler(rpc schedulerv1.Scheduler, placements schedulerv1.Placements, reg prometheus.Registerer) *Scheduler {
	s := &Scheduler{rpc: rpc, placements: placements, durations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "agentenv_gateway_scheduler_rpc_duration_seconds",
		Help:    "Time of calls to the scheduler, retries included.",
		Buckets: Buckets,
	}, []string{"rpc", "status"})}
	reg.MustRegister(s.durations)
	return s
}

// ReleaseSandbox ends the binding of a sandbox that its node has deleted; gone already is no error.
// With a revision other than 0, a binding that has changed since is sandbox.ErrChanged.
func (s *Scheduler) ReleaseSandbox(ctx context.Context, id sandbox.ID, revision sandbox.Revision) (sandbox.Revision, error) {
	resp, err := call(ctx, s, "ReleaseSandbox", s.placements.ReleaseSandbox,
		&schedulerv1.ReleaseSandboxRequest{SandboxId: string(id), Revision: int64(revision)})
	if err != nil {
		return 0, fmt.Errorf("release %s: %w", id, err)
	}
	return sandbox.Revision(resp.GetRevision()), nil
}

func (s *Scheduler) schedule(ctx context.Context, r *schedulerv1.ScheduleRequest) (*schedulerv1.ScheduleResponse, error) {
	return call(ctx, s, "Schedule", s.rpc.Schedule, r)
}

func (s *Scheduler) record(ctx context.Context, r *schedulerv1.RecordAssignmentRequest) (*schedulerv1.RecordAssignmentResponse, error) {
	return call(ctx, s, "RecordAssignment", s.rpc.RecordAssignment, r)
}

func (s *Scheduler) extend(ctx context.Context, r *schedulerv1.ExtendPlacementRequest) (*schedulerv1.ExtendPlacementResponse, error) {
	return call(ctx, s, "ExtendPlacement", s.placements.ExtendPlacement, r)
}

func (s *Scheduler) release(ctx context.Context, r *schedulerv1.ReleasePlacementRequest) (*schedulerv1.ReleasePlacementResponse, error) {
	return call(ctx, s, "ReleasePlacement", s.placements.ReleasePlacement, r)
}

// call asks at most three times, and returns domain errors: what has none is ErrSchedulerAway.
func call[In, Out any](ctx context.Context, s *Scheduler, name string, ask func(context.Context, In) (Out, error), in In) (Out, error) {
	for tries := 1; ; tries++ {
		began := time.Now()
		limited, cancel := context.WithTimeout(twirpkit.Repeatable(ctx), callLimit)
		out, err := ask(limited, in)
		cancel()
		err = decode(err)
		s.durations.WithLabelValues(name, statusOf(err)).Observe(time.Since(began).Seconds())
		if err == nil || tries == callTries || !again(err) || !pause(ctx, firstPause<<(tries-1)) {
			return out, err
		}
	}
}

func decode(err error) error {
	if err == nil {
		return nil
	}
	decoded := rpcerr.Decode(err)
	if decoded == err { //nolint:errorlint // unchanged: no scheduler gave it a reason
		return fmt.Errorf("%w: %w", ErrSchedulerAway, err)
	}
	return decoded
}

// again tells whether the same call may have another answer a moment later.
func again(err error) bool {
	return errors.Is(err, ErrSchedulerAway) || errors.Is(err, rpcerr.ErrUnavailable) || errors.Is(err, node.ErrContended)
}

// pause waits a random time of at most twice d, and reports whether ctx still lives then.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d + rand.N(d))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// statusOf gives an outcome one of AgentENV's words.
func statusOf(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, context.Canceled):
		return "canceled"
	case errors.Is(err, context.DeadlineExceeded):
		return "deadline_exceeded"
	case errors.Is(err, sandbox.ErrNotFound), errors.Is(err, node.ErrNotObserved), errors.Is(err, node.ErrNoPlacement):
		return "not_found"
	case errors.Is(err, sandbox.ErrChanged), errors.Is(err, sandbox.ErrDeleted), errors.Is(err, node.ErrReservationOver),
		errors.Is(err, node.ErrNotOpen), errors.Is(err, node.ErrConstraints):
		return "failed_precondition"
	case again(err), errors.Is(err, node.ErrNoneReady):
		return "unavailable"
	case errors.Is(err, rpcerr.ErrInternal):
		return "internal"
	}
	if _, invalid := errors.AsType[*rpcerr.Invalid](err); invalid {
		return "invalid_argument"
	}
	return "other"
}
