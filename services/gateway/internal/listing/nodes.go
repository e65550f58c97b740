package listing

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// Store reads what lists need; it never writes.
type Store struct{ db *pgdb.DB }

// NewStore returns a Store on a pool whose role may read nodes, leases and bindings.
func NewStore(db *pgdb.DB) *Store { return &Store{db: db} }

// Node is an observed node as clients see it: everything but where it is.
type Node struct {
	ID                    node.ID `json:"id"`
	ServiceInstanceID     string  `json:"serviceInstanceID"`
	ClusterID             string  `json:"clusterID"`
	Version               string  `json:"version"`
	Commit                string  `json:"commit"`
	Status                string  `json:"status"`
	MachineInfo           Machine `json:"machineInfo"`
	SandboxCount          int     `json:"sandboxCount"`
	SandboxStartingCount  int     `json:"sandboxStartingCount"`
	SandboxPausedCount    int     `json:"sandboxPausedCount"`
	CreateSuccesses       int64   `json:"createSuccesses"`
	CreateFails           int64   `json:"createFails"`
	Metrics               Metrics `json:"metrics"`
	PausedAllocatedCPU    int     `json:"pausedAllocatedCPU"`
	PausedAllocatedMemory int64   `json:"pausedAllocatedMemoryBytes"`
}

// Machine is what a node runs on.
type Machine struct {
	CPUFamily       string `json:"cpuFamily"`
	CPUModel        string `json:"cpuModel"`
	CPUModelName    string `json:"cpuModelName"`
	CPUArchitecture string `json:"cpuArchitecture"`
}

// Metrics is what a node uses.
type Metrics struct {
	AllocatedCPU         int    `json:"allocatedCPU"`
	AllocatedMemoryBytes int64  `json:"allocatedMemoryBytes"`
	CPUPercent           int    `json:"cpuPercent"`
	CPUCount             int    `json:"cpuCount"`
	MemoryUsedBytes      int64  `json:"memoryUsedBytes"`
	MemoryTotalBytes     int64  `json:"memoryTotalBytes"`
	Disks                []Disk `json:"disks"`
}

// Disk is one file system of a node.
type Disk struct {
	MountPoint     string `json:"mountPoint"`
	Device         string `json:"device"`
	FilesystemType string `json:"filesystemType"`
	UsedBytes      uint64 `json:"usedBytes"`
	TotalBytes     uint64 `json:"totalBytes"`
}

// listNodesSQL reads the nodes that were heard and have not unregistered; an empty cluster is any.
const listNodesSQL = `
SELECT  n.node_id, n.cluster_id, n.version, n.commit, n.machine_info, n.disks,
        n.present, (n.lingering OR n.cordoned OR n.drain_id IS NOT NULL) AS leaving,
        l.service_instance_id, l.reported_status, l.expires_at > clock_timestamp() AS lease_held,
        l.sandbox_count, l.sandbox_starting_count, l.paused_sandbox_count, l.create_successes, l.create_fails,
        l.allocated_cpu, l.allocated_memory_bytes, l.cpu_percent, l.cpu_count, l.memory_used_bytes,
        l.memory_total_bytes, l.paused_allocated_cpu, l.paused_allocated_memory_bytes
FROM    nodes AS n
JOIN    node_leases AS l ON l.node_id = n.node_id
WHERE   l.ended_at IS NULL
AND     (@cluster = '' OR n.cluster_id = @cluster)
AND     (@node = '' OR n.node_id = @node)
ORDER   BY n.node_id`

type nodeRow struct {
	NodeID                     node.ID
	ClusterID                  string
	Version                    string
	Commit                     string
	MachineInfo                []byte
	Disks                      []byte
	Present                    bool
	Leaving                    bool
	ServiceInstanceID          string
	ReportedStatus             node.Status
	LeaseHeld                  bool
	SandboxCount               int
	SandboxStartingCount       int
	PausedSandboxCount         int
	CreateSuccesses            int64
	CreateFails                int64
	AllocatedCPU               int
	AllocatedMemoryBytes       int64
	CPUPercent                 int
	CPUCount                   int
	MemoryUsedBytes            int64
	MemoryTotalBytes           int64
	PausedAllocatedCPU         int
	PausedAllocatedMemoryBytes int64
}

// Nodes returns the observed nodes of a cluster, sorted by id; "" is every cluster.
func (s *Store) Nodes(ctx context.Context, cluster string) ([]Node, error) {
	return s.nodes(ctx, cluster, "")
}

// Node returns one observed node, or node.ErrNotObserved.
func (s *Store) Node(ctx context.Context, cluster string, id node.ID) (Node, error) {
	found, err := s.nodes(ctx, cluster, id)
	if err != nil {
		return Node{}, err
	}
	if len(found) == 0 {
		return Node{}, node.ErrNotObserved
	}
	return found[0], nil
}

// readLimit bounds a read that nothing else bounds: PostgreSQL's own limit does not hold where it is
// frozen or cut off.
const readLimit = 2 * time.Second

