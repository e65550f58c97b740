package placement

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"berth/migrations"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
)

// benchRound is how long one competitor runs before the next.
const benchRound = 2 * time.Second

// BenchmarkPlacements measures durable placements a second through Placers in this process over one
// server with fsync on, against the bare primitive in the same rounds: one client that commits one INSERT
// after the other (S1). Competitors alternate; medians are shown. The dimensions are the lists in
// BERTH_BENCH_NODES, BERTH_BENCH_SCHEDULERS and BERTH_BENCH_CALLERS, as for services/e2e/bench.
func BenchmarkPlacements(b *testing.B) {
	server := pgtest.NewServer(b, map[string]string{"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"})
	for _, nodes := range dimension(b, "BERTH_BENCH_NODES", 10, 100, 1000) {
		b.Run(fmt.Sprintf("nodes=%d", nodes), func(b *testing.B) {
			for _, replicas := range dimension(b, "BERTH_BENCH_SCHEDULERS", 1, 2, 4) {
				b.Run(fmt.Sprintf("replicas=%d", replicas), func(b *testing.B) {
					for _, callers := range dimension(b, "BERTH_BENCH_CALLERS", 64, 256) {
						b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
							benchmarkPlacements(b, server, nodes, replicas, callers)
						})
					}
				})
			}
		})
	}
}

// dimension is the list of whole numbers in the variable name, or fallback.
func dimension(b *testing.B, name string, fallback ...int) []int {
	b.Helper()
	text, set := os.LookupEnv(name) //nolint:forbidigo // a benchmark has no flags of its own
	if !set || text == "" {
		return fallback
	}
	var all []int
	for word := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(word))
		if err != nil || n < 1 {
			b.Fatalf("%s=%s: want whole numbers, separated by commas", name, text)
		}
		all = append(all, n)
	}
	return all
}

func benchmarkPlacements(b *testing.B, server *pgtest.Server, nodes, replicas, callers int) {
	b.Helper()
	db := server.New(migrations.FS)
	for i := range nodes {
		addNode(b, db.DB, testNode{id: fmt.Sprintf("node-%d", i), capacity: 1 << 30, capabilities: []string{"create_key"}})
	}
	if _, err := db.Exec(b.Context(), "CREATE TABLE bare (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, filler text NOT NULL)"); err != nil {
		b.Fatal(err)
	}
	placers := make([]*Placer, replicas)
	for i := range placers {
		placers[i] = startPlacer(b, db, DefaultConfig())
	}
	var bare, placed []float64
	for b.Loop() {
		bare = append(bare, commitBare(b, db.DB))
		placed = append(placed, placeFor(b, placers, callers))
		// Rounds must not slow each other down.
		if _, err := db.Exec(b.Context(), "TRUNCATE reservations, placements, bare"); err != nil {
			b.Fatal(err)
		}
	}
	s1, rate := middle(bare), middle(placed)
	b.ReportMetric(s1, "S1-commits/s")
	b.ReportMetric(rate, "placed/s")
	b.ReportMetric(rate/s1, "x-S1")
}

func commitBare(b *testing.B, db *pgdb.DB) float64 {
	b.Helper()
	begun, commits := time.Now(), 0
	for time.Since(begun) < benchRound {
		if _, err := db.Exec(b.Context(), "INSERT INTO bare (filler) VALUES ('one commit')"); err != nil {
			b.Fatal(err)
		}
		commits++
	}
	return float64(commits) / time.Since(begun).Seconds()
}

func placeFor(b *testing.B, placers []*Placer, callers int) float64 {
	b.Helper()
	var placed atomic.Int64
	var group sync.WaitGroup
	begun := time.Now()
	for caller := range callers {
		group.Go(func() {
			for time.Since(begun) < benchRound {
				if _, err := placers[caller%len(placers)].Schedule(b.Context(), request()); err != nil {
					b.Errorf("Schedule = %v", err)
					return
				}
				placed.Add(1)
			}
		})
	}
	group.Wait()
	return float64(placed.Load()) / time.Since(begun).Seconds()
}

func middle(rates []float64) float64 {
	slices.Sort(rates)
	return rates[len(rates)/2]
}
