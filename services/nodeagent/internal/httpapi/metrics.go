package httpapi

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics counts calls and exchanges.
type Metrics struct {
	calls *prometheus.HistogramVec
	open  prometheus.Gauge
	total prometheus.Counter
}

// NewMetrics registers the metrics.
func NewMetrics(registry prometheus.Registerer) *Metrics {
	m := &Metrics{
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "berth_nodeagent_call_seconds", Help: "Control-plane calls by call and status.", Buckets: prometheus.ExponentialBuckets(0.001, 4, 8),
		}, []string{"call", "status"}),
		open: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "berth_nodeagent_exchanges_open", Help: "Data-plane exchanges with an application that are open.",
		}),
		total: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "berth_nodeagent_exchanges_total", Help: "Data-plane exchanges with an application.",
		}),
	}
	registry.MustRegister(m.calls, m.open, m.total)
	return m
}

func (m *Metrics) call(name string, w *statusWriter) func() {
	begun := time.Now()
	return func() { m.calls.WithLabelValues(name, strconv.Itoa(w.status)).Observe(time.Since(begun).Seconds()) }
}

func (m *Metrics) exchange() func() {
	m.total.Inc()
	m.open.Inc()
	return m.open.Dec
}
