package discovery

import (
	"github.com/prometheus/client_golang/prometheus"
)

// The sources, as labels and log lines name them.
const (
	sourceStatic     = "static"
	sourceKubernetes = "kubernetes"
)

// Metrics show what sources of nodes say, and whether they can be read.
type Metrics struct {
	nodes    *prometheus.GaugeVec
	failing  *prometheus.GaugeVec
	failures *prometheus.CounterVec
	leftOut  *prometheus.GaugeVec
	writer   prometheus.Gauge
}

// NewMetrics registers the metrics with reg. static nodes were applied at the start.
func NewMetrics(reg prometheus.Registerer, static int) *Metrics {
	source := []string{"source"}
	m := &Metrics{
		nodes: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "berth_scheduler_discovery_nodes", Help: "Nodes that a source lists, as this replica sees it.",
		}, source),
		failing: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "berth_scheduler_discovery_failing", Help: "1 while a source cannot be read: its last good list stays.",
		}, source),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_scheduler_discovery_failures_total", Help: "Tries to read a source that failed.",
		}, source),
		leftOut: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "berth_scheduler_discovery_left_out_nodes", Help: "Nodes that a source lists and that are not taken: their id or endpoint is not allowed.",
		}, source),
		writer: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "berth_scheduler_discovery_writer", Help: "1 on the replica that writes what Kubernetes lists.",
		}),
	}
	for _, name := range []string{sourceStatic, sourceKubernetes} {
		m.nodes.WithLabelValues(name)
		m.failing.WithLabelValues(name)
		m.failures.WithLabelValues(name)
	}
	m.leftOut.WithLabelValues(sourceKubernetes)
	m.listed(sourceStatic, static)
	reg.MustRegister(m.nodes, m.failing, m.failures, m.leftOut, m.writer)
	return m
}

func (m *Metrics) fail(source string) {
	m.failures.WithLabelValues(source).Inc()
	m.failing.WithLabelValues(source).Set(1)
}

func (m *Metrics) heal(source string) { m.failing.WithLabelValues(source).Set(0) }

func (m *Metrics) listed(source string, n int) { m.nodes.WithLabelValues(source).Set(float64(n)) }
