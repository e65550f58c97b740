package api

import (
	"crypto/sha256"
	"fmt"
	"math"
	"net/netip"
	"strings"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/nodes"
	"berth/services/scheduler/internal/p2p"
	"berth/services/scheduler/internal/placement"
)

// Bounds of what callers may send.
const (
	maxKeyBytes         = 255
	maxLabels           = 64
	maxLabelBytes       = 63
	maxArtifactKeyBytes = 1024
	maxDigestBytes      = 64
	maxCount            = 100
	maxExcluded         = 1000
	maxSealedBytes      = 256 << 10
	maxHold             = 15 * time.Minute

	// No machine has a million cores or a pebibyte; with these the sums of all holds fit.
	maxCPUMillis   = int64(1_000_000) * 1000
	maxMemoryBytes = int64(1) << 50
	mib            = 1 << 20
)

func invalid(format string, args ...any) error {
	return &rpcerr.Invalid{Text: fmt.Sprintf(format, args...)}
}

// text refuses what is too long or has control characters.
func text(field, s string, most int) error {
	if len(s) > most {
		return invalid("%s has %d bytes, at most %d", field, len(s), most)
	}
	if node.CheckText(field, s) != nil {
		return invalid("%s has a control character or is not UTF-8", field)
	}
	return nil
}

// reservationID returns s as rows spell it; "" stays "".
func reservationID(field, s string) (string, error) {
	if s == "" {
		return "", nil
	}
	id, err := uuid.Parse(s)
	if err != nil {
		return "", invalid("%s is not a reservation id", field)
	}
	return id.String(), nil
}

func hold(field string, ms uint32) (time.Duration, error) {
	d := time.Duration(ms) * time.Millisecond
	if d > maxHold {
		return 0, invalid("%s must be at most %d, not %d", field, maxHold.Milliseconds(), ms)
	}
	return d, nil
}

// resources checks what one sandbox asks for; zero is not told.
func resources(r *schedulerv1.Resources) (sandbox.Size, error) {
	switch {
	case r.GetCpuMillis() < 0 || r.GetCpuMillis() > maxCPUMillis:
		return sandbox.Size{}, invalid("resources.cpu_millis must be 0 to %d, not %d", maxCPUMillis, r.GetCpuMillis())
	case r.GetMemoryBytes() < 0 || r.GetMemoryBytes() > maxMemoryBytes:
		return sandbox.Size{}, invalid("resources.memory_bytes must be 0 to %d, not %d", maxMemoryBytes, r.GetMemoryBytes())
	case r.GetDiskBytes() < 0:
		return sandbox.Size{}, invalid("resources.disk_bytes must not be negative")
	}
	return sandbox.Size{CPUMillis: r.GetCpuMillis(), MemoryBytes: r.GetMemoryBytes()}, nil
}

// sizeOf is what a create asks for: its resources, else the cold hint's, else the default, each by itself.
func sizeOf(r *schedulerv1.ScheduleRequest, fallback sandbox.Size) (sandbox.Size, error) {
	size, err := resources(r.GetResources())
	if err != nil {
		return sandbox.Size{}, err
	}
	cold := r.GetHint().GetNewColdSandbox()
	if size.CPUMillis == 0 {
		size.CPUMillis = int64(cold.GetCpuCount()) * 1000
	}
	if size.MemoryBytes == 0 {
		if cold.GetMemoryMb() > uint64(maxMemoryBytes/mib) {
			return sandbox.Size{}, invalid("hint.new_cold_sandbox.memory_mb must be at most %d, not %d", maxMemoryBytes/mib, cold.GetMemoryMb())
		}
		size.MemoryBytes = int64(cold.GetMemoryMb()) * mib
	}
	if size.CPUMillis > maxCPUMillis {
		return sandbox.Size{}, invalid("hint.new_cold_sandbox.cpu_count must be at most %d, not %d", maxCPUMillis/1000, cold.GetCpuCount())
	}
	if size.CPUMillis == 0 {
		size.CPUMillis = fallback.CPUMillis
	}
	if size.MemoryBytes == 0 {
		size.MemoryBytes = fallback.MemoryBytes
	}
	return size, nil
}

