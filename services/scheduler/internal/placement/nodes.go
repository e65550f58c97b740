package placement

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// nodeFacts are facts, report and holds of nodes in one snapshot. Times are judged here, on the database's
// clock. All nodes and some of them are two statements, for one plan that serves both reads all; and holds
// are summed up in one pass for all, and node by node for some.
const nodeFacts = `
SELECT  n.node_id, n.endpoint, n.cluster_id, n.capabilities, n.labels,
        COALESCE(n.machine_info ->> 'cpu_architecture', '') AS cpu_architecture, COALESCE(t.digest, '') AS cpu_template,
        n.present, n.lingering, n.cordoned, n.drain_id IS NOT NULL AS draining, n.source = 'registered' AS registered,
        COALESCE(n.cap_sandboxes, 0) AS cap_sandboxes, COALESCE(n.cap_cpu_millis, 0) AS cap_cpu_millis,
        COALESCE(n.cap_memory_bytes, 0) AS cap_memory_bytes,
        l.node_id IS NOT NULL AS heard, l.ended_at IS NOT NULL AS ended,
        COALESCE(l.ended_at IS NULL AND l.expires_at >= clock_timestamp(), false) AS lease_held,
        COALESCE(l.reported_status, 0) AS reported_status, COALESCE(l.has_snapshot, false) AS has_snapshot,
        COALESCE(l.cpu_count, 0) AS cpu_count, COALESCE(l.cpu_percent, 0) AS cpu_percent,
        COALESCE(l.allocated_cpu, 0) AS allocated_cpu, COALESCE(l.paused_allocated_cpu, 0) AS paused_allocated_cpu,
        COALESCE(l.memory_total_bytes, 0) AS memory_total_bytes, COALESCE(l.memory_used_bytes, 0) AS memory_used_bytes,
        COALESCE(l.allocated_memory_bytes, 0) AS allocated_memory_bytes,
        COALESCE(l.paused_allocated_memory_bytes, 0) AS paused_allocated_memory_bytes,
        COALESCE(l.sandbox_count, 0) AS sandbox_count, COALESCE(l.sandbox_starting_count, 0) AS sandbox_starting_count,
        COALESCE(l.paused_sandbox_count, 0) AS paused_sandbox_count,
        COALESCE(held.sandboxes, 0) AS held_sandboxes, COALESCE(held.open, 0) AS held_open,
        COALESCE(held.cpu_millis, 0) AS held_cpu_millis, COALESCE(held.memory_bytes, 0) AS held_memory_bytes
FROM    nodes AS n
LEFT    JOIN node_leases AS l ON l.node_id = n.node_id
LEFT    JOIN cpu_templates AS t ON t.cluster_id = n.cluster_id`

const selectNodesSQL = nodeFacts + `
LEFT    JOIN LATERAL (
        SELECT count(*) AS sandboxes, count(*) FILTER (WHERE r.sandbox_id IS NULL) AS open,
               LEAST(COALESCE(sum(r.cpu_millis), 0), 9223372036854775807)::bigint AS cpu_millis,
               LEAST(COALESCE(sum(r.memory_bytes), 0), 9223372036854775807)::bigint AS memory_bytes
        FROM   reservations AS r
        WHERE  r.node_id = n.node_id) AS held ON true
WHERE   n.node_id = ANY (@ids::text[])
ORDER   BY n.node_id`

const selectAllNodesSQL = nodeFacts + `
LEFT    JOIN (
        SELECT r.node_id, count(*) AS sandboxes, count(*) FILTER (WHERE r.sandbox_id IS NULL) AS open,
               LEAST(sum(r.cpu_millis), 9223372036854775807)::bigint AS cpu_millis,
               LEAST(sum(r.memory_bytes), 9223372036854775807)::bigint AS memory_bytes
        FROM   reservations AS r
        GROUP  BY r.node_id) AS held ON held.node_id = n.node_id
ORDER   BY n.node_id`

