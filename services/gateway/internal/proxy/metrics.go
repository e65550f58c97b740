package proxy

import (
	"net/http"
	"strconv"
	"sync/atomic"
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

	data         observers
	dataUpstream prometheus.Observer // of answers that are 2xx
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
	m.data.vec = m.requests
	m.dataUpstream = m.upstream.WithLabelValues(dataRoute, "2xx")
	m.dataIn, m.dataOut = m.bytes.WithLabelValues("data", "in"), m.bytes.WithLabelValues("data", "out")
	if reg != nil {
		reg.MustRegister(m.requests, m.upstream, m.retries, m.bytes, m.open)
	}
	return m
}

// observers has the histograms that the data plane's exchanges go to, so that none is searched for
// by its labels. Each is made when it is first needed, for all of them at once would fill the page.
type observers struct {
	vec     *prometheus.HistogramVec
	entries [2][len(methods) + 1][len(classes)]atomic.Pointer[prometheus.Observer]
}

var (
	methods = [...]string{ //nolint:gochecknoglobals // a constant list
		http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions,
	}
	classes = [...]string{"client_closed", "1xx", "2xx", "3xx", "4xx", "5xx", "other"} //nolint:gochecknoglobals // a constant list
)

const dataRoute = "/proxy/*"

func (o *observers) observe(method string, source Source, status int, took time.Duration) {
	s, m, c := 0, 0, status/100
	if source == SourceHeader {
		s = 1
	}
	for m < len(methods) && methods[m] != method {
		m++
	}
	if c < 0 || c >= len(classes) {
		c = len(classes) - 1
	}
	entry := &o.entries[s][m][c]
	known := entry.Load()
	if known == nil {
		made := o.vec.WithLabelValues(methodLabel(method), dataRoute, string(source), classes[c])
		known = &made
		entry.Store(known)
	}
	(*known).Observe(took.Seconds())
}

// ObserveRequest counts a request that the caller has answered itself, with the labels all share.
// status is 0 for a client that left.
func (f *Forwarder) ObserveRequest(r *http.Request, route string, source Source, status int, took time.Duration) {
	if route == dataRoute && (source == SourceHost || source == SourceHeader) {
		f.metrics.data.observe(r.Method, source, status, took)
		return
	}
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
