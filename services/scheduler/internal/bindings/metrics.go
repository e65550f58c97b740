package bindings

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"berth/services/internal/sandbox"
)

type metrics struct {
	changes *prometheus.CounterVec // roster_changes_total{change}
	states  *prometheus.GaugeVec   // bindings{state}
	events  *prometheus.CounterVec // events_total{kind,effect}
	orphans *prometheus.GaugeVec   // orphans{reason}
}

func newMetrics(reg prometheus.Registerer) metrics {
	m := metrics{
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_scheduler_roster_changes_total",
			Help: "Sandboxes about which a roster and the bindings disagreed, by what was done.",
		}, []string{"change"}),
		states: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "berth_scheduler_bindings",
			Help: "Bindings by state.",
		}, []string{"state"}),
		events: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_scheduler_events_total",
			Help: "Events of sandboxes and nodes, by what came of them or why they happened.",
		}, []string{"kind", "effect"}),
		orphans: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "berth_scheduler_orphans",
			Help: "Sandboxes that a node lists and that may not be bound there, by reason.",
		}, []string{"reason"}),
	}
	for c := range changeCount {
		if word := change(c).String(); word != "" {
			m.changes.WithLabelValues(word)
		}
	}
	reg.MustRegister(m.changes, m.states, m.events, m.orphans)
	return m
}

const (
	stateEvery = 15 * time.Second
	loopStates = "binding states"
)

// countBindingsSQL reads the partial indexes only.
const countBindingsSQL = `
SELECT  'bound' AS state, count(*) FROM bindings WHERE state = 'bound'
UNION ALL
SELECT  state, count(*) FROM bindings WHERE state <> 'bound' GROUP BY state`

// StateLoop shows how many bindings there are in each state, and how many orphans, until ctx ends.
func (b *Bindings) StateLoop(ctx context.Context) error {
	return b.db.Loop(ctx, loopStates, stateEvery, b.store.Pass(loopStates, func(ctx context.Context) error {
		return errors.Join(b.showStates(ctx), b.showOrphanCounts(ctx))
	}), b.log)
}

func (b *Bindings) showStates(ctx context.Context) error {
	rows, err := b.db.Query(ctx, countBindingsSQL)
	if err != nil {
		return fmt.Errorf("count bindings: %w", err)
	}
	type counted struct {
		State string
		Count int64
	}
	counts, err := pgx.CollectRows(rows, pgx.RowToStructByPos[counted])
	if err != nil {
		return fmt.Errorf("count bindings: %w", err)
	}
	for _, state := range []sandbox.State{sandbox.Bound, sandbox.Parked, sandbox.Gone} {
		b.metrics.states.WithLabelValues(string(state)).Set(0)
	}
	for _, c := range counts {
		b.metrics.states.WithLabelValues(c.State).Set(float64(c.Count))
	}
	return nil
}
