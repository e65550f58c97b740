package nodes

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"berth/services/internal/node"
	"berth/services/internal/route"
)

// The paths a heartbeat takes.
const (
	pathLease    = "lease" // nothing but time and load changed
	pathDelta    = "delta"
	pathFull     = "full"
	pathTakeover = "takeover"
	pathRefused  = "refused"
)

var statuses = []node.Status{node.Unspecified, node.Ready, node.Connecting, node.Unhealthy, node.Lingering} //nolint:gochecknoglobals // a constant list

type metrics struct {
	heartbeats *prometheus.CounterVec // heartbeats_total{path}
	batchSize  prometheus.Observer    // batch_size{kind="heartbeat"}
	conflicts  prometheus.Counter     // node_conflicts_total
	observed   *prometheus.GaugeVec   // agentenv_scheduler_observed_nodes{status}
	skew       prometheus.Gauge       // node_skew_seconds
	drains     *prometheus.GaugeVec   // drains{state}
}

func newMetrics(reg prometheus.Registerer) metrics {
	m := metrics{
		heartbeats: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_scheduler_heartbeats_total", Help: "Heartbeats by the path they took.",
		}, []string{"path"}),
		conflicts: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "berth_scheduler_node_conflicts_total",
			Help: "Heartbeats refused because another instance of the node lives elsewhere.",
		}),
		observed: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "agentenv_scheduler_observed_nodes", Help: "Observed nodes by effective status.",
		}, []string{"status"}),
		skew: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "berth_scheduler_node_skew_seconds",
			Help: "Largest difference between a live node's clock and the database's.",
		}),
	}
	m.drains = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "berth_scheduler_drains", Help: "Drains of nodes by state; ended ones are counted until they are forgotten.",
	}, []string{"state"})
	for _, path := range []string{pathLease, pathDelta, pathFull, pathTakeover, pathRefused} {
		m.heartbeats.WithLabelValues(path)
	}
	for _, status := range statuses {
		m.observed.WithLabelValues(status.String())
	}
	reg.MustRegister(m.heartbeats, m.conflicts, m.observed, m.skew, m.drains)
	m.batchSize = sharedBatchSize(reg).WithLabelValues("heartbeat")
	return m
}

// sharedBatchSize returns the histogram that all batches of this process are in, whoever made it.
func sharedBatchSize(reg prometheus.Registerer) *prometheus.HistogramVec {
	sizes := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "berth_scheduler_batch_size", Help: "How many requests were served by one statement or transaction.",
		Buckets: prometheus.ExponentialBuckets(1, 2, 8),
	}, []string{"kind"})
	err := reg.Register(sizes)
	if made, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if shared, ok := made.ExistingCollector.(*prometheus.HistogramVec); ok {
			return shared
		}
	}
	if err != nil {
		panic(err) // another metric has the name: a bug in this program
	}
	return sizes
}

func (m *metrics) refused() { m.heartbeats.WithLabelValues(pathRefused).Inc() }

// isRefusal reports whether err is about the beat, not about the store or the caller.
func isRefusal(err error) bool {
	for _, refusal := range []error{
		node.ErrNotListed, node.ErrBadEndpoint, route.ErrNotAllowed, node.ErrIDInUse, node.ErrSuperseded,
	} {
		if errors.Is(err, refusal) {
			return true
		}
	}
	return false
}
