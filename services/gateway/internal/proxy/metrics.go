package proxy

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// durationBuckets are those of the contract, in seconds: dashboards for AgentENV keep working.
var durationBuckets = []float64{ //nolint:gochecknoglobals // a constant list
	.001, .002, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 900, 1200,
}

// metrics of the exchanges. Labels are small closed sets, never an id.
type metrics struct {
	requests *prometheus.HistogramVec // method, route, route_source, status
	upstream *prometheus.HistogramVec // route, status
	retries  *prometheus.CounterVec   // reason
	bytes    *prometheus.CounterVec   // plane, direction
	dataIn   prometheus.Counter
	dataOut  prometheus.Counter
	open     *prometheus.GaugeVec // kind
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "agentenv_gateway_http_request_duration_seconds", Help: "Requests of clients, from first byte to last.", Buckets: durationBuckets,
		}, []string{"method", "route", "route_source", "status"}),
		upstream: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "agentenv_gateway_upstream_proxy_duration_seconds", Help: "Time until a node's answer began.", Buckets: durationBuckets,
		}, []string{"route", "status"}),
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_gateway_retries_total", Help: "Requests sent to a node once more, by why.",
		}, []string{"reason"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_gateway_bytes_total", Help: "Bytes of bodies and tunnels.",
		}, []string{"plane", "direction"}),
		open: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "berth_gateway_open_exchanges", Help: "Exchanges that have begun and not ended.",
		}, []string{"kind"}),
	}
	m.dataIn, m.dataOut = m.bytes.WithLabelValues("data", "in"), m.bytes.WithLabelValues("data", "out")
	if reg != nil {
		reg.MustRegister(m.requests, m.upstream, m.retries, m.bytes, m.open)
	}
	return m
}

// ObserveRequest counts a request that the caller has answered itself, with the labels all share.
// status is 0 for a client that left.
func (f *Forwarder) ObserveRequest(r *http.Request, route string, source Source, status int, took time.Duration) {
	f.metrics.requests.WithLabelValues(methodLabel(r.Method), route, string(source), statusLabel(status)).Observe(took.Seconds())
}

func methodLabel(method string) string {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
		return method
	}
	return "OTHER"
}

// statusLabel is a status class; 0 is a client that left.
func statusLabel(status int) string {
	switch {
	case status == 0:
		return "client_closed"
	case status >= 100 && status < 600:
		return strconv.Itoa(status/100) + "xx"
	}
	return "other"
}
