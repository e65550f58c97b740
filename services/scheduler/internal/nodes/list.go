package nodes

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
)

const selectObservedSQL = `
SELECT  n.node_id, n.endpoint, n.cluster_id, n.version, n.commit, n.machine_info, n.cpu_config_json, n.cpu_config_error, n.disks,
        n.labels, n.capabilities, n.cordoned, n.drain_id, n.present, n.lingering OR n.cordoned OR n.drain_id IS NOT NULL AS leaving,
        l.service_instance_id, l.epoch, l.expires_at, l.last_seen_at, l.reported_at_unix_ms, l.skew_ms, l.create_successes, l.create_fails,
        l.memory_used_bytes, l.memory_total_bytes, l.allocated_memory_bytes, l.paused_allocated_memory_bytes, l.cpu_percent,
        l.cpu_count, l.allocated_cpu, l.paused_allocated_cpu, l.sandbox_count, l.sandbox_starting_count, l.paused_sandbox_count,
        l.reported_status, clock_timestamp() AS as_of
FROM    node_leases AS l
JOIN    nodes AS n ON n.node_id = l.node_id
WHERE   l.ended_at IS NULL AND (@node::text = '' OR l.node_id = @node) AND (@cluster::text = '' OR n.cluster_id = @cluster)
ORDER   BY l.node_id`

type observedRow struct {
	NodeID                     node.ID
	Endpoint                   string
	ClusterID                  string
	Version                    string
	Commit                     string
	MachineInfo                *Machine
	CPUConfigJSON              string `db:"cpu_config_json"`
	CPUConfigError             string `db:"cpu_config_error"`
	Disks                      []Disk
	Labels                     map[string]string
	Capabilities               []string
	Cordoned                   bool
	DrainID                    *int64
	Present                    bool
	Leaving                    bool
	ServiceInstanceID          string
	Epoch                      int64
	ExpiresAt                  time.Time
	LastSeenAt                 time.Time
	ReportedAtUnixMS           int64  `db:"reported_at_unix_ms"`
	SkewMS                     *int32 `db:"skew_ms"`
	CreateSuccesses            int64
	CreateFails                int64
	MemoryUsedBytes            int64
	MemoryTotalBytes           int64
	AllocatedMemoryBytes       int64
	PausedAllocatedMemoryBytes int64
	CPUPercent                 int32 `db:"cpu_percent"`
	CPUCount                   int32 `db:"cpu_count"`
	AllocatedCPU               int32 `db:"allocated_cpu"`
	PausedAllocatedCPU         int32 `db:"paused_allocated_cpu"`
	SandboxCount               int32
	SandboxStartingCount       int32
	PausedSandboxCount         int32
	ReportedStatus             node.Status
	AsOf                       time.Time
}

// ListObserved returns the nodes that were heard and have not unregistered, by id, with their
// effective status. cluster is compared exactly, after trimming; blank means all.
func (n *Nodes) ListObserved(ctx context.Context, cluster string) ([]Observed, error) {
	return n.observed(ctx, "", cluster)
}

// Get returns one observed node. One that is not observed, or is in another cluster than asked for, is
// node.ErrNotObserved.
func (n *Nodes) Get(ctx context.Context, id node.ID, cluster string) (Observed, error) {
	found, err := n.observed(ctx, id, cluster)
	if err != nil {
		return Observed{}, err
	}
	if len(found) == 0 {
		return Observed{}, node.ErrNotObserved
	}
	return found[0], nil
}

func (n *Nodes) observed(ctx context.Context, id node.ID, cluster string) ([]Observed, error) {
	rows, err := n.db.Query(ctx, selectObservedSQL, pgx.StrictNamedArgs{"node": id, "cluster": strings.TrimSpace(cluster)})
	if err != nil {
		return nil, fmt.Errorf("read observed nodes: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByName[observedRow])
	if err != nil {
		return nil, fmt.Errorf("read observed nodes: %w", err)
	}
	observed := make([]Observed, len(list))
	for i, r := range list {
		observed[i] = r.observed()
	}
	return observed, nil
}

func (r *observedRow) standing() node.Standing {
	return node.Standing{LeaseHeld: !r.ExpiresAt.Before(r.AsOf), Present: r.Present, Leaving: r.Leaving, Reported: r.ReportedStatus}
}

func (r *observedRow) observed() Observed {
	o := Observed{
		ID: r.NodeID, Endpoint: r.Endpoint, Cluster: r.ClusterID, Instance: r.ServiceInstanceID, Version: r.Version,
		Commit: r.Commit, Machine: r.MachineInfo, LastSeen: r.LastSeenAt, LeaseLeft: r.ExpiresAt.Sub(r.AsOf), Epoch: r.Epoch,
		Cordoned: r.Cordoned, Labels: r.Labels, Capabilities: r.Capabilities, ConfigError: r.CPUConfigError,
		Snapshot: Snapshot{
			Status: r.standing().Effective(), AllocatedCPU: uint32(r.AllocatedCPU), AllocatedMemoryBytes: uint64(r.AllocatedMemoryBytes),
			CPUPercent: uint32(r.CPUPercent), CPUCount: uint32(r.CPUCount), MemoryUsedBytes: uint64(r.MemoryUsedBytes),
			MemoryTotalBytes: uint64(r.MemoryTotalBytes), Disks: r.Disks, SandboxCount: uint32(r.SandboxCount),
			SandboxStartingCount: uint32(r.SandboxStartingCount), CreateSuccesses: uint64(r.CreateSuccesses),
			CreateFails: uint64(r.CreateFails), ReportedAtUnixMS: r.ReportedAtUnixMS, PausedSandboxCount: uint32(r.PausedSandboxCount),
			PausedAllocatedCPU: uint32(r.PausedAllocatedCPU), PausedAllocatedMemoryBytes: uint64(r.PausedAllocatedMemoryBytes),
		},
	}
	if o.Machine != nil {
		o.Machine.CPUConfig = r.CPUConfigJSON
	}
	if r.DrainID != nil {
		o.DrainID = *r.DrainID
	}
	if r.SkewMS != nil {
		o.SkewMS = int64(*r.SkewMS)
	}
	if o.Snapshot.ReportedAtUnixMS == 0 {
		o.Snapshot.ReportedAtUnixMS = r.LastSeenAt.UnixMilli()
	}
	return o
}

const selectPresentSQL = `
SELECT  node_id, endpoint
FROM    nodes
WHERE   present AND (@cluster::text = '' OR cluster_id = @cluster)
ORDER   BY node_id`

// ListPresent returns the nodes that a source lists, by id, whatever their status. cluster is compared
// exactly, after trimming; blank means all.
func (n *Nodes) ListPresent(ctx context.Context, cluster string) ([]Member, error) {
	rows, err := n.db.Query(ctx, selectPresentSQL, pgx.StrictNamedArgs{"cluster": strings.TrimSpace(cluster)})
	if err != nil {
		return nil, fmt.Errorf("read present nodes: %w", err)
	}
	members, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Member])
	if err != nil {
		return nil, fmt.Errorf("read present nodes: %w", err)
	}
	return members, nil
}