// fingerprint is what a request id stands for: what was asked, not how often or where it was refused.
func fingerprint(r *schedulerv1.ScheduleRequest) ([]byte, error) {
	asked := &schedulerv1.ScheduleRequest{
		Hint: r.GetHint(), Resources: r.GetResources(), Constraints: r.GetConstraints(),
		ClusterId: r.GetClusterId(), Count: max(r.GetCount(), 1), Sandbox: r.GetSandbox(),
		CreateKey: r.GetCreateKey(), CreateDigest: r.GetCreateDigest(),
	}
	wire, err := proto.MarshalOptions{Deterministic: true}.Marshal(asked)
	if err != nil {
		return nil, fmt.Errorf("fingerprint a request: %w", err)
	}
	digest := sha256.Sum256(wire)
	return digest[:], nil
}

func constraints(c *schedulerv1.Constraints) (placement.Constraints, error) {
	out := placement.Constraints{
		Labels: c.GetLabels(), SpreadKey: c.GetSpreadKey(), MaxPerNode: int64(c.GetMaxPerNode()),
		CPUArchitecture: c.GetCpuArchitecture(), CPUTemplate: c.GetCpuTemplateDigest(),
		Artifact: placement.Artifact{
			Backend: strings.TrimSpace(c.GetArtifact().GetBackend()), Key: strings.TrimSpace(c.GetArtifact().GetKey()), // as the index has them
		},
		ArtifactRequired: c.GetArtifact().GetRequired(),
	}
	if len(out.Labels) > maxLabels {
		return out, invalid("constraints.labels has %d labels, at most %d", len(out.Labels), maxLabels)
	}
	for key, value := range out.Labels {
		if err := text("constraints.labels", key, maxLabelBytes); err != nil {
			return out, err
		}
		if err := text("constraints.labels", value, maxLabelBytes); err != nil {
			return out, err
		}
	}
	for _, named := range []struct {
		from string
		to   *node.ID
	}{{c.GetNodeId(), &out.Node}, {c.GetPreferNodeId(), &out.Prefer}} {
		if named.from == "" {
			continue
		}
		id, err := node.ParseID(named.from)
		if err != nil {
			return out, err
		}
		*named.to = id
	}
	switch {
	case len(out.CPUTemplate) > maxDigestBytes:
		return out, invalid("constraints.cpu_template_digest has %d bytes, at most %d", len(out.CPUTemplate), maxDigestBytes)
	case out.MaxPerNode > 0 && out.SpreadKey == "":
		return out, invalid("constraints.max_per_node needs constraints.spread_key")
	case (out.Artifact != placement.Artifact{} || out.ArtifactRequired) && (out.Artifact.Backend == "" || out.Artifact.Key == ""):
		return out, invalid("constraints.artifact needs backend and key")
	}
	for _, t := range []struct {
		field, value string
		most         int
	}{
		{"constraints.spread_key", out.SpreadKey, maxKeyBytes},
		{"constraints.cpu_architecture", out.CPUArchitecture, node.MaxTagBytes},
		{"constraints.artifact.backend", out.Artifact.Backend, node.MaxTagBytes},
		{"constraints.artifact.key", out.Artifact.Key, maxArtifactKeyBytes},
	} {
		if err := text(t.field, t.value, t.most); err != nil {
			return out, err
		}
	}
	return out, nil
}

// named are the fields of every request about an artifact.
type named interface {
	GetClusterId() string
	GetBackend() string
	GetKey() string
}

// artifact returns what r names, trimmed.
func artifact(r named) (p2p.Artifact, error) {
	a := p2p.Artifact{
		Cluster: strings.TrimSpace(r.GetClusterId()), Backend: strings.TrimSpace(r.GetBackend()), Key: strings.TrimSpace(r.GetKey()),
	}
	if err := node.CheckTag("cluster_id", a.Cluster); err != nil {
		return a, err
	}
	if err := node.CheckTag("backend", a.Backend); err != nil {
		return a, err
	}
	return a, text("key", a.Key, maxArtifactKeyBytes)
}

// heldArtifact is artifact for a request that names a holder too.
func heldArtifact(r interface {
	named
	GetNodeId() string
},
) (p2p.Artifact, error) {
	if blank(r.GetClusterId()) || blank(r.GetBackend()) || blank(r.GetKey()) || blank(r.GetNodeId()) {
		return p2p.Artifact{}, invalid("cluster_id, backend, key, and node_id are required")
	}
	return artifact(r)
}

