package launch

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"berth/services/internal/node"
)

type metrics struct {
	creates       *prometheus.CounterVec
	attempts      *prometheus.CounterVec
	compensations *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) metrics {
	m := metrics{
		creates: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_gateway_creates_total", Help: "Creates by how they ended.",
		}, []string{"outcome"}),
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_gateway_create_attempts_total", Help: "Nodes asked for a create, by what came of it.",
		}, []string{"reason"}),
		compensations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_gateway_compensations_total", Help: "Sandboxes deleted because they could not be bound, by success.",
		}, []string{"outcome"}),
	}
	reg.MustRegister(m.creates, m.attempts, m.compensations)
	return m
}

// outcomeOf is the label of a create that ended with err.
func outcomeOf(err error) string {
	if _, refused := errors.AsType[*Refusal](err); refused {
		return "node_error"
	}
	if _, bad := errors.AsType[*BadAnswer](err); bad {
		return "bad_answer"
	}
	switch {
	case err == nil:
		return "created"
	case errors.Is(err, ErrUnknown):
		return "unknown"
	case errors.Is(err, ErrUnrecorded):
		return "unrecorded"
	case errors.Is(err, ErrClientGone):
		return "client_gone"
	case errors.Is(err, ErrSchedulerAway):
		return "scheduler_away"
	case errors.Is(err, node.ErrNoneReady), errors.Is(err, node.ErrNoRoom), errors.Is(err, node.ErrConstraints),
		errors.Is(err, node.ErrContended):
		return "no_node"
	case errors.Is(err, node.ErrQuota):
		return "quota"
	}
	return "error"
}
