package heartbeat

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/services/nodeagent/internal/sandboxes"
)

// Metrics counts heartbeats.
type Metrics struct{ beats *prometheus.HistogramVec }

// NewMetrics registers the metrics of heartbeats, and those of the sandboxes that usage tells.
func NewMetrics(registry prometheus.Registerer, usage func() sandboxes.Usage) *Metrics {
	m := &Metrics{beats: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "berth_nodeagent_heartbeat_seconds", Help: "Heartbeats by outcome.", Buckets: prometheus.ExponentialBuckets(0.001, 4, 8),
	}, []string{"outcome"})}
	registry.MustRegister(m.beats)
	gauge := func(name, help, state string, value func(sandboxes.Usage) float64) {
		registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: name, Help: help, ConstLabels: prometheus.Labels{"state": state},
		}, func() float64 { return value(usage()) }))
	}
	const count, help = "berth_nodeagent_sandboxes", "Sandboxes on this node."
	gauge(count, help, "starting", func(u sandboxes.Usage) float64 { return float64(u.Starting) })
	gauge(count, help, "running", func(u sandboxes.Usage) float64 { return float64(u.Running) })
	gauge(count, help, "paused", func(u sandboxes.Usage) float64 { return float64(u.Paused) })
	counter := func(outcome string, value func(sandboxes.Usage) uint64) {
		registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "berth_nodeagent_creates_total", Help: "Creates by outcome.", ConstLabels: prometheus.Labels{"outcome": outcome},
		}, func() float64 { return float64(value(usage())) }))
	}
	counter("created", func(u sandboxes.Usage) uint64 { return u.Created })
	counter("failed", func(u sandboxes.Usage) uint64 { return u.Failed })
	return m
}

func (m *Metrics) beat(took time.Duration, err error) {
	outcome := "accepted"
	if err != nil {
		outcome = "failed"
	}
	m.beats.WithLabelValues(outcome).Observe(took.Seconds())
}