func (s *Store) nodes(ctx context.Context, cluster string, id node.ID) ([]Node, error) {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	rows, err := s.db.Query(ctx, listNodesSQL, pgx.StrictNamedArgs{"cluster": cluster, "node": id})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[nodeRow])
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	nodes := make([]Node, 0, len(found))
	for _, row := range found {
		nodes = append(nodes, row.node())
	}
	return nodes, nil
}

func (r nodeRow) effective() node.Status {
	return node.Standing{LeaseHeld: r.LeaseHeld, Present: r.Present, Leaving: r.Leaving, Reported: r.ReportedStatus}.Effective()
}

func (r nodeRow) node() Node {
	return Node{
		ID: r.NodeID, ServiceInstanceID: r.ServiceInstanceID, ClusterID: r.ClusterID, Version: r.Version, Commit: r.Commit,
		Status: word(r.effective()), MachineInfo: machine(r.MachineInfo), SandboxCount: r.SandboxCount,
		SandboxStartingCount: r.SandboxStartingCount, SandboxPausedCount: r.PausedSandboxCount,
		CreateSuccesses: r.CreateSuccesses, CreateFails: r.CreateFails,
		Metrics: Metrics{
			AllocatedCPU: r.AllocatedCPU, AllocatedMemoryBytes: r.AllocatedMemoryBytes, CPUPercent: r.CPUPercent,
			CPUCount: r.CPUCount, MemoryUsedBytes: r.MemoryUsedBytes, MemoryTotalBytes: r.MemoryTotalBytes, Disks: disks(r.Disks),
		},
		PausedAllocatedCPU: r.PausedAllocatedCPU, PausedAllocatedMemory: r.PausedAllocatedMemoryBytes,
	}
}

// word spells a status as E2B's API does: a node that leaves is draining.
func word(s node.Status) string {
	if s == node.Lingering {
		return "draining"
	}
	return s.String()
}

// machine reads the facts as the scheduler stores them: the names of scheduler.v1's MachineInfo.
func machine(text []byte) Machine {
	var stored struct {
		CPUFamily       string `json:"cpu_family"`
		CPUModel        string `json:"cpu_model"`
		CPUModelName    string `json:"cpu_model_name"`
		CPUArchitecture string `json:"cpu_architecture"`
	}
	if len(text) == 0 || json.Unmarshal(text, &stored) != nil {
		return Machine{}
	}
	return Machine(stored)
}

// disks reads them as the scheduler stores them: the names of scheduler.v1's DiskMetric.
func disks(text []byte) []Disk {
	var stored []struct {
		MountPoint     string `json:"mount_point"`
		Device         string `json:"device"`
		FilesystemType string `json:"filesystem_type"`
		UsedBytes      uint64 `json:"used_bytes"`
		TotalBytes     uint64 `json:"total_bytes"`
	}
	found := []Disk{}
	if len(text) == 0 || json.Unmarshal(text, &stored) != nil {
		return found
	}
	for _, disk := range stored {
		found = append(found, Disk(disk))
	}
	return found
}

// askable is one node a list should ask.
type askable struct {
	NodeID    node.ID
	LeaseHeld bool
	Status    node.Status
}

// askableSQL reads every observed node that is still listed; who is asked is decided in Go.
const askableSQL = `
SELECT  n.node_id, l.expires_at > clock_timestamp() AS lease_held, l.reported_status AS status
FROM    nodes AS n
JOIN    node_leases AS l ON l.node_id = n.node_id
WHERE   n.present AND l.ended_at IS NULL
ORDER   BY n.node_id`

func (s *Store) askable(ctx context.Context) ([]askable, error) {
	rows, err := s.db.Query(ctx, askableSQL)
	if err != nil {
		return nil, fmt.Errorf("read nodes to ask: %w", err)
	}
	nodes, err := pgx.CollectRows(rows, pgx.RowToStructByName[askable])
	if err != nil {
		return nil, fmt.Errorf("read nodes to ask: %w", err)
	}
	return nodes, nil
}

// bound is whose a sandbox is and where.
type bound struct {
	SandboxID sandbox.ID
	NodeID    node.ID
	TenantID  string
}

const boundSQL = `
SELECT  sandbox_id, node_id, tenant_id
FROM    bindings
WHERE   sandbox_id = ANY (@ids::text[])
AND     state = 'bound'`

func (s *Store) bound(ctx context.Context, ids []sandbox.ID) (map[sandbox.ID]bound, error) {
	rows, err := s.db.Query(ctx, boundSQL, pgx.StrictNamedArgs{"ids": ids})
	if err != nil {
		return nil, fmt.Errorf("read bindings of a list: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[bound])
	if err != nil {
		return nil, fmt.Errorf("read bindings of a list: %w", err)
	}
	byID := make(map[sandbox.ID]bound, len(found))
	for _, b := range found {
		byID[b.SandboxID] = b
	}
	return byID, nil
}

// ErrUnavailable means that no node answered, or that none is known.
var ErrUnavailable = errors.New("cluster list unavailable")
