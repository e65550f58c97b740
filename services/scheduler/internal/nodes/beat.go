package nodes

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"maps"
	"math"
	"slices"
	"strings"

	"berth/services/internal/node"
)

// The bounds of what a heartbeat may carry.
const (
	maxLabels      = 64
	maxLabelBytes  = 63
	maxTextBytes   = 1024
	maxConfigBytes = 1 << 20
	digestBytes    = node.DigestBytes

	maxTemplateDigestBytes = 64
)

// load is a snapshot as the lease row has it.
type load struct {
	reportedAt      int64
	createSuccesses int64
	createFails     int64
	memoryUsed      int64
	memoryTotal     int64
	allocatedMemory int64
	pausedMemory    int64
	cpuPercent      int32
	cpuCount        int32
	allocatedCPU    int32
	sandboxes       int32
	starting        int32
	paused          int32
	pausedCPU       int32
	status          int16
	given           bool
}

// loadOf returns s as it is stored: what is wider than its column is the widest the column takes, and
// a status nobody knows is none.
func loadOf(s *Snapshot) load {
	if s == nil {
		return load{}
	}
	status := s.Status
	if status < node.Unspecified || status > node.Lingering {
		status = node.Unspecified
	}
	return load{
		reportedAt:      s.ReportedAtUnixMS,
		createSuccesses: narrow64(s.CreateSuccesses),
		createFails:     narrow64(s.CreateFails),
		memoryUsed:      narrow64(s.MemoryUsedBytes),
		memoryTotal:     narrow64(s.MemoryTotalBytes),
		allocatedMemory: narrow64(s.AllocatedMemoryBytes),
		pausedMemory:    narrow64(s.PausedAllocatedMemoryBytes),
		cpuPercent:      narrow32(s.CPUPercent),
		cpuCount:        narrow32(s.CPUCount),
		allocatedCPU:    narrow32(s.AllocatedCPU),
		sandboxes:       narrow32(s.SandboxCount),
		starting:        narrow32(s.SandboxStartingCount),
		paused:          narrow32(s.PausedSandboxCount),
		pausedCPU:       narrow32(s.PausedAllocatedCPU),
		status:          int16(status),
		given:           true,
	}
}

func narrow64(n uint64) int64 { return int64(min(n, math.MaxInt64)) }
func narrow32(n uint32) int32 { return int32(min(n, math.MaxInt32)) }

// prepared is a beat with all that is computed from it.
type prepared struct {
	Beat
	place  string // the endpoint, or where the caller is
	facts  []byte // digest of what changes rarely
	roster []byte // digest of the roster
	load   load
}

// prepare checks beat and computes what is compared with the lease. Errors are node.ErrBadTag,
// node.ErrBadRoster, or route.ErrNotAllowed for an endpoint without the right form.
func (n *Nodes) prepare(beat Beat) (*prepared, error) {
	beat.Cluster = strings.TrimSpace(beat.Cluster)
	if err := beat.check(); err != nil {
		return nil, err
	}
	if beat.Endpoint != "" {
		stored, _, err := n.guard.Form(beat.Endpoint)
		if err != nil {
			return nil, err
		}
		beat.Endpoint = stored
	}
	if beat.Peer != nil && (strings.TrimSpace(beat.Peer.Backend) == "" || strings.TrimSpace(beat.Peer.Address) == "") {
		beat.Peer = nil
	}
	if beat.TemplateDigest == nil {
		beat.TemplateDigest = []byte{} // in SQL nil would be like no digest, not even the empty one
	}
	p := &prepared{Beat: beat, place: beat.Caller, facts: beat.factsDigest(), roster: beat.RosterDigest, load: loadOf(beat.Snapshot)}
	if beat.Endpoint != "" {
		p.place = beat.Endpoint
	}
	if !beat.RosterUnchanged {
		p.roster = beat.Roster.Digest()
	}
	return p, nil
}