// excluded returns the node that an answer leaves out; "" is none, and so is what no node can be named.
func excluded(s string) node.ID {
	id, err := node.ParseID(strings.TrimSpace(s))
	if err != nil {
		return ""
	}
	return id
}

func peersOf(peers []p2p.Peer) []*schedulerv1.P2PPeer {
	out := make([]*schedulerv1.P2PPeer, len(peers))
	for i, p := range peers {
		out[i] = &schedulerv1.P2PPeer{NodeId: string(p.Node), Endpoint: &schedulerv1.P2PEndpoint{Backend: p.Backend, Address: p.Address}}
	}
	return out
}

func blank(s string) bool { return strings.TrimSpace(s) == "" }

// beatOf is a heartbeat as nodes takes it. skipped counts ids that are no sandbox ids.
func beatOf(r *schedulerv1.HeartbeatRequest, from netip.Addr) (beat nodes.Beat, skipped []string, err error) {
	if blank(r.GetNodeId()) || blank(r.GetServiceInstanceId()) {
		return nodes.Beat{}, nil, node.ErrInstanceRequired
	}
	id, err := node.ParseID(r.GetNodeId())
	if err != nil {
		return nodes.Beat{}, nil, node.ErrNotListed // no list has an id like that
	}
	if len(r.GetSandboxIds()) > node.MaxRoster || len(r.GetRoster()) > node.MaxRoster {
		return nodes.Beat{}, nil, node.ErrBadRoster
	}
	beat = nodes.Beat{
		Node: id, Instance: r.GetServiceInstanceId(), Cluster: r.GetClusterId(), Version: r.GetVersion(), Commit: r.GetCommit(),
		Machine: machineOf(r.GetMachineInfo()), Snapshot: snapshotOf(r.GetSnapshot()),
		RosterUnchanged: r.GetRosterUnchanged(), RosterDigest: r.GetRosterDigest(), TemplateDigest: r.GetCpuTemplateDigest(),
		Endpoint: r.GetEndpoint(), Labels: r.GetLabels(), Capabilities: r.GetCapabilities(), Seq: r.GetSeq(),
		Capacity: nodes.Capacity{
			Sandboxes: r.GetCapacity().GetSandboxes(), CPUMillis: r.GetCapacity().GetCpuMillis(), MemoryBytes: r.GetCapacity().GetMemoryBytes(),
		},
	}
	if from.IsValid() {
		beat.Caller = from.Unmap().String()
	}
	if p := r.GetP2PEndpoint(); p != nil {
		beat.Peer = &nodes.Peer{Backend: p.GetBackend(), Address: p.GetAddress()}
	}
	details := make([]node.Entry, len(r.GetRoster()))
	for i, entry := range r.GetRoster() {
		details[i] = node.Entry{
			Sandbox: sandbox.ID(entry.GetSandboxId()), Incarnation: sandbox.Incarnation(max(entry.GetIncarnation(), 0)),
			Reservation: entry.GetReservationId(),
			Size: sandbox.Size{
				CPUMillis:   min(max(entry.GetCpuMillis(), 0), maxCPUMillis),
				MemoryBytes: min(max(entry.GetMemoryBytes(), 0), maxMemoryBytes),
			},
		}
	}
	beat.Roster, skipped = node.NewRoster(r.GetSandboxIds(), details)
	return beat, skipped, nil
}

func machineOf(m *schedulerv1.MachineInfo) *nodes.Machine {
	if m == nil {
		return nil
	}
	return &nodes.Machine{
		CPUFamily: m.GetCpuFamily(), CPUModel: m.GetCpuModel(), CPUModelName: m.GetCpuModelName(),
		CPUArchitecture: m.GetCpuArchitecture(), CPUConfig: m.GetCpuConfigJson(),
	}
}

