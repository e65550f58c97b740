package placement

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
)

// Buckets are AgentENV's, in seconds, kept for its dashboards.
var Buckets = []float64{ //nolint:gochecknoglobals // a constant list
	.001, .002, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 900, 1200, 1800,
}

// measureEvery is how often the number of holds is counted.
const measureEvery = 15 * time.Second

type metrics struct {
	strategy    string
	duration    *prometheus.HistogramVec
	assignments *prometheus.CounterVec
	placements  *prometheus.CounterVec
	seconds     *prometheus.HistogramVec
	batch       prometheus.Observer
	lockWait    prometheus.Observer
	holds       *prometheus.GaugeVec
	ended       *prometheus.CounterVec
	quota       *prometheus.CounterVec
	errors      *prometheus.CounterVec
	loop        *prometheus.HistogramVec
	counted     atomic.Int64 // unix nanoseconds of the last count of holds
}

// newMetrics registers the metrics with reg; nil keeps them to themselves. Where another part of the
// process has registered one already, that one is used.
func newMetrics(reg prometheus.Registerer, strategy Strategy) *metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return register(reg, prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels))
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return register(reg, prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels))
	}
	return &metrics{
		strategy:    string(strategy),
		duration:    histogram("agentenv_scheduler_schedule_duration_seconds", "Time to choose a node.", Buckets, "strategy", "status"),
		assignments: counter("agentenv_scheduler_schedule_assignments_total", "Nodes chosen.", "strategy"),
		placements:  counter("berth_scheduler_placements_total", "Placements decided.", "outcome", "reason"),
		seconds:     histogram("berth_scheduler_placement_seconds", "Time from the call to the durable decision.", Buckets, "outcome"),
		// Help and buckets are those of nodes, which shares it.
		batch: histogram("berth_scheduler_batch_size", "How many requests were served by one statement or transaction.",
			prometheus.ExponentialBuckets(1, 2, 8), "kind").WithLabelValues("place"),
		lockWait: histogram("berth_scheduler_lock_wait_seconds", "Time waited for locks that others held.", Buckets, "lock").WithLabelValues("node"),
		holds: register(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "berth_scheduler_holds", Help: "Holds of room in the database.",
		}, []string{"state"})),
		ended:  counter("berth_scheduler_holds_ended_total", "Open holds that ended without a sandbox.", "how"),
		quota:  counter("berth_scheduler_quota_refusals_total", "Placements refused by a tenant's quota.", "resource"),
		errors: counter("berth_scheduler_store_errors_total", "Statements that failed.", "op"),
		loop:   histogram("berth_scheduler_loop_seconds", "Time of one pass.", Buckets, "loop"),
	}
}

func register[T prometheus.Collector](reg prometheus.Registerer, c T) T {
	if reg == nil {
		return c
	}
	err := reg.Register(c)
	if already, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if same, ok := already.ExistingCollector.(T); ok {
			return same
		}
	}
	if err != nil {
		panic(err) // a name or label is wrong in this file
	}
	return c
}

func (m *metrics) scheduled(started time.Time, err error) {
	m.duration.WithLabelValues(m.strategy, status(err)).Observe(time.Since(started).Seconds())
	if err == nil {
		m.assignments.WithLabelValues(m.strategy).Inc()
	}
}

// status is the word of AgentENV's label for err.
func status(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, node.ErrNoneReady), errors.Is(err, node.ErrContended):
		return "unavailable"
	case errors.Is(err, node.ErrConstraints):
		return "failed_precondition"
	case errors.Is(err, node.ErrNoRoom), errors.Is(err, node.ErrQuota), errors.Is(err, node.ErrRequestReused), errors.Is(err, node.ErrKeyReused):
		return "other"
	case errors.Is(err, context.DeadlineExceeded):
		return "deadline_exceeded"
	case errors.Is(err, context.Canceled):
		return "canceled"
	case pgdb.Unavailable(err):
		return "unavailable"
	}
	return "internal"
}

func (m *metrics) placed(arrived time.Time) {
	m.placements.WithLabelValues(string(Reserved), "").Inc()
	m.seconds.WithLabelValues(string(Reserved)).Observe(time.Since(arrived).Seconds())
}

func (m *metrics) refused(cause error, resource string) {
	m.placements.WithLabelValues(string(Rejected), refusalWords[cause]).Inc()
	if resource != "" {
		m.quota.WithLabelValues(resource).Inc()
	}
}

func (m *metrics) failed(op string) { m.errors.WithLabelValues(op).Inc() }

func (m *metrics) batched(calls int) { m.batch.Observe(float64(calls)) }

func (m *metrics) waited(started time.Time) { m.lockWait.Observe(time.Since(started).Seconds()) }

func (m *metrics) holdsEnded(how string, holds int) { m.ended.WithLabelValues(how).Add(float64(holds)) }

func (m *metrics) passed(loop string, started time.Time) {
	m.loop.WithLabelValues(loop).Observe(time.Since(started).Seconds())
}

// measured reports whether the holds were counted lately.
func (m *metrics) measured() bool {
	last, now := m.counted.Load(), time.Now().UnixNano()
	return time.Duration(now-last) < measureEvery || !m.counted.CompareAndSwap(last, now)
}

func (m *metrics) holding(open, confirmed int64) {
	m.holds.WithLabelValues("open").Set(float64(open))
	m.holds.WithLabelValues("confirmed").Set(float64(confirmed))
}
