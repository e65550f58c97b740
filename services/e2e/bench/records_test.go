package bench

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	schedulerv1 "berth/rpc/scheduler/v1"
)

// reservedAtOnce is how many reservations a round of records can use up.
const reservedAtOnce = 50_000

// reserved is a reservation that waits for its record.
type reserved struct {
	ID        string
	Placement int64
	Node      string
}

// BenchmarkRecords measures durable records a second over gRPC: each confirms a reservation of its own, binds a
// sandbox and writes its feed row. Beside them, in the same rounds, what pgbench commits: S1 is its simple
// update with one client, Smax the best of 1, 8 and 32.
func BenchmarkRecords(b *testing.B) {
	schedulers := max(dimension(b, "BERTH_BENCH_SCHEDULERS", 1), 1)
	s := start(b, "--schedulers", strconv.Itoa(schedulers), "--gateways", "1", "--nodes", "1")
	nodes := s.fakeNodes(b)
	s.preparePgbench(b)
	clients, ctx := s.clients(b, s.GatewayToken)
	callers := dimensions(b, "BERTH_BENCH_CALLERS", "64,256")
	rates := map[string][]float64{}
	var records, postgres, scheduler float64
	for b.Loop() {
		one := s.pgbench(b, 1)
		best := max(one, s.pgbench(b, 8), s.pgbench(b, 32))
		rates["S1"], rates["Smax"] = append(rates["S1"], one), append(rates["Smax"], best)
		for _, n := range callers {
			waiting := s.reserve(b, reservedAtOnce)
			name := fmt.Sprintf("callers=%d", n)
			var next atomic.Int64
			postgresBefore, schedulerBefore := treeCPU(b, s.PIDs["postgres"]), s.schedulersCPU(b)
			rate := during(b, n, func(caller int) error {
				i := int(next.Add(1)) - 1
				if i >= len(waiting) {
					return errUsedUp
				}
				r := waiting[i]
				_, err := clients[caller%len(clients)].RecordAssignment(ctx, &schedulerv1.RecordAssignmentRequest{
					SandboxId: fmt.Sprintf("record-%d", r.Placement), TenantId: "bench",
					Node:          &schedulerv1.Node{NodeId: r.Node, Endpoint: endpointOf(r.Node)},
					ReservationId: r.ID, PlacementId: r.Placement,
				})
				return err
			})
			rates[name] = append(rates[name], rate)
			records += float64(next.Load())
			postgres += treeCPU(b, s.PIDs["postgres"]) - postgresBefore
			scheduler += s.schedulersCPU(b) - schedulerBefore
			s.forgetBindings(b)
		}
	}
	nodes()
	one, best := median(rates["S1"]), median(rates["Smax"])
	b.ReportMetric(one, "S1-commits/s")
	b.ReportMetric(best, "Smax-commits/s")
	b.ReportMetric(postgres/records*1e6, "postgres-µs/record")
	b.ReportMetric(scheduler/records*1e6, "scheduler-µs/record")
	for _, n := range callers {
		rate := median(rates[fmt.Sprintf("callers=%d", n)])
		b.ReportMetric(rate, fmt.Sprintf("recorded-%d/s", n))
		b.ReportMetric(rate/one, fmt.Sprintf("x-S1-%d", n))
		b.ReportMetric(rate/best, fmt.Sprintf("x-Smax-%d", n))
	}
}

// BenchmarkLookups measures, over gRPC, LookupNode of bound sandboxes and Schedule without a hint, which picks a
// node for a call that creates nothing. Beside them pgbench's commits of one client, as a measure of the machine.
func BenchmarkLookups(b *testing.B) {
	schedulers := max(dimension(b, "BERTH_BENCH_SCHEDULERS", 1), 1)
	s := start(b, "--schedulers", strconv.Itoa(schedulers), "--gateways", "1", "--nodes", "1")
	nodes := s.fakeNodes(b)
	s.preparePgbench(b)
	clients, ctx := s.clients(b, s.GatewayToken)
	const bound = 10_000
	s.bind(b, bound)
	callers := dimensions(b, "BERTH_BENCH_CALLERS", "16,64")
	rates := map[string][]float64{}
	for b.Loop() {
		rates["S1"] = append(rates["S1"], s.pgbench(b, 1))
		for _, n := range callers {
			var next atomic.Int64
			rates[fmt.Sprintf("looked-up-%d/s", n)] = append(rates[fmt.Sprintf("looked-up-%d/s", n)], during(b, n, func(caller int) error {
				id := fmt.Sprintf("bound-%d", next.Add(7919)%bound)
				_, err := clients[caller%len(clients)].LookupNode(ctx, &schedulerv1.LookupNodeRequest{SandboxId: id})
				return err
			}))
			rates[fmt.Sprintf("picked-%d/s", n)] = append(rates[fmt.Sprintf("picked-%d/s", n)], during(b, n, func(caller int) error {
				_, err := clients[caller%len(clients)].Schedule(ctx, &schedulerv1.ScheduleRequest{})
				return err
			}))
		}
	}
	nodes()
	one := median(rates["S1"])
	b.ReportMetric(one, "S1-commits/s")
	for name, values := range rates {
		if name != "S1" {
			b.ReportMetric(median(values), name)
		}
	}
}

