// Package measure shows how the scheduler's subjects get on with their database, under names that they share.
package measure

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/pkg/pgdb"
)

// buckets are AgentENV's, in seconds, for all histograms of the scheduler are read side by side.
var buckets = []float64{ //nolint:gochecknoglobals // a constant list
	.001, .002, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 900, 1200, 1800,
}

// Store measures locks, passes and failures. All methods may be called at once.
type Store struct {
	locks  *prometheus.HistogramVec // lock_wait_seconds{lock}
	loops  *prometheus.HistogramVec // loop_seconds{loop}
	errors *prometheus.CounterVec   // store_errors_total{op}
}

// NewStore returns the measures of the process whose registry reg is: the same ones to each subject.
func NewStore(reg prometheus.Registerer) *Store {
	return &Store{
		locks: shared(reg, prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "berth_scheduler_lock_wait_seconds", Help: "Time waited for locks that others held.", Buckets: buckets,
		}, []string{"lock"})),
		loops: shared(reg, prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "berth_scheduler_loop_seconds", Help: "Time of one pass.", Buckets: buckets,
		}, []string{"loop"})),
		errors: shared(reg, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_scheduler_store_errors_total", Help: "Statements that failed.",
		}, []string{"op"})),
	}
}

// shared registers c, or returns what another subject has registered under its name.
func shared[T prometheus.Collector](reg prometheus.Registerer, c T) T {
	err := reg.Register(c)
	if already, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if same, ok := already.ExistingCollector.(T); ok {
			return same
		}
	}
	if err != nil {
		panic(err) // another metric has the name: a bug in this program
	}
	return c
}

// Lock takes a lock by take and shows how long that lasted. lock is the lock's class.
func (s *Store) Lock(lock string, take func() error) error {
	started := time.Now()
	err := take()
	s.locks.WithLabelValues(lock).Observe(time.Since(started).Seconds())
	return err
}

// Pass returns pass with its time shown and its failures counted.
func (s *Store) Pass(loop string, pass func(ctx context.Context) error) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		started := time.Now()
		err := pass(ctx)
		s.loops.WithLabelValues(loop).Observe(time.Since(started).Seconds())
		s.Failed(loop, err)
		return err
	}
}

// Failed counts err if it is the store's: an answer of the database, or none. What a caller is refused, and a
// caller who left, is not the store's failure.
func (s *Store) Failed(op string, err error) {
	if err != nil && (pgdb.Code(err) != "" || pgdb.Unavailable(err)) {
		s.errors.WithLabelValues(op).Inc()
	}
}
