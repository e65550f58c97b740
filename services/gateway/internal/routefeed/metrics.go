package routefeed

import (
	"math"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	resyncs *prometheus.CounterVec // reason: start, identity, floor, lsn, rewind
	polls   *prometheus.CounterVec // woke: bell, timer
	rows    *prometheus.CounterVec // kind
}

func newMetrics(reg prometheus.Registerer, f *Follower) metrics {
	m := metrics{
		resyncs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_gateway_route_resyncs_total", Help: "How often all routes were dropped and read anew.",
		}, []string{"reason"}),
		polls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_gateway_route_feed_polls_total", Help: "Good polls of the route feed by what woke them.",
		}, []string{"woke"}),
		rows: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_gateway_route_feed_rows_total", Help: "Rows of the route feed by kind.",
		}, []string{"kind"}),
	}
	lag := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "berth_gateway_route_feed_lag_seconds", Help: "Age of the last good poll of the route feed; +Inf before the first.",
	}, func() float64 {
		if lag, ok := f.Lag(); ok {
			return lag.Seconds()
		}
		return math.Inf(1)
	})
	if reg != nil {
		reg.MustRegister(m.resyncs, m.polls, m.rows, lag)
	}
	return m
}
