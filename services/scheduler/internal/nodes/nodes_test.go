package nodes

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"berth/migrations"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// cell is a database with any number of scheduler replicas over it.
type cell struct {
	*pgtest.Database
	t *testing.T
}

func newCell(t *testing.T) *cell {
	t.Helper()
	return &cell{Database: pgtest.New(t, migrations.FS), t: t}
}

// replica is one scheduler's nodes and bindings, with the role's own grants and a running batcher.
type replica struct {
	*Nodes
	routes *bindings.Bindings
	db     *pgdb.DB
	reg    *prometheus.Registry
}

// patient is a configuration in which nothing comes due by itself.
func patient() (Config, bindings.Config) {
	cfg, routes := DefaultConfig(), bindings.DefaultConfig()
	cfg.FullReconcile = time.Hour
	return cfg, routes
}

func (c *cell) replica() *replica {
	c.t.Helper()
	return c.replicaWith(patient())
}

func (c *cell) replicaWith(cfg Config, routeCfg bindings.Config) *replica {
	c.t.Helper()
	guard, err := route.NewGuard(route.GuardConfig{CIDRs: route.DefaultCIDRs, Schemes: route.DefaultSchemes, Loopback: true})
	if err != nil {
		c.t.Fatalf("NewGuard: %v", err)
	}
	db := c.As(c.t, "berth_scheduler")
	log := slog.New(slog.DiscardHandler)
	reg := prometheus.NewRegistry()
	routes := bindings.New(db, routeCfg, log, reg)
	r := &replica{Nodes: New(db, routes, cfg, guard, log, reg), routes: routes, db: db, reg: reg}
	ctx, stop := context.WithCancel(context.WithoutCancel(c.t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- r.Batcher().Run(ctx) }()
	c.t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			c.t.Errorf("Batcher.Run = %v, want nil", err)
		}
	})
	return r
}

// exec runs sql as the owner, for what only time or an operator would do.
func (c *cell) exec(sql string, args ...any) {
	c.t.Helper()
	if _, err := c.Exec(c.t.Context(), sql, args...); err != nil {
		c.t.Fatalf("%s: %v", sql, err)
	}
}

// value reads one value.
func value[T any](c *cell, sql string, args ...any) T {
	c.t.Helper()
	rows, err := c.Query(c.t.Context(), sql, args...)
	if err != nil {
		c.t.Fatalf("%s: %v", sql, err)
	}
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		c.t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// bindingRow is what tests compare of a binding.
type bindingRow struct {
	ID          sandbox.ID
	State       sandbox.State
	Node        node.ID
	Incarnation int64
	EndedBy     string
}

func (c *cell) bindings() map[sandbox.ID]bindingRow {
	c.t.Helper()
	rows, err := c.Query(c.t.Context(), `SELECT sandbox_id, state, node_id, incarnation, COALESCE(ended_by, '') FROM bindings`)
	if err != nil {
		c.t.Fatalf("read bindings: %v", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[bindingRow])
	if err != nil {
		c.t.Fatalf("read bindings: %v", err)
	}
	found := make(map[sandbox.ID]bindingRow, len(list))
	for _, b := range list {
		found[b.ID] = b
	}
	return found
}

// feed returns how many rows the feed has.
func (c *cell) feed() int64 { return value[int64](c, `SELECT count(*) FROM route_feed`) }

func roster(ids ...string) node.Roster {
	r, skipped := node.NewRoster(ids, nil)
	if len(skipped) > 0 {
		panic("a test's roster has ids that are none")
	}
	return r
}

// beatOf returns a heartbeat of a node that registers itself at a port of its own.
func beatOf(id, instance, endpoint string, ids ...string) Beat {
	return Beat{
		Node: node.ID(id), Instance: instance, Cluster: "c1", Version: "v1", Endpoint: endpoint, Caller: "127.0.0.1",
		MayRegister: true, Roster: roster(ids...), Snapshot: &Snapshot{Status: node.Ready, CPUCount: 4, MemoryTotalBytes: 8 << 30},
	}
}

// must sends a beat that is accepted.
func (r *replica) must(t testing.TB, b Beat) Answer {
	t.Helper()
	answer, err := r.Heartbeat(t.Context(), b)
	if err != nil {
		t.Fatalf("Heartbeat(%s, %s) = %v, want it accepted", b.Node, b.Instance, err)
	}
	return answer
}

const endpointA, endpointB = "http://127.0.0.1:8001", "http://127.0.0.1:8002"

func TestAnUnknownNodeRegistersAndItsSandboxesAreAdopted(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	answer := r.must(t, beatOf("a", "i1", endpointA, "s1", "s2"))
	if answer.Epoch != 1 || answer.LeaseTTL != 30*time.Second || answer.SendFullRoster {
		t.Errorf("Heartbeat = %+v, want epoch 1 and the lease's time", answer)
	}
	want := bindingRow{ID: "s1", State: sandbox.Bound, Node: "a", Incarnation: 1}
	if got := c.bindings()["s1"]; got != want {
		t.Errorf("binding of s1 = %+v, want %+v", got, want)
	}
	if got := c.feed(); got != 3 {
		t.Errorf("feed rows = %d, want one of the node and two of its sandboxes", got)
	}
	found, err := r.routes.Lookup(t.Context(), "s2")
	if err != nil || found.Node != "a" || found.Endpoint != endpointA || found.Status != node.Ready {
		t.Errorf("Lookup(s2) = %+v, %v, want it on a, which is ready", found, err)
	}
}
