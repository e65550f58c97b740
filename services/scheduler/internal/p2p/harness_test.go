package p2p

import (
	"log/slog"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"berth/migrations"
	"berth/pkg/pgtest"
	"berth/services/internal/node"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cell is a database with any number of scheduler replicas over it.
type cell struct {
	*pgtest.Database
	t *testing.T
}

func newCell(t *testing.T) *cell {
	t.Helper()
	return &cell{Database: pgtest.New(t, migrations.FS), t: t}
}

// replica is one scheduler's index, with the role's own grants.
func (c *cell) replica(cfg Config) *Index {
	c.t.Helper()
	return New(c.As(c.t, "berth_scheduler"), cfg, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
}

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

// peer makes ids ready nodes of cluster c with a store of backend b, as heartbeats would.
func (c *cell) peer(ids ...node.ID) {
	c.t.Helper()
	for _, id := range ids {
		c.exec(`INSERT INTO nodes (node_id, cluster_id, endpoint, source) VALUES ($1, 'c', 'http://127.0.0.1:8000', 'registered')`, id)
		c.exec(`
INSERT INTO node_leases (node_id, service_instance_id, place, expires_at, last_seen_at, reported_at_unix_ms, facts_digest, roster_digest, reported_status)
VALUES ($1, 'i', 'here', now() + interval '1 hour', now(), 0, '', '', 1)`, id)
		c.exec(`INSERT INTO peer_endpoints (node_id, cluster_id, backend, address) VALUES ($1, 'c', 'b', $1 || ':9')`, id)
	}
}

// named is an artifact of cluster c and backend b.
func named(key string) Artifact { return Artifact{Cluster: "c", Backend: "b", Key: key} }

func record(t *testing.T, x *Index, key string, holders ...node.ID) {
	t.Helper()
	for _, id := range holders {
		if err := x.Record(t.Context(), named(key), id); err != nil {
			t.Fatalf("Record(%s, %s) = %v", key, id, err)
		}
	}
}

// lookup returns the nodes of a Lookup, sorted.
func lookup(t *testing.T, x *Index, key string) []node.ID {
	t.Helper()
	peers, err := x.Lookup(t.Context(), named(key), "")
	if err != nil {
		t.Fatalf("Lookup(%s) = %v", key, err)
	}
	return nodesOf(peers)
}

func nodesOf(peers []Peer) []node.ID {
	ids := make([]node.ID, len(peers))
	for i, p := range peers {
		ids[i] = p.Node
	}
	slices.Sort(ids)
	return ids
}

// keys returns all keys of the index, sorted.
func (c *cell) keys() []string {
	c.t.Helper()
	return value[[]string](c, `SELECT COALESCE(array_agg(key ORDER BY key), '{}') FROM p2p_artifacts`)
}
