package bindings

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"berth/migrations"
	"berth/pkg/pgtest"
	"berth/services/internal/sandbox"
)

// BenchmarkLookups compares lookups that share statements with those that each have their own, on one pool.
func BenchmarkLookups(b *testing.B) {
	owner := pgtest.New(b, migrations.FS)
	if _, err := owner.Exec(b.Context(), `INSERT INTO nodes (node_id, endpoint, source) SELECT 'n' || i, 'http://10.0.0.1:' || i, 'registered' FROM generate_series(1, 100) AS i`); err != nil {
		b.Fatal(err)
	}
	const bound = 10_000
	if _, err := owner.Exec(b.Context(), `INSERT INTO bindings (sandbox_id, state, node_id, origin) SELECT 's' || i, 'bound', 'n' || 1 + i % 100, 'recorded' FROM generate_series(1, $1::int) AS i`, bound); err != nil {
		b.Fatal(err)
	}
	if _, err := owner.Exec(b.Context(), `ANALYZE`); err != nil {
		b.Fatal(err)
	}
	routes := New(owner.As(b, "berth_scheduler"), DefaultConfig(), slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	for _, callers := range []int{1, 16, 64, 256} {
		for _, together := range []bool{false, true} {
			name := fmt.Sprintf("callers=%d/alone", callers)
			if together {
				name = fmt.Sprintf("callers=%d/together", callers)
			}
			b.Run(name, func(b *testing.B) {
				ctx, stop := context.WithCancel(b.Context())
				var loop, group sync.WaitGroup
				if together {
					loop.Go(func() { _ = routes.LookupLoop(ctx) }) // nil: it is a clean stop
				}
				var next atomic.Int64
				b.ResetTimer()
				for range callers {
					group.Go(func() {
						for i := next.Add(1); i <= int64(b.N); i = next.Add(1) {
							if _, err := routes.Lookup(ctx, sandbox.ID(fmt.Sprintf("s%d", 1+i*7919%bound))); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				group.Wait()
				b.StopTimer()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "lookups/s")
				stop()
				loop.Wait()
			})
		}
	}
}
