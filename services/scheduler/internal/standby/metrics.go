package standby

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// How a look-up was answered: by the standby, or by the primary and why.
const (
	fromStandby     = "standby"
	primaryMiss     = "primary_miss"
	primaryStale    = "primary_stale"    // it was asked, and its answer came without proof
	primaryUnusable = "primary_unusable" // it was not asked, for the last probe had failed
	primaryFailed   = "primary_failed"
)

type metrics struct{ lookups *prometheus.CounterVec }

func newMetrics(reg prometheus.Registerer, bound time.Duration, staleness func() (time.Duration, bool)) metrics {
	m := metrics{lookups: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "berth_scheduler_query_lookups_total", Help: "Look-ups of a query-only replica by who answered them, and why.",
	}, []string{"answered"})}
	for _, how := range []string{fromStandby, primaryMiss, primaryStale, primaryUnusable, primaryFailed} {
		m.lookups.WithLabelValues(how)
	}
	if reg == nil {
		return m
	}
	reg.MustRegister(m.lookups,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "berth_scheduler_query_staleness_bound_seconds", Help: "No answer lacks a change that was acknowledged longer ago.",
		}, func() float64 { return bound.Seconds() }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "berth_scheduler_query_staleness_seconds",
			Help: "How old the standby's answers may be at most; above the bound the primary answers. +Inf before it has proved anything.",
		}, func() float64 {
			age, known := staleness()
			if !known {
				return math.Inf(1)
			}
			return age.Seconds()
		}))
	return m
}
