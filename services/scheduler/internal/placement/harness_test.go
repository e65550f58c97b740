package placement

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"berth/migrations"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

func TestMain(m *testing.M) {
	// The pools that pgtest opens end with their tests; the server outlives them.
	goleak.VerifyTestMain(m, goleak.IgnoreCurrent())
}

const gib = int64(1) << 30

// size is a sandbox of one vCPU and 1 GiB.
func size() sandbox.Size { return sandbox.Size{CPUMillis: 1000, MemoryBytes: gib} }

// testNode is a row of nodes with its lease.
type testNode struct {
	id           string
	capacity     int64 // declared sandboxes; 0: none
	cluster      string
	capabilities []string
	silent       bool // never sent a heartbeat
	dead         bool // its lease has expired
	running      int64
	cordoned     bool
}

const insertTestNodeSQL = `
INSERT INTO nodes (node_id, endpoint, source, cluster_id, capabilities, cap_sandboxes, cordoned)
VALUES (@id, 'http://10.0.0.1:8000', 'static', @cluster, @capabilities, nullif(@capacity::int, 0), @cordoned)`

const insertTestLeaseSQL = `
INSERT INTO node_leases (node_id, service_instance_id, place, expires_at, last_seen_at, reported_at_unix_ms, reported_status, has_snapshot,
       cpu_count, memory_total_bytes, sandbox_count, facts_digest, roster_digest)
VALUES (@id, 'instance', 'place', clock_timestamp() + @left::interval, clock_timestamp(), 0, 1, true, 8, 17179869184, @running, '', '')`

func addNode(t testing.TB, db *pgdb.DB, n testNode) {
	t.Helper()
	if n.capabilities == nil {
		n.capabilities = []string{}
	}
	ctx := t.Context()
	if _, err := db.Exec(ctx, insertTestNodeSQL, pgx.StrictNamedArgs{
		"id": n.id, "cluster": n.cluster, "capabilities": n.capabilities, "capacity": n.capacity, "cordoned": n.cordoned,
	}); err != nil {
		t.Fatalf("add node %s: %v", n.id, err)
	}
	if n.silent {
		return
	}
	left := time.Hour
	if n.dead {
		left = -time.Hour
	}
	if _, err := db.Exec(ctx, insertTestLeaseSQL, pgx.StrictNamedArgs{"id": n.id, "left": left, "running": n.running}); err != nil {
		t.Fatalf("add lease of %s: %v", n.id, err)
	}
}

// newDB returns a database with nodes node-0 … of the given capacity each.
func newDB(t testing.TB, nodes int, capacity int64) *pgtest.Database {
	t.Helper()
	db := pgtest.New(t, migrations.FS)
	for i := range nodes {
		addNode(t, db.DB, testNode{id: fmt.Sprintf("node-%d", i), capacity: capacity})
	}
	return db
}

// startPlacer returns a running Placer over db with the scheduler's rights.
func startPlacer(t testing.TB, db *pgtest.Database, cfg Config) *Placer {
	t.Helper()
	p := New(db.As(t, "berth_scheduler"), cfg, slog.New(slog.DiscardHandler), nil)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		if err := p.Run(ctx); err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	return p
}

func request() Request { return Request{Tenant: "default", Size: size(), Count: 1, Named: true} }

// keyed is a request with a request id.
func keyed(id string) Request {
	r := request()
	r.RequestID, r.Fingerprint = id, []byte{1}
	return r
}

// heldOn returns how many holds each node has.
func heldOn(t testing.TB, db *pgdb.DB) map[node.ID]int {
	t.Helper()
	rows, err := db.Query(t.Context(), "SELECT node_id, count(*) AS holds FROM reservations GROUP BY node_id")
	if err != nil {
		t.Fatalf("count holds: %v", err)
	}
	type count struct {
		NodeID node.ID
		Holds  int
	}
	counts, err := pgx.CollectRows(rows, pgx.RowToStructByName[count])
	if err != nil {
		t.Fatalf("count holds: %v", err)
	}
	held := map[node.ID]int{}
	for _, c := range counts {
		held[c.NodeID] = c.Holds
	}
	return held
}

// one returns the single value that query selects.
func one[T any](t testing.TB, db *pgdb.DB, query string, args ...any) T {
	t.Helper()
	var value T
	if err := db.QueryRow(t.Context(), query, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return value
}

func sumOf(held map[node.ID]int) (all int) {
	for _, n := range held {
		all += n
	}
	return all
}

type sandboxID = sandbox.ID

func ids(all ...sandboxID) []sandboxID { return all }

func newID(t testing.TB) sandbox.ID {
	t.Helper()
	id, err := sandbox.NewID()
	if err != nil {
		t.Fatalf("NewID: %v", err)
	}
	return id
}
