package bindings

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"berth/migrations"
	"berth/pkg/pgtest"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// cell is a database with bindings in it, as the scheduler's role sees it.
type cell struct {
	*Bindings
	t     *testing.T
	owner *pgtest.Database
}

func newCell(t *testing.T) *cell { return newCellWith(t, DefaultConfig()) }

func newCellWith(t *testing.T, cfg Config) *cell {
	t.Helper()
	owner := pgtest.New(t, migrations.FS)
	b := New(owner.As(t, "berth_scheduler"), cfg, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	return &cell{Bindings: b, t: t, owner: owner}
}

// replica is another scheduler over the same database.
func (c *cell) replica() *Bindings {
	c.t.Helper()
	return New(c.owner.As(c.t, "berth_scheduler"), c.cfg, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
}

// exec runs sql as the owner, for what only time or an operator would do.
func (c *cell) exec(sql string, args ...any) {
	c.t.Helper()
	if _, err := c.owner.Exec(c.t.Context(), sql, args...); err != nil {
		c.t.Fatalf("%s: %v", sql, err)
	}
}

func value[T any](c *cell, sql string, args ...any) T {
	c.t.Helper()
	rows, err := c.owner.Query(c.t.Context(), sql, args...)
	if err != nil {
		c.t.Fatalf("%s: %v", sql, err)
	}
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		c.t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// listNode makes a present node with a lease that lasts for lease; negative: it expired then.
func (c *cell) listNode(id node.ID, lease time.Duration) {
	c.t.Helper()
	c.exec(`INSERT INTO nodes (node_id, endpoint, source, cluster_id) VALUES ($1, $2, 'registered', 'c1')`, id, endpointOf(id))
	c.exec(`INSERT INTO node_leases (node_id, service_instance_id, place, expires_at, last_seen_at, reported_at_unix_ms,
	        facts_digest, roster_digest, reported_status, has_snapshot, cpu_count, memory_total_bytes)
	        VALUES ($1, 'i1', '', clock_timestamp() + $2::interval, clock_timestamp(), 0, '', '', 1, true, 8, 16000000000)`, id, lease)
}

func endpointOf(id node.ID) string { return "http://10.0.0.1:8000/" + string(id) }

type bindingRow struct {
	State       sandbox.State
	Node        node.ID
	Revision    int64
	Incarnation int64
	Tenant      string
	CPUMillis   int64
	EndedBy     string
}

func (c *cell) row(id sandbox.ID) bindingRow {
	c.t.Helper()
	rows, err := c.owner.Query(c.t.Context(), `SELECT state, node_id, revision, incarnation, tenant_id, cpu_millis, COALESCE(ended_by, '')
		FROM bindings WHERE sandbox_id = $1`, id)
	if err != nil {
		c.t.Fatalf("read binding of %s: %v", id, err)
	}
	row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[bindingRow])
	if err != nil {
		c.t.Fatalf("read binding of %s: %v", id, err)
	}
	return row
}

func (c *cell) feed() int64 { return value[int64](c, `SELECT count(*) FROM route_feed`) }

// holds returns how many holds a node has.
func (c *cell) holds(id node.ID) int64 {
	return value[int64](c, `SELECT count(*) FROM reservations WHERE node_id = $1`, id)
}

func on(n node.ID, ids ...sandbox.ID) Assignment {
	return Assignment{Sandboxes: ids, Node: n, Endpoint: endpointOf(n), Size: sandbox.Size{CPUMillis: 500, MemoryBytes: 1 << 20}}
}

func (c *cell) mustRecord(a Assignment) Assigned {
	c.t.Helper()
	assigned, err := c.Record(c.t.Context(), a)
	if err != nil {
		c.t.Fatalf("Record(%v on %s) = %v, want it recorded", a.Sandboxes, a.Node, err)
	}
	return assigned[0]
}

// reconcile is one roster of a node, in a transaction of its own.
func (c *cell) reconcile(ctx context.Context, n node.ID, listed ...string) (out Outcome, err error) {
	roster, _ := node.NewRoster(listed, nil)
	for {
		err = c.db.Tx(ctx, func(tx pgx.Tx) error {
			out, err = c.Reconcile(ctx, tx, Report{Node: n, Cluster: "c1", Roster: roster})
			return err
		})
		if err == nil || !isRaced(err) {
			return out, err
		}
	}
}

func (c *cell) mustReconcile(n node.ID, listed ...string) Outcome {
	c.t.Helper()
	out, err := c.reconcile(c.t.Context(), n, listed...)
	if err != nil {
		c.t.Fatalf("Reconcile(%s) = %v, want none", n, err)
	}
	return out
}

// deadlocks returns how many the database has seen. The schedulers' pools are closed by then: a session
// tells its numbers at the latest when it ends.
func (c *cell) deadlocks() int64 {
	c.t.Helper()
	for value[int64](c, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pgtest as %'`) > 0 {
		if c.t.Context().Err() != nil {
			c.t.Fatal("sessions of closed pools do not end")
		}
	}
	return value[int64](c, `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`)
}
