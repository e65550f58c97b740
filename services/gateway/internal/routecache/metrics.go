package routecache

import "github.com/prometheus/client_golang/prometheus"

// metrics has a counter for each result of a look-up, so that a hit does not search for its label.
type metrics struct {
	hit, shared, miss, unknown, unconfirmed, stale prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, c *Cache) metrics {
	lookups := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "berth_gateway_route_lookups_total", Help: "Route look-ups by what answered them.",
	}, []string{"result"})
	entries := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "berth_gateway_route_entries", Help: "Routes in the cache, ended ones included.",
	}, func() float64 { return float64(c.Len()) })
	if reg != nil {
		reg.MustRegister(lookups, entries)
	}
	return metrics{
		hit: lookups.WithLabelValues("hit"), shared: lookups.WithLabelValues("shared"),
		miss: lookups.WithLabelValues("miss"), unknown: lookups.WithLabelValues("unknown"),
		unconfirmed: lookups.WithLabelValues("unconfirmed"), stale: lookups.WithLabelValues("stale"),
	}
}
