package bench

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pglocal"
	"berth/pkg/twirpkit"
	schedulerv1 "berth/rpc/scheduler/v1"
)

const (
	fakeNodes  = 100
	roundTime  = 3 * time.Second
	beatPeriod = 2 * time.Second
	nodeRoom   = 100_000
)

// BenchmarkPlacements measures durable placements a second through one or more schedulers, on a hundred nodes
// or as many as are said, against what pgbench commits on the same server: S1 is its simple update with one client, Smax the best of 1, 8 and 32. Competitors
// alternate; an operation is one round of all, and medians are shown.
func BenchmarkPlacements(b *testing.B) {
	schedulers := dimension(b, "BERTH_BENCH_SCHEDULERS", 1)
	s := start(b, "--schedulers", strconv.Itoa(schedulers), "--gateways", "1", "--nodes", "1")
	nodes := s.fakeNodes(b)
	s.preparePgbench(b)
	callers := dimensions(b, "BERTH_BENCH_CALLERS", "1,64,256")
	rates := map[string][]float64{}
	for b.Loop() {
		one := s.pgbench(b, 1)
		best := max(one, s.pgbench(b, 8), s.pgbench(b, 32))
		rates["S1"], rates["Smax"] = append(rates["S1"], one), append(rates["Smax"], best)
		for _, n := range callers {
			name := fmt.Sprintf("callers=%d", n)
			rates[name] = append(rates[name], s.place(b, n))
			s.forget(b)
		}
	}
	nodes()
	one, best := median(rates["S1"]), median(rates["Smax"])
	b.ReportMetric(one, "S1-commits/s")
	b.ReportMetric(best, "Smax-commits/s")
	for _, n := range callers {
		rate := median(rates[fmt.Sprintf("callers=%d", n)])
		b.ReportMetric(rate, fmt.Sprintf("placed-%d/s", n))
		b.ReportMetric(rate/one, fmt.Sprintf("x-S1-%d", n))
		b.ReportMetric(rate/best, fmt.Sprintf("x-Smax-%d", n))
	}
}

// scheduler is a client of one scheduler with one of its tokens.
func (s *stack) scheduler(b *testing.B, which int, token string) schedulerv1.Scheduler {
	b.Helper()
	base := s.Schedulers[which].Twirp
	f, err := twirpkit.NewFailover([]string{base}, twirpkit.FailoverOptions{
		Token: token, Transport: &http.Transport{MaxIdleConnsPerHost: 512, MaxConnsPerHost: 512},
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(f.CloseIdleConnections)
	return schedulerv1.NewSchedulerProtobufClient(f.Base(), f)
}

// fakeNodes registers nodes that only beat, and keeps them alive until the function it returns is called.
func (s *stack) fakeNodes(b *testing.B) func() {
	b.Helper()
	count := dimension(b, "BERTH_BENCH_NODES", fakeNodes)
	client := s.scheduler(b, 0, s.NodeToken)
	ctx, cancel := context.WithCancel(b.Context())
	beat := func(n int) error {
		_, err := client.Heartbeat(ctx, &schedulerv1.HeartbeatRequest{
			NodeId: fmt.Sprintf("bench-%d", n), ServiceInstanceId: "bench", Endpoint: fmt.Sprintf("http://127.0.0.1:%d", 20_000+n),
			Capacity:     &schedulerv1.Capacity{Sandboxes: nodeRoom, CpuMillis: nodeRoom, MemoryBytes: nodeRoom << 20},
			Capabilities: []string{"create_key", "route_revision"},
			Snapshot: &schedulerv1.NodeSnapshot{
				Status: schedulerv1.NodeStatus_NODE_STATUS_READY, CpuCount: 64, MemoryTotalBytes: nodeRoom << 20,
				ReportedAtUnixMs: time.Now().UnixMilli(),
			},
		})
		return err
	}
	for n := range count {
		if err := beat(n); err != nil {
			b.Fatalf("register node %d: %v", n, err)
		}
	}
	var group sync.WaitGroup
	group.Go(func() {
		ticker := time.NewTicker(beatPeriod)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			for n := range count {
				if err := beat(n); err != nil && ctx.Err() == nil {
					b.Errorf("beat of node %d: %v", n, err)
				}
			}
		}
	})
	return func() { cancel(); group.Wait() }
}

// place lets callers ask for room as fast as they get it, for one round, and returns placements a second.
func (s *stack) place(b *testing.B, callers int) float64 {
	b.Helper()
	clients := make([]schedulerv1.Scheduler, len(s.Schedulers))
	for i := range clients {
		clients[i] = s.scheduler(b, i, s.GatewayToken)
	}
	ctx, cancel := context.WithTimeout(b.Context(), 2*roundTime)
	defer cancel()
	var placed atomic.Int64
	var group sync.WaitGroup
	begun := time.Now()
	for caller := range callers {
		group.Go(func() {
			for time.Since(begun) < roundTime {
				_, err := clients[caller%len(clients)].Schedule(ctx, &schedulerv1.ScheduleRequest{
					TenantId: "bench", Resources: &schedulerv1.Resources{CpuMillis: 1, MemoryBytes: 1 << 20},
					ExcludeNodeIds: []string{"node-1"},
				})
				if err != nil {
					b.Errorf("place: %v", err)
					return
				}
				placed.Add(1)
			}
		})
	}
	group.Wait()
	return float64(placed.Load()) / time.Since(begun).Seconds()
}

// forget gives the room of a round back at once, so that rounds do not slow each other down.
func (s *stack) forget(b *testing.B) {
	b.Helper()
	conn, err := pgx.Connect(b.Context(), s.DatabaseURL)
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close(b.Context())
	if _, err := conn.Exec(b.Context(), "TRUNCATE reservations, placements"); err != nil {
		b.Fatal(err)
	}
}

func (s *stack) preparePgbench(b *testing.B) {
	b.Helper()
	s.runPgbench(b, "-i", "-q", "-s", "4")
}

// pgbench returns the commits a second of pgbench's simple update.
func (s *stack) pgbench(b *testing.B, clients int) float64 {
	b.Helper()
	out := s.runPgbench(b, "-n", "-N", "-M", "prepared", "-c", fmt.Sprint(clients), "-j", "2", "-T", fmt.Sprint(int(roundTime.Seconds())))
	rate, found := number(out, "tps = ")
	if !found {
		b.Fatalf("pgbench says nothing of tps:\n%s", out)
	}
	return rate
}

func (s *stack) runPgbench(b *testing.B, args ...string) string {
	b.Helper()
	program, err := exec.LookPath("pgbench")
	if err != nil {
		binaries, findErr := pglocal.Find()
		if findErr != nil {
			b.Fatalf("pgbench: %v", findErr)
		}
		program = filepath.Join(binaries.Dir, "pgbench")
	}
	cmd := exec.CommandContext(b.Context(), program, append(args, s.DatabaseURL)...)
	cmd.Env = append(os.Environ(), "PGAPPNAME=pgbench")
	out, err := cmd.CombinedOutput()
	if err != nil {
		b.Fatalf("pgbench %v: %v\n%s", args, err, out)
	}
	return string(out)
}
