package placement

import (
	"bytes"
	"math"
	"math/bits"
	"slices"

	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// Reason is why a node was refused, as rows, metrics and people read it.
type Reason string

// The reasons a node may not take a create, in the order in which they are asked. The limits follow,
// each by its name.
const (
	Absent          Reason = "absent"
	Unregistered    Reason = "unregistered"
	Unhealthy       Reason = "unhealthy"
	Connecting      Reason = "connecting"
	Lingering       Reason = "lingering"
	Cordoned        Reason = "cordoned"
	Draining        Reason = "draining"
	Excluded        Reason = "excluded"
	OtherCluster    Reason = "cluster"
	Pinned          Reason = "pinned"
	NoRuntime       Reason = "runtime"
	OtherLabel      Reason = "label"
	CPUArchitecture Reason = "cpu_architecture"
	CPUTemplate     Reason = "cpu_template"
	NoArtifact      Reason = "artifact"
	TooManyOfSpread Reason = "spread"

	MaxSandboxCount                Reason = "max_sandbox_count"
	MaxSandboxStartingCount        Reason = "max_sandbox_starting_count"
	MaxCPUUsedPercent              Reason = "max_cpu_used_percent"
	MaxMemoryUsedPercent           Reason = "max_memory_used_percent"
	MaxCPUAllocatedPercent         Reason = "max_cpu_allocated_percent"
	MaxMemoryAllocatedPercent      Reason = "max_memory_allocated_percent"
	MaxSandboxCountIncludingPaused Reason = "max_sandbox_count_including_paused"
	MaxAllocatedCPU                Reason = "max_allocated_cpu_including_paused"
	MaxAllocatedMemory             Reason = "max_allocated_memory_bytes_including_paused"
	DeclaredSandboxes              Reason = "declared_sandboxes"
	DeclaredCPU                    Reason = "declared_cpu_millis"
	DeclaredMemory                 Reason = "declared_memory_bytes"
)

// stage is which kind of rule refused a node; it decides what the caller is told.
type stage int

const (
	passed       stage = iota
	byStanding         // the node may take no create at all
	byConstraint       // not this one
	byLimit            // not now
)

// refusal is why one node does not take a create: the rule, what it saw and what it allows. The zero
// value passes.
type refusal struct {
	stage  stage
	reason Reason
	value  float64
	limit  float64
}

// check returns the first rule that n fails for r, or the zero refusal. unheard lets a listed node that
// never sent a heartbeat pass as if it were ready.
func check(r *Request, n *Node, limits *Limits, unheard bool) refusal {
	if reason := standing(n, unheard); reason != "" {
		return refusal{stage: byStanding, reason: reason}
	}
	if reason := constrained(r, n); reason != "" {
		return refusal{stage: byConstraint, reason: reason}
	}
	if c := &r.Constraints; c.SpreadKey != "" && c.MaxPerNode > 0 {
		if here := n.Spread[c.SpreadKey]; here+int64(r.Count) > c.MaxPerNode {
			return refusal{byConstraint, TooManyOfSpread, float64(here + int64(r.Count)), float64(c.MaxPerNode)}
		}
	}
	return exceeded(n, limits, r.Size, int64(r.Count))
}

func standing(n *Node, unheard bool) Reason {
	switch {
	case !n.Present:
		return Absent
	case n.Ended:
		return Unregistered
	case n.Heard && !n.LeaseHeld, n.Heard && n.Reported == node.Unhealthy:
		return Unhealthy
	case !n.Heard && (!unheard || n.Registered), n.Heard && (n.Reported == node.Connecting || n.Reported == node.Unspecified):
		return Connecting
	case n.Lingering, n.Heard && n.Reported == node.Lingering:
		return Lingering
	case n.Cordoned:
		return Cordoned
	case n.Draining:
		return Draining
	}
	return ""
}

func constrained(r *Request, n *Node) Reason {
	c := &r.Constraints
	switch {
	case slices.Contains(r.Exclude, n.ID):
		return Excluded
	case r.Cluster != "" && n.Cluster != r.Cluster:
		return OtherCluster
	case c.Node != "" && n.ID != c.Node:
		return Pinned
	case r.Managed && !n.has(route.CapabilityNodeAPI):
		return NoRuntime
	}
	for key, want := range c.Labels {
		if got, ok := n.Labels[key]; !ok || got != want {
			return OtherLabel
		}
	}
	switch {
	case c.CPUArchitecture != "" && n.CPUArchitecture != c.CPUArchitecture:
		return CPUArchitecture
	case len(c.CPUTemplate) > 0 && !bytes.Equal(n.CPUTemplate, c.CPUTemplate):
		return CPUTemplate
	case c.ArtifactRequired && !n.Holds[c.Artifact]:
		return NoArtifact
	}
	return ""
}

// A sum is a count that remembers that it overflowed; an overflowed one exceeds every limit.
type sum struct {
	value uint64
	over  bool
}

func total(terms ...int64) sum {
	var s sum
	for _, t := range terms {
		value, carry := bits.Add64(s.value, uint64(max(t, 0)), 0)
		s.value, s.over = value, s.over || carry != 0
	}
	return s
}

func (s sum) times(factor int64) sum {
	high, low := bits.Mul64(s.value, uint64(max(factor, 0)))
	return sum{low, s.over || high != 0}
}

// exceeds reports whether s is above limit · unit.
func (s sum) exceeds(limit uint64, unit int64) bool {
	if s.over {
		return true
	}
	high, low := bits.Mul64(limit, uint64(max(unit, 0)))
	return high == 0 && s.value > low
}

func (s sum) float() float64 {
	if s.over {
		return math.MaxUint64
	}
	return float64(s.value)
}

// exceeded returns the first limit that n would exceed with count more sandboxes of size. It is the one
// place where room is judged.
func exceeded(n *Node, l *Limits, size sandbox.Size, count int64) refusal {
	r, h := &n.Report, &n.Held
	asked := total(size.CPUMillis).times(count)
	askedBytes := total(size.MemoryBytes).times(count)
	// Whole vCPUs are compared in thousandths, so that holds and reports add up.
	cpu := plus(total(r.AllocatedCPU).times(1000), total(h.CPUMillis), asked)
	memory := plus(total(r.AllocatedMemoryBytes, h.MemoryBytes), askedBytes)
	pausedCPU := plus(cpu, total(r.PausedCPU).times(1000))
	pausedMemory := plus(memory, total(r.PausedMemoryBytes))
	running := total(r.Sandboxes, r.Starting, h.Sandboxes, count)
	withPaused := total(r.Sandboxes, r.Starting, r.Paused, h.Sandboxes, count)

	rules := [...]struct {
		reason  Reason
		limit   *uint64
		value   sum
		unit    int64 // the limit is in these
		divisor int64 // zero skips the rule: the share of nothing has no meaning
	}{
		{MaxSandboxCount, l.SandboxCount, running, 1, 1},
		{MaxSandboxStartingCount, l.SandboxStartingCount, total(r.Starting, h.Open, count), 1, 1},
		{MaxCPUUsedPercent, l.CPUUsedPercent, total(r.CPUPercent), 1, 1},
		{MaxMemoryUsedPercent, l.MemoryUsedPercent, total(r.MemoryUsedBytes).times(100), r.MemoryTotalBytes, r.MemoryTotalBytes},
		{MaxCPUAllocatedPercent, l.CPUAllocatedPercent, cpu.times(100), saturate(r.CPUCount, 1000), r.CPUCount},
		{MaxMemoryAllocatedPercent, l.MemoryAllocatedPercent, memory.times(100), r.MemoryTotalBytes, r.MemoryTotalBytes},
		{MaxSandboxCountIncludingPaused, l.SandboxCountIncludingPaused, withPaused, 1, 1},
		{MaxAllocatedCPU, l.AllocatedCPUIncludingPaused, pausedCPU, 1000, 1},
		{MaxAllocatedMemory, l.AllocatedBytesIncludingPaused, pausedMemory, 1, 1},
		{DeclaredSandboxes, declared(n.Declared.Sandboxes), running, 1, 1},
		{DeclaredCPU, declared(n.Declared.CPUMillis), cpu, 1, 1},
		{DeclaredMemory, declared(n.Declared.MemoryBytes), memory, 1, 1},
	}
	for i := range rules {
		rule := &rules[i]
		if rule.limit == nil || rule.divisor <= 0 || !rule.value.exceeds(*rule.limit, rule.unit) {
			continue
		}
		return refusal{byLimit, rule.reason, rule.value.float() / float64(rule.unit), float64(*rule.limit)}
	}
	return refusal{}
}

func plus(terms ...sum) sum {
	var s sum
	for _, t := range terms {
		value, carry := bits.Add64(s.value, t.value, 0)
		s.value, s.over = value, s.over || t.over || carry != 0
	}
	return s
}

func saturate(value, factor int64) int64 {
	if value > math.MaxInt64/factor {
		return math.MaxInt64
	}
	return value * factor
}

func declared(value int64) *uint64 {
	if value <= 0 {
		return nil
	}
	return new(uint64(value))
}