func (b *Beat) check() error {
	type text struct{ field, value string }
	texts := []text{{"version", b.Version}, {"commit", b.Commit}, {"endpoint", b.Endpoint}}
	if b.Peer != nil {
		texts = append(texts, text{"p2p_endpoint", b.Peer.Address})
	}
	for _, t := range texts {
		if len(t.value) > maxTextBytes {
			return fmt.Errorf("%w: %s has %d bytes, at most %d", node.ErrBadTag, t.field, len(t.value), maxTextBytes)
		}
		if err := node.CheckText(t.field, t.value); err != nil {
			return err
		}
	}
	tags := []text{{"cluster_id", b.Cluster}, {"service_instance_id", b.Instance}}
	if b.Peer != nil {
		tags = append(tags, text{"p2p_endpoint", b.Peer.Backend})
	}
	for _, capability := range b.Capabilities {
		tags = append(tags, text{"capabilities", capability})
	}
	for _, t := range tags {
		if err := node.CheckTag(t.field, t.value); err != nil {
			return err
		}
	}
	switch {
	case len(b.Labels) > maxLabels:
		return fmt.Errorf("%w: %d labels, at most %d", node.ErrBadTag, len(b.Labels), maxLabels)
	case len(b.Capabilities) > maxLabels:
		return fmt.Errorf("%w: %d capabilities, at most %d", node.ErrBadTag, len(b.Capabilities), maxLabels)
	case len(b.Roster) > node.MaxRoster:
		return fmt.Errorf("%w: %d sandboxes, at most %d", node.ErrBadRoster, len(b.Roster), node.MaxRoster)
	case b.RosterUnchanged && len(b.RosterDigest) != digestBytes:
		return fmt.Errorf("%w: a digest of %d bytes, not %d", node.ErrBadRoster, len(b.RosterDigest), digestBytes)
	case len(b.TemplateDigest) > maxTemplateDigestBytes:
		return fmt.Errorf("%w: cpu_template_digest has %d bytes, at most %d", node.ErrBadTag, len(b.TemplateDigest), maxTemplateDigestBytes)
	case b.Capacity.CPUMillis < 0 || b.Capacity.MemoryBytes < 0:
		return fmt.Errorf("%w: capacity is negative", node.ErrBadTag)
	case b.Machine != nil && len(b.Machine.CPUConfig) > maxConfigBytes:
		return fmt.Errorf("%w: cpu_config_json has %d bytes, at most %d", node.ErrBadTag, len(b.Machine.CPUConfig), maxConfigBytes)
	}
	for key, value := range b.Labels {
		if len(key) > maxLabelBytes || len(value) > maxLabelBytes {
			return fmt.Errorf("%w: a label of %d and %d bytes, at most %d", node.ErrBadTag, len(key), len(value), maxLabelBytes)
		}
		if err := node.CheckText("labels", key+value); err != nil {
			return err
		}
	}
	return nil
}

// factsDigest returns 16 bytes of SHA-256 over what the nodes row is written from.
func (b *Beat) factsDigest() []byte {
	h := sha256.New()
	write := func(texts ...string) {
		var length [4]byte
		for _, t := range texts {
			binary.BigEndian.PutUint32(length[:], uint32(len(t)))
			h.Write(length[:])
			h.Write([]byte(t))
		}
	}
	write(b.Cluster, b.Version, b.Commit, b.Endpoint)
	capabilities := b.capabilities()
	writeNumbers(h, int64(len(b.Labels)), int64(len(capabilities)),
		int64(b.Capacity.Sandboxes), b.Capacity.CPUMillis, b.Capacity.MemoryBytes)
	for _, key := range slices.Sorted(maps.Keys(b.Labels)) {
		write(key, b.Labels[key])
	}
	write(capabilities...)
	if m := b.Machine; m != nil {
		write("machine", m.CPUFamily, m.CPUModel, m.CPUModelName, m.CPUArchitecture, m.CPUConfig)
	}
	if p := b.Peer; p != nil {
		write("peer", p.Backend, p.Address)
	}
	return h.Sum(nil)[:digestBytes]
}

func writeNumbers(h hash.Hash, numbers ...int64) {
	var bytes [8]byte
	for _, n := range numbers {
		binary.BigEndian.PutUint64(bytes[:], uint64(n))
		h.Write(bytes[:])
	}
}

// capabilities returns them sorted, each once, as they are stored.
func (b *Beat) capabilities() []string {
	sorted := slices.Clone(b.Capabilities)
	slices.Sort(sorted)
	return slices.Compact(sorted)
}

// echoes reports whether the node says which CPU template it has: a Berth node does, and an AgentENV node has no
// capabilities.
func (b *Beat) echoes() bool { return len(b.Capabilities) > 0 }

// storable returns text without what PostgreSQL cannot store.
func storable(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "")
}
