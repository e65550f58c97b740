package bench

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	schedulerv1 "berth/rpc/scheduler/v1"
)

const (
	beatingNodes = 1000
	rosterSize   = 100
)

// BenchmarkHeartbeats measures steady heartbeats over gRPC: a thousand nodes with rosters of a hundred that do not change.
// They renew leases and write nothing else. Beside them, in the same rounds, what pgbench commits alone.
func BenchmarkHeartbeats(b *testing.B) {
	s := start(b, "--schedulers", "1", "--gateways", "1", "--nodes", "1")
	s.preparePgbench(b)
	client, ctx := s.grpc(b)
	rosters := make([][]string, beatingNodes)
	for n := range rosters {
		for i := range rosterSize {
			rosters[n] = append(rosters[n], fmt.Sprintf("bench-%d-%d", n, i))
		}
	}
	var clock atomic.Int64 // the sequence number of every beat; it only has to grow for each node
	beat := func(n int) error {
		_, err := client.Heartbeat(ctx, &schedulerv1.HeartbeatRequest{
			NodeId: fmt.Sprintf("beat-%d", n), ServiceInstanceId: "bench", Endpoint: fmt.Sprintf("http://127.0.0.1:%d", 20_000+n),
			SandboxIds: rosters[n], Seq: clock.Add(1),
			Snapshot: &schedulerv1.NodeSnapshot{
				Status: schedulerv1.NodeStatus_NODE_STATUS_READY, CpuCount: 64, MemoryTotalBytes: 1 << 40,
				SandboxCount: rosterSize, ReportedAtUnixMs: time.Now().UnixMilli(),
			},
		})
		return err
	}
	// The first beat makes the node known and adopts its roster; after the second it is steady.
	for range 2 {
		if _, err := spread(16, beatingNodes, beat); err != nil {
			b.Fatalf("register the nodes: %v", err)
		}
	}

	rates := map[string][]float64{}
	for b.Loop() {
		rates["S1"] = append(rates["S1"], s.pgbench(b, 1))
		for _, callers := range []int{16, 64} {
			begun := time.Now()
			beats := 0
			for time.Since(begun) < roundTime {
				n, err := spread(callers, beatingNodes, beat)
				if err != nil {
					b.Fatalf("beat: %v", err)
				}
				beats += n
			}
			name := fmt.Sprintf("beats-%d", callers)
			rates[name] = append(rates[name], float64(beats)/time.Since(begun).Seconds())
		}
	}
	one := median(rates["S1"])
	b.ReportMetric(one, "S1-commits/s")
	for _, callers := range []int{16, 64} {
		rate := median(rates[fmt.Sprintf("beats-%d", callers)])
		b.ReportMetric(rate, fmt.Sprintf("beats-%d/s", callers))
		b.ReportMetric(rate/one, fmt.Sprintf("x-S1-%d", callers))
	}
}

// grpc is a client of the only scheduler with a node's token in its context.
func (s *stack) grpc(b *testing.B) (schedulerv1.SchedulerClient, context.Context) {
	b.Helper()
	return schedulerv1.NewSchedulerClient(s.dial(b, 0)), withToken(b.Context(), s.NodeToken)
}

// dial opens a connection of its own to a scheduler.
func (s *stack) dial(b *testing.B, scheduler int) *grpc.ClientConn {
	b.Helper()
	conn, err := grpc.NewClient("passthrough:///"+s.Schedulers[scheduler].GRPC, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = conn.Close() })
	return conn
}

func withToken(ctx context.Context, token string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
}

// spread calls f for 0 to n-1 from as many callers, and returns how many calls were made and the first error.
func spread(callers, n int, f func(int) error) (int, error) {
	var next atomic.Int64
	var failed error
	var once sync.Once
	var group sync.WaitGroup
	for range callers {
		group.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if err := f(i); err != nil {
					once.Do(func() { failed = err })
					return
				}
			}
		})
	}
	group.Wait()
	return n, failed
}