// nodeRow is a row of nodeFacts.
type nodeRow struct {
	NodeID                     node.ID
	Endpoint                   string
	ClusterID                  string
	Capabilities               []string
	Labels                     map[string]string
	CPUArchitecture            string
	CPUTemplate                []byte `db:"cpu_template"`
	Present                    bool
	Lingering                  bool
	Cordoned                   bool
	Draining                   bool
	Registered                 bool
	CapSandboxes               int64
	CapCPUMillis               int64 `db:"cap_cpu_millis"`
	CapMemoryBytes             int64
	Heard                      bool
	Ended                      bool
	LeaseHeld                  bool
	ReportedStatus             node.Status
	HasSnapshot                bool
	CPUCount                   int64 `db:"cpu_count"`
	CPUPercent                 int64 `db:"cpu_percent"`
	AllocatedCPU               int64 `db:"allocated_cpu"`
	PausedAllocatedCPU         int64 `db:"paused_allocated_cpu"`
	MemoryTotalBytes           int64
	MemoryUsedBytes            int64
	AllocatedMemoryBytes       int64
	PausedAllocatedMemoryBytes int64
	SandboxCount               int64
	SandboxStartingCount       int64
	PausedSandboxCount         int64
	HeldSandboxes              int64
	HeldOpen                   int64
	HeldCPUMillis              int64 `db:"held_cpu_millis"`
	HeldMemoryBytes            int64
}

func (r *nodeRow) node() *Node {
	return &Node{
		ID: r.NodeID, Endpoint: r.Endpoint, Cluster: r.ClusterID, Capabilities: r.Capabilities, Labels: r.Labels,
		CPUArchitecture: r.CPUArchitecture, CPUTemplate: r.CPUTemplate,
		Present: r.Present, Heard: r.Heard, Ended: r.Ended, LeaseHeld: r.LeaseHeld, Lingering: r.Lingering,
		Cordoned: r.Cordoned, Draining: r.Draining, Registered: r.Registered, Reported: r.ReportedStatus,
		Report: Report{
			Given: r.HasSnapshot, CPUCount: r.CPUCount, CPUPercent: r.CPUPercent, AllocatedCPU: r.AllocatedCPU,
			PausedCPU: r.PausedAllocatedCPU, MemoryTotalBytes: r.MemoryTotalBytes, MemoryUsedBytes: r.MemoryUsedBytes,
			AllocatedMemoryBytes: r.AllocatedMemoryBytes, PausedMemoryBytes: r.PausedAllocatedMemoryBytes,
			Sandboxes: r.SandboxCount, Starting: r.SandboxStartingCount, Paused: r.PausedSandboxCount,
		},
		Declared: Declared{r.CapSandboxes, r.CapCPUMillis, r.CapMemoryBytes},
		Held:     Held{r.HeldSandboxes, r.HeldOpen, r.HeldCPUMillis, r.HeldMemoryBytes},
	}
}

func scanNodes(rows pgx.Rows) ([]*Node, error) {
	read, err := pgx.CollectRows(rows, pgx.RowToStructByName[nodeRow])
	if err != nil {
		return nil, err
	}
	nodes := make([]*Node, len(read))
	for i := range read {
		nodes[i] = read[i].node()
	}
	return nodes, nil
}

// roomFor reports whether n may take count more sandboxes of size, judged by limits alone: what exists
// already asks for room, not for the right to be placed. But a node that is cordoned or drained has none: its
// operator was told that nothing lands there any more. The caller holds advisory.Node of n.
func roomFor(ctx context.Context, tx pgx.Tx, n node.ID, limits Limits, size sandbox.Size, count int) (bool, error) {
	rows, err := tx.Query(ctx, selectNodesSQL, pgx.StrictNamedArgs{"ids": []node.ID{n}})
	if err != nil {
		return false, fmt.Errorf("read the room of %s: %w", n, err)
	}
	row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[nodeRow])
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the room of %s: %w", n, err)
	}
	if row.Cordoned || row.Draining {
		return false, nil
	}
	return exceeded(row.node(), &limits, size, int64(count)).stage == passed, nil
}
