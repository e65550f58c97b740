package bench

import (
	"context"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	schedulerv1 "berth/rpc/scheduler/v1"
)

const (
	fleetPeriod = 5 * time.Second // between two heartbeats of a node, as AgentENV's and ours send them
	fleetLimit  = 10 * time.Second
	prepareAt   = 32 // nodes that are made known at once

	// fleetWarmUp is how long the fleet beats before it is measured: each node thrice.
	fleetWarmUp = 3 * fleetPeriod
)

// BenchmarkFleet lets simulated nodes beat as nodes do, every five seconds, each on a connection of its own and
// each with its whole roster, against one PostgreSQL and two schedulers, for a minute. It shows what that costs:
// CPU of PostgreSQL and of the schedulers in cores, WAL, rows, and how long a heartbeat takes. The CPU of the
// simulated nodes is shown apart. An operation is the minute, so -benchtime is 1x.
func BenchmarkFleet(b *testing.B) {
	f := &fleet{
		churn:  dimension(b, "BERTH_BENCH_CHURN", 0),
		roster: dimension(b, "BERTH_BENCH_ROSTER", 500),
		length: time.Duration(dimension(b, "BERTH_BENCH_SECONDS", 60)) * time.Second,
	}
	count := dimension(b, "BERTH_BENCH_NODES", 1000)
	schedulers := max(dimension(b, "BERTH_BENCH_SCHEDULERS", 2), 1)
	f.stack = start(b, "--schedulers", fmt.Sprint(schedulers), "--gateways", "1", "--nodes", "1")
	f.assemble(b, count)
	for b.Loop() {
		f.measure(b)
	}
}

// fleet is many simulated nodes.
type fleet struct {
	*stack
	nodes         []*fleetNode
	roster, churn int
	length        time.Duration
}

type fleetNode struct {
	name    string
	client  schedulerv1.SchedulerClient
	phase   time.Duration // of its heartbeats within the period
	ids     []string      // its sandboxes; the oldest, where some were replaced, is at replace
	replace int
	made    int
	beats   int64
	took    []time.Duration
	failed  int
	why     error // of the first that failed
}

// assemble makes the nodes and the bindings of their rosters known, as if the fleet had been there for an hour.
func (f *fleet) assemble(b *testing.B, count int) {
	b.Helper()
	conn := f.connect(b)
	defer conn.Close(b.Context())
	for i := range count {
		name := fmt.Sprintf("fleet-%d", i)
		dialed, err := grpc.NewClient("passthrough:///"+f.Schedulers[i%len(f.Schedulers)].GRPC, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = dialed.Close() })
		hash := fnv.New32a()
		_, _ = hash.Write([]byte(name)) // never fails
		n := &fleetNode{
			name: name, client: schedulerv1.NewSchedulerClient(dialed),
			phase: time.Duration(hash.Sum32()) % fleetPeriod,
		}
		for range f.roster {
			n.ids = append(n.ids, n.draw())
		}
		f.nodes = append(f.nodes, n)
	}
	begun := time.Now()
	for range 2 { // the first beat makes a node known, with an empty roster; the second gives it its labels of now
		if _, err := spread(prepareAt, count, func(i int) error { return f.nodes[i].beat(withToken(b.Context(), f.NodeToken), i, nil) }); err != nil {
			b.Fatalf("make the nodes known: %v", err)
		}
	}
	f.exec(b, conn, fmt.Sprintf(`
		INSERT INTO bindings (sandbox_id, state, node_id, origin, bound_at)
		SELECT 'fleet-' || n || '-' || i, 'bound', 'fleet-' || n, 'recorded', clock_timestamp() - interval '1 hour'
		FROM   generate_series(0, %d) AS n, generate_series(1, %d) AS i`, count-1, f.roster))
	f.exec(b, conn, "VACUUM ANALYZE")
	for range 2 { // compared once in full, then steady
		if _, err := spread(prepareAt, count, func(i int) error {
			return f.nodes[i].beat(withToken(b.Context(), f.NodeToken), i, f.nodes[i].ids)
		}); err != nil {
			b.Fatalf("bring the first rosters: %v", err)
		}
	}
	f.exec(b, conn, "CHECKPOINT")
	b.Logf("%d nodes with %d sandboxes each were there after %.0f s", count, f.roster, time.Since(begun).Seconds())
}

