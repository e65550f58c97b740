package placement

import (
	"fmt"
	"slices"
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

// BenchmarkPlacements measures durable placements a second, with 64 callers, through 1, 2 and 4 Placers
// in this process over one server with fsync on, against the bare primitive in the same rounds: one
// client that commits one INSERT after the other (S1). Competitors alternate; medians are shown.
func BenchmarkPlacements(b *testing.B) {
	server := pgtest.NewServer(b, map[string]string{"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"})
	for _, nodes := range []int{10, 100} {
		b.Run(fmt.Sprintf("nodes=%d", nodes), func(b *testing.B) {
			db := server.New(migrations.FS)
			for i := range nodes {
				addNode(b, db.DB, testNode{id: fmt.Sprintf("node-%d", i), capacity: 1 << 30, capabilities: []string{"create_key"}})
			}
			if _, err := db.Exec(b.Context(), "CREATE TABLE bare (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, filler text NOT NULL)"); err != nil {
				b.Fatal(err)
			}
			replicas := []int{1, 2, 4}
			placers := make([]*Placer, slices.Max(replicas))
			for i := range placers {
				placers[i] = startPlacer(b, db, DefaultConfig())
			}
			rates := map[string][]float64{}
			for b.Loop() {
				rates["bare"] = append(rates["bare"], commitBare(b, db.DB))
				for _, n := range replicas {
					name := fmt.Sprintf("placers-%d", n)
					rates[name] = append(rates[name], placeFor(b, placers[:n]))
				}
				// Rounds must not slow each other down.
				if _, err := db.Exec(b.Context(), "TRUNCATE reservations, placements, bare"); err != nil {
					b.Fatal(err)
				}
			}
			bare := middle(rates["bare"])
			b.ReportMetric(bare, "S1-commits/s")
			for _, n := range replicas {
				rate := middle(rates[fmt.Sprintf("placers-%d", n)])
				b.ReportMetric(rate, fmt.Sprintf("placed-by-%d/s", n))
				b.ReportMetric(rate/bare, fmt.Sprintf("x-S1-by-%d", n))
			}
		})
	}
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

func placeFor(b *testing.B, placers []*Placer) float64 {
	b.Helper()
	const callers = 64
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
