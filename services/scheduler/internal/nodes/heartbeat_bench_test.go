package nodes

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"berth/migrations"
	"berth/pkg/pgtest"
	"berth/services/internal/node"
	"berth/services/scheduler/internal/bindings"
)

const (
	benchNodes     = 200
	benchSandboxes = 100
	benchSlice     = 2000 // heartbeats of each side in one iteration
)

// BenchmarkHeartbeats sends unchanged heartbeats with rosters of 100 from 16 and 64 callers, and beside
// them, turn by turn, the bare statement in batches as large as those callers make. Durability is on.
// beats/s and bare/s are rates of this run; ratio is the first by the second: what digests, batching and
// waking callers cost. walB/beat is what the server logged for one of the first.
func BenchmarkHeartbeats(b *testing.B) {
	r, beats, rosters := benchReplica(b)
	for _, callers := range []int{16, 64} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			prepared := make([]*prepared, callers)
			for i := range prepared {
				p, err := r.prepare(beats[i])
				if err != nil {
					b.Fatal(err)
				}
				prepared[i] = p
			}
			var (
				whole, bare time.Duration
				logged      int64
				slow        = r.slowBeats()
			)
			for b.Loop() {
				from := r.logged(b)
				whole += r.benchWhole(b, beats, rosters, callers)
				logged += r.logged(b) - from
				bare += r.benchBare(b, prepared)
			}
			if took := r.slowBeats() - slow; took > 0 {
				b.Fatalf("%v heartbeats took another path than the lease's: this is not the steady state", took)
			}
			rate := float64(b.N) * benchSlice / whole.Seconds()
			bareRate := float64(b.N) * float64(benchSlice/callers*callers) / bare.Seconds()
			b.ReportMetric(rate, "beats/s")
			b.ReportMetric(bareRate, "bare/s")
			b.ReportMetric(rate/bareRate, "ratio")
			b.ReportMetric(float64(logged)/float64(b.N*benchSlice), "walB/beat")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// benchReplica returns a replica on a durable server of its own, and a heartbeat of each node, all
// registered, without its roster: that is made anew for each beat, as a request is decoded.
func benchReplica(b *testing.B) (*replica, []Beat, [][]string) {
	b.Helper()
	db := pgtest.NewServer(b, nil).New(migrations.FS)
	cfg, routeCfg := patient()
	log := slog.New(slog.DiscardHandler)
	pool := db.As(b, "berth_scheduler")
	routes := bindings.New(pool, routeCfg, log, prometheus.NewRegistry())
	r := &replica{Nodes: New(pool, routes, cfg, mustGuard(b), log, prometheus.NewRegistry()), routes: routes, db: pool}
	ctx, stop := context.WithCancel(context.WithoutCancel(b.Context()))
	ended := make(chan error, 1)
	go func() { ended <- r.Batcher().Run(ctx) }()
	b.Cleanup(func() { stop(); <-ended })

	beats, rosters := make([]Beat, benchNodes), make([][]string, benchNodes)
	var wg sync.WaitGroup
	for i := range benchNodes {
		id, endpoint := nodeAt(i)
		for s := range benchSandboxes {
			rosters[i] = append(rosters[i], fmt.Sprintf("0192f0c1-%04d-7000-8000-%012d", i, s))
		}
		beats[i] = beatOf(id, "i1", endpoint, rosters[i]...)
		wg.Go(func() {
			if _, err := r.Heartbeat(b.Context(), beats[i]); err != nil {
				b.Error(err)
			}
		})
	}
	wg.Wait()
	if b.Failed() {
		b.FailNow()
	}
	if _, err := db.Exec(b.Context(), `VACUUM ANALYZE`); err != nil {
		b.Fatal(err)
	}
	return r, beats, rosters
}

// logged returns how many bytes of WAL the server has written, ever.
func (r *replica) logged(b *testing.B) (bytes int64) {
	b.Helper()
	if err := r.db.QueryRow(b.Context(), `SELECT pg_current_wal_insert_lsn() - '0/0'`).Scan(&bytes); err != nil {
		b.Fatal(err)
	}
	return bytes
}

func (r *replica) slowBeats() (count float64) {
	for _, path := range []string{pathDelta, pathFull, pathTakeover, pathRefused} {
		count += testutil.ToFloat64(r.metrics.heartbeats.WithLabelValues(path))
	}
	return count
}

func (r *replica) benchWhole(b *testing.B, beats []Beat, rosters [][]string, callers int) time.Duration {
	b.Helper()
	var (
		next atomic.Int64
		wg   sync.WaitGroup
	)
	started := time.Now()
	for range callers {
		wg.Go(func() {
			for i := next.Add(1); i <= benchSlice; i = next.Add(1) {
				beat := beats[i%benchNodes]
				beat.Roster, _ = node.NewRoster(rosters[i%benchNodes], nil)
				if _, err := r.Heartbeat(b.Context(), beat); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	return time.Since(started)
}

func (r *replica) benchBare(b *testing.B, beats []*prepared) time.Duration {
	b.Helper()
	started := time.Now()
	for range benchSlice / len(beats) {
		answers, err := r.renewOnce(b.Context(), withTTL(columns(beats)))
		if err != nil || len(answers) != len(beats) {
			b.Fatalf("renew = %d answers, %v, want %d", len(answers), err, len(beats))
		}
	}
	return time.Since(started)
}