func snapshotOf(s *schedulerv1.NodeSnapshot) *nodes.Snapshot {
	if s == nil {
		return nil
	}
	out := &nodes.Snapshot{
		Status: statusOf(s.GetStatus()), AllocatedCPU: s.GetAllocatedCpu(), AllocatedMemoryBytes: s.GetAllocatedMemoryBytes(),
		CPUPercent: s.GetCpuPercent(), CPUCount: s.GetCpuCount(), MemoryUsedBytes: s.GetMemoryUsedBytes(),
		MemoryTotalBytes: s.GetMemoryTotalBytes(), SandboxCount: s.GetSandboxCount(), SandboxStartingCount: s.GetSandboxStartingCount(),
		CreateSuccesses: s.GetCreateSuccesses(), CreateFails: s.GetCreateFails(), ReportedAtUnixMS: s.GetReportedAtUnixMs(),
		PausedSandboxCount: s.GetPausedSandboxCount(), PausedAllocatedCPU: s.GetPausedAllocatedCpu(),
		PausedAllocatedMemoryBytes: s.GetPausedAllocatedMemoryBytes(),
	}
	for _, d := range s.GetDisks() {
		out.Disks = append(out.Disks, nodes.Disk{
			MountPoint: d.GetMountPoint(), Device: d.GetDevice(), FilesystemType: d.GetFilesystemType(),
			UsedBytes: d.GetUsedBytes(), TotalBytes: d.GetTotalBytes(),
		})
	}
	return out
}

// statusOf reads a status that this build does not know as unspecified, which is not ready.
func statusOf(s schedulerv1.NodeStatus) node.Status {
	if _, known := schedulerv1.NodeStatus_name[int32(s)]; !known {
		return node.Unspecified
	}
	return node.Status(s)
}

func observed(o *nodes.Observed, held placement.Held) *schedulerv1.ObservedNode {
	out := &schedulerv1.ObservedNode{
		NodeId: string(o.ID), Endpoint: o.Endpoint, ClusterId: o.Cluster, ServiceInstanceId: o.Instance,
		Version: o.Version, Commit: o.Commit, LastSeenUnixMs: o.LastSeen.UnixMilli(),
		Epoch: o.Epoch, LeaseLeftMs: o.LeaseLeft.Milliseconds(), ClockSkewMs: o.SkewMS, Cordoned: o.Cordoned, DrainId: o.DrainID,
		HeldSandboxes: uint32(min(held.Sandboxes, math.MaxUint32)), HeldCpuMillis: held.CPUMillis, HeldMemoryBytes: held.MemoryBytes,
		Labels: o.Labels, CpuConfigError: o.ConfigError, Capabilities: o.Capabilities,
		Snapshot: &schedulerv1.NodeSnapshot{
			Status: schedulerv1.NodeStatus(o.Snapshot.Status), AllocatedCpu: o.Snapshot.AllocatedCPU,
			AllocatedMemoryBytes: o.Snapshot.AllocatedMemoryBytes, CpuPercent: o.Snapshot.CPUPercent, CpuCount: o.Snapshot.CPUCount,
			MemoryUsedBytes: o.Snapshot.MemoryUsedBytes, MemoryTotalBytes: o.Snapshot.MemoryTotalBytes,
			SandboxCount: o.Snapshot.SandboxCount, SandboxStartingCount: o.Snapshot.SandboxStartingCount,
			CreateSuccesses: o.Snapshot.CreateSuccesses, CreateFails: o.Snapshot.CreateFails,
			ReportedAtUnixMs: o.Snapshot.ReportedAtUnixMS, PausedSandboxCount: o.Snapshot.PausedSandboxCount,
			PausedAllocatedCpu: o.Snapshot.PausedAllocatedCPU, PausedAllocatedMemoryBytes: o.Snapshot.PausedAllocatedMemoryBytes,
		},
	}
	if m := o.Machine; m != nil {
		out.MachineInfo = &schedulerv1.MachineInfo{
			CpuFamily: m.CPUFamily, CpuModel: m.CPUModel, CpuModelName: m.CPUModelName,
			CpuArchitecture: m.CPUArchitecture, CpuConfigJson: m.CPUConfig,
		}
	}
	for _, d := range o.Snapshot.Disks {
		out.Snapshot.Disks = append(out.Snapshot.Disks, &schedulerv1.DiskMetric{
			MountPoint: d.MountPoint, Device: d.Device, FilesystemType: d.FilesystemType, UsedBytes: d.UsedBytes, TotalBytes: d.TotalBytes,
		})
	}
	return out
}