// draw returns the id of a sandbox that this node has not had.
func (n *fleetNode) draw() string {
	n.made++
	return fmt.Sprintf("%s-%d", n.name, n.made)
}

func (n *fleetNode) beat(ctx context.Context, i int, ids []string) error {
	ctx, cancel := context.WithTimeout(ctx, fleetLimit)
	defer cancel()
	n.beats++
	_, err := n.client.Heartbeat(ctx, &schedulerv1.HeartbeatRequest{
		NodeId: n.name, ServiceInstanceId: "fleet", Endpoint: fmt.Sprintf("http://127.0.0.1:%d", 20_000+i), Seq: n.beats, SandboxIds: ids,
		Snapshot: &schedulerv1.NodeSnapshot{
			Status: schedulerv1.NodeStatus_NODE_STATUS_READY, CpuCount: 64, MemoryTotalBytes: 1 << 40, MemoryUsedBytes: uint64(n.beats) << 20,
			CpuPercent: uint32(n.beats % 100), SandboxCount: uint32(len(ids)), AllocatedCpu: uint32(len(ids)),
			AllocatedMemoryBytes: uint64(len(ids)) << 30, ReportedAtUnixMs: time.Now().UnixMilli(),
		},
	})
	if err != nil {
		return fmt.Errorf("heartbeat of %s: %w", n.name, err)
	}
	return nil
}

// run beats in n's phase until ctx ends. Each beat has churn of its sandboxes replaced, the oldest first.
func (n *fleetNode) run(ctx context.Context, i, churn int) {
	timer := time.NewTimer(n.phase)
	defer timer.Stop()
	next := time.Now().Add(n.phase)
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		for range churn {
			n.ids[n.replace] = n.draw()
			n.replace = (n.replace + 1) % len(n.ids)
		}
		begun := time.Now()
		if err := n.beat(context.WithoutCancel(ctx), i, n.ids); err != nil { // a beat that has begun is answered
			n.failed++
			n.why = err
		}
		n.took = append(n.took, time.Since(begun))
		next = next.Add(fleetPeriod)
		timer.Reset(time.Until(next)) // at once where the last answer was late
	}
}

// measure runs the fleet and shows what the measured time cost.
func (f *fleet) measure(b *testing.B) {
	b.Helper()
	ctx, cancel := context.WithCancel(withToken(b.Context(), f.NodeToken))
	defer cancel()
	var group sync.WaitGroup
	for i, n := range f.nodes {
		group.Go(func() { n.run(ctx, i, f.churn) })
	}
	pause(b, fleetWarmUp)
	profiles := f.profile(b, f.length)
	before := f.sample(b)
	pause(b, f.length)
	after := f.sample(b)
	cancel()
	group.Wait()
	profiles()

	var took []time.Duration
	failed := 0
	for _, n := range f.nodes {
		if n.failed > 0 && failed == 0 {
			b.Logf("one of the heartbeats that failed: %v", n.why)
		}
		failed += n.failed
		took, n.took, n.failed = append(took, n.took...), nil, 0
	}
	if failed > len(took)/100 {
		b.Errorf("%d of %d heartbeats failed", failed, len(took))
	}
	f.show(b, before, after)
	b.ReportMetric(milliseconds(quantile(took, 0.5)), "p50-ms")
	b.ReportMetric(milliseconds(quantile(took, 0.99)), "p99-ms")
	b.ReportMetric(float64(failed), "failed-beats")
	b.ReportMetric(0, "ns/op")
}

