package api

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/twitchtv/twirp"
	"google.golang.org/grpc/codes"

	"berth/services/scheduler/internal/placement"
)

func newCallMetrics(reg prometheus.Registerer) *prometheus.HistogramVec {
	calls := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "agentenv_scheduler_rpc_duration_seconds", Help: "Time to answer a call.", Buckets: placement.Buckets,
	}, []string{"rpc", "status"})
	if reg != nil {
		reg.MustRegister(calls)
	}
	return calls
}

func (s *Server) observe(rpc, status string, started time.Time) {
	s.calls.WithLabelValues(rpc, status).Observe(time.Since(started).Seconds())
}

// AgentENV's words for how a call ended.
const (
	statusOK       = "ok"
	statusOther    = "other"
	statusCanceled = "canceled"
	statusDeadline = "deadline_exceeded"
	statusInternal = "internal"
)

func twirpStatus(err twirp.Error) string {
	if err == nil {
		return statusOK
	}
	switch err.Code() {
	case twirp.InvalidArgument, twirp.NotFound, twirp.FailedPrecondition, twirp.Unavailable, twirp.DeadlineExceeded, twirp.Internal, twirp.Canceled:
		return string(err.Code())
	default:
		return statusOther
	}
}

func grpcStatus(code codes.Code) string {
	switch code {
	case codes.OK:
		return statusOK
	case codes.Canceled:
		return statusCanceled
	case codes.InvalidArgument:
		return string(twirp.InvalidArgument)
	case codes.NotFound:
		return string(twirp.NotFound)
	case codes.FailedPrecondition:
		return string(twirp.FailedPrecondition)
	case codes.Unavailable:
		return string(twirp.Unavailable)
	case codes.DeadlineExceeded:
		return statusDeadline
	case codes.Internal:
		return statusInternal
	default:
		return statusOther
	}
}