var errUsedUp = fmt.Errorf("all %d reservations of the round are used up", reservedAtOnce)

// during lets callers call f as fast as they are answered, for one round, and returns calls a second.
func during(b *testing.B, callers int, f func(caller int) error) float64 {
	b.Helper()
	var calls atomic.Int64
	var group sync.WaitGroup
	begun := time.Now()
	for caller := range callers {
		group.Go(func() {
			for time.Since(begun) < roundTime {
				if err := f(caller); err != nil {
					b.Error(err)
					return
				}
				calls.Add(1)
			}
		})
	}
	group.Wait()
	return float64(calls.Load()) / time.Since(begun).Seconds()
}

func endpointOf(fake string) string {
	var n int
	_, _ = fmt.Sscanf(fake, "bench-%d", &n) // names of fakeNodes
	return fmt.Sprintf("http://127.0.0.1:%d", 20_000+n)
}

// reserve makes reservations on the fake nodes, as Schedule would, and returns them in any order.
func (s *stack) reserve(b *testing.B, count int) []reserved {
	b.Helper()
	const sql = `
		WITH placed AS (
		INSERT INTO placements (tenant_id, outcome, node_id, reservation_id, cpu_millis, memory_bytes, strategy)
		SELECT 'bench', 'reserved', 'bench-' || i % $2, gen_random_uuid(), 1, 1, 'random' FROM generate_series(1, $1::bigint) AS i
		RETURNING placement_id, node_id, reservation_id, tenant_id),
		held AS (
		INSERT INTO reservations (reservation_id, n, placement_id, node_id, tenant_id, cpu_millis, memory_bytes, named, expires_at)
		SELECT reservation_id, 1, placement_id, node_id, tenant_id, 1, 1, true, clock_timestamp() + interval '1 hour' FROM placed)
		SELECT reservation_id::text, placement_id, node_id FROM placed`
	conn := s.connect(b)
	defer conn.Close(b.Context())
	rows, err := conn.Query(b.Context(), sql, count, fakeNodes)
	if err != nil {
		b.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[reserved])
	if err != nil {
		b.Fatal(err)
	}
	s.exec(b, conn, "ANALYZE placements, reservations")
	return list
}

// bind binds sandboxes "bound-0" to "bound-<count-1>" to the fake nodes. None of their rosters lists them, so
// they are as old as none that a roster ends.
func (s *stack) bind(b *testing.B, count int) {
	b.Helper()
	conn := s.connect(b)
	defer conn.Close(b.Context())
	s.exec(b, conn, fmt.Sprintf(`
		INSERT INTO bindings (sandbox_id, state, node_id, origin, bound_at)
		SELECT 'bound-' || i, 'bound', 'bench-' || i %% %d, 'recorded', clock_timestamp() + interval '1 hour'
		FROM   generate_series(0, %d) AS i`, fakeNodes, count-1))
	s.exec(b, conn, "ANALYZE bindings, nodes, node_leases")
}

func (s *stack) forgetBindings(b *testing.B) {
	b.Helper()
	conn := s.connect(b)
	defer conn.Close(b.Context())
	s.exec(b, conn, "TRUNCATE reservations, placements, bindings, route_feed")
}

func (s *stack) connect(b *testing.B) *pgx.Conn {
	b.Helper()
	conn, err := pgx.Connect(b.Context(), s.DatabaseURL)
	if err != nil {
		b.Fatal(err)
	}
	return conn
}

func (s *stack) exec(b *testing.B, conn *pgx.Conn, sql string) {
	b.Helper()
	if _, err := conn.Exec(b.Context(), sql); err != nil {
		b.Fatalf("%s: %v", sql, err)
	}
}

// clients are four connections to each scheduler, and a context with the token.
func (s *stack) clients(b *testing.B, token string) ([]schedulerv1.SchedulerClient, context.Context) {
	b.Helper()
	var clients []schedulerv1.SchedulerClient
	for range 4 {
		for i := range s.Schedulers {
			clients = append(clients, schedulerv1.NewSchedulerClient(s.dial(b, i)))
		}
	}
	return clients, withToken(b.Context(), token)
}