// show tells what the time between two samples cost, in the log too: of a benchmark that fails nothing else is shown.
func (f *fleet) show(b *testing.B, before, after costs) {
	b.Helper()
	seconds := after.at.Sub(before.at).Seconds()
	beats := float64(after.renewed - before.renewed)
	postgres, schedulers := after.postgres-before.postgres, after.schedulers-before.schedulers
	wal := float64(after.wal - before.wal)
	for _, m := range []struct {
		unit  string
		value float64
	}{
		{"beats/s", beats / seconds},
		{"postgres-cores", postgres / seconds},
		{"scheduler-cores", schedulers / seconds},
		{"nodes-cores", (after.self - before.self) / seconds},
		{"postgres-µs/beat", postgres / beats * 1e6},
		{"scheduler-µs/beat", schedulers / beats * 1e6},
		{"WAL-kB/s", wal / seconds / 1000},
		{"WAL-B/beat", wal / beats},
	} {
		b.ReportMetric(m.value, m.unit)
		b.Logf("%10.2f %s", m.value, m.unit)
	}
	for _, table := range slices.Sorted(maps.Keys(after.rows)) {
		was, is := before.rows[table], after.rows[table]
		if is != was {
			b.Logf("%s: %d rows inserted, %d updated (%d HOT), %d deleted", table, is[0]-was[0], is[1]-was[1], is[2]-was[2], is[3]-was[3])
		}
	}
	b.Logf("full-page images: %d of the WAL's bytes", after.images-before.images)
}

// pause waits for d, or until the benchmark's own time is over.
func pause(b *testing.B, d time.Duration) {
	b.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-b.Context().Done():
		b.Fatal("interrupted")
	}
}

// costs are counters that only grow.
type costs struct {
	at                         time.Time
	postgres, schedulers, self float64 // seconds of CPU
	wal, images                int64   // bytes
	renewed                    int64   // heartbeats, as the leases' sequence numbers have them
	rows                       map[string][4]int64
}

func (f *fleet) sample(b *testing.B) costs {
	b.Helper()
	out := costs{at: time.Now(), rows: map[string][4]int64{}, postgres: treeCPU(b, f.PIDs["postgres"]), schedulers: f.schedulersCPU(b), self: selfCPU(b)}
	conn := f.connect(b)
	defer conn.Close(b.Context())
	err := conn.QueryRow(b.Context(), `SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint,
		(SELECT wal_fpi FROM pg_stat_wal) * current_setting('block_size')::bigint,
		(SELECT sum(node_seq)::bigint FROM node_leases)`).Scan(&out.wal, &out.images, &out.renewed)
	if err != nil {
		b.Fatal(err)
	}
	rows, err := conn.Query(b.Context(), `SELECT relname::text, n_tup_ins, n_tup_upd, n_tup_hot_upd, n_tup_del FROM pg_stat_user_tables`)
	if err != nil {
		b.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var table string
		var n [4]int64
		if err := rows.Scan(&table, &n[0], &n[1], &n[2], &n[3]); err != nil {
			b.Fatal(err)
		}
		out.rows[table] = n
	}
	if err := rows.Err(); err != nil {
		b.Fatal(err)
	}
	return out
}

// profile takes CPU profiles of the schedulers for d where BERTH_BENCH_PROFILES says where to, and returns what
// waits for them.
func (f *fleet) profile(b *testing.B, d time.Duration) func() {
	b.Helper()
	folder := os.Getenv("BERTH_BENCH_PROFILES")
	if folder == "" {
		return func() {}
	}
	var group sync.WaitGroup
	for i, s := range f.Schedulers {
		url := fmt.Sprintf("http://%s/debug/pprof/profile?seconds=%d", argument(b, s.PID, "--admin-listen"), int(d.Seconds()))
		group.Go(func() {
			if err := download(b.Context(), url, filepath.Join(folder, fmt.Sprintf("scheduler-%d.pprof", i+1))); err != nil {
				b.Errorf("profile: %v", err)
			}
		})
	}
	return group.Wait
}

func download(ctx context.Context, url, to string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s %s", url, answer.Status, text)
	}
	return os.WriteFile(to, text, 0o600)
}

// argument returns the value of a flag of a running process.
func argument(b *testing.B, pid int, flag string) string {
	b.Helper()
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		b.Fatal(err)
	}
	words := strings.Split(string(line), "\x00")
	i := slices.Index(words, flag)
	if i < 0 || i+1 == len(words) {
		b.Fatalf("process %d has no %s", pid, flag)
	}
	return words[i+1]
}
