package placement

import (
	"math"
	"math/bits"
	"slices"
	"time"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// Outcome is what became of a placement.
type Outcome string

// The outcomes, as the rows spell them.
const (
	Reserved Outcome = "reserved" // room is held
	Recorded Outcome = "confirmed"
	Released Outcome = "released"
	Expired  Outcome = "expired"
	Rejected Outcome = "refused"
)

// Node is what placement knows about one node, read at one moment of the database's clock.
type Node struct {
	ID              node.ID
	Endpoint        string
	Cluster         string
	Capabilities    []string
	Labels          map[string]string
	CPUArchitecture string
	CPUTemplate     []byte // digest of its cluster's; empty: there is none

	Present    bool // a source of nodes lists it
	Heard      bool // it has sent a heartbeat, ever
	Ended      bool // it has unregistered
	LeaseHeld  bool
	Lingering  bool
	Cordoned   bool
	Draining   bool
	Registered bool // its row was made by a heartbeat, not by configuration or discovery
	Reported   node.Status

	Report   Report
	Declared Declared
	Held     Held
	Spread   map[string]int64  // sandboxes and open holds by spread key; only the keys that were asked for
	Holds    map[Artifact]bool // those it holds; only the artifacts that were asked for
}

func (n *Node) has(capability string) bool { return slices.Contains(n.Capabilities, capability) }

// Report is the node's own snapshot. Counters are never negative.
type Report struct {
	Given                bool // false: the node sent none, and all else is zero
	CPUCount             int64
	CPUPercent           int64
	AllocatedCPU         int64 // whole vCPUs of sandboxes that are not paused
	PausedCPU            int64
	MemoryTotalBytes     int64
	MemoryUsedBytes      int64
	AllocatedMemoryBytes int64
	PausedMemoryBytes    int64
	Sandboxes            int64 // running
	Starting             int64
	Paused               int64
}

// Declared is the capacity a node announces; zero declares nothing.
type Declared struct {
	Sandboxes   int64
	CPUMillis   int64
	MemoryBytes int64
}

// Held is the sum over a node's holds.
type Held struct {
	Sandboxes   int64 // all holds
	Open        int64 // those not confirmed yet
	CPUMillis   int64
	MemoryBytes int64
}

// add returns h with count more open holds of size.
func (h Held) add(size sandbox.Size, count int64) Held {
	return Held{
		Sandboxes: h.Sandboxes + count, Open: h.Open + count,
		CPUMillis: saturated(h.CPUMillis, size.CPUMillis, count), MemoryBytes: saturated(h.MemoryBytes, size.MemoryBytes, count),
	}
}

// saturated returns held + each·count, kept within 0 and what fits: a wrapped sum would look like room.
func saturated(held, each, count int64) int64 {
	change, size := uint64(max(count, -count)), uint64(max(each, 0))
	if high, low := bits.Mul64(change, size); high == 0 && low <= math.MaxInt64 {
		size = low
	} else {
		size = math.MaxInt64
	}
	if count < 0 {
		return max(held-int64(size), 0)
	}
	if int64(size) > math.MaxInt64-held {
		return math.MaxInt64
	}
	return held + int64(size)
}

// Limits are what no node may exceed, this create and all holds included. Nil: off. A sum that does not
// fit 64 bits exceeds every limit.
type Limits struct {
	SandboxCount                  *uint64 // running, starting and held
	SandboxStartingCount          *uint64 // starting and held openly
	CPUUsedPercent                *uint64 // measured
	MemoryUsedPercent             *uint64 // measured
	CPUAllocatedPercent           *uint64 // of vCPUs; may be above 100
	MemoryAllocatedPercent        *uint64 // of memory; may be above 100
	SandboxCountIncludingPaused   *uint64
	AllocatedCPUIncludingPaused   *uint64 // whole vCPUs
	AllocatedBytesIncludingPaused *uint64 // bytes of memory
}

// none reports whether no limit is set.
func (l Limits) none() bool { return l == Limits{} }

// Request is one create that wants a node.
type Request struct {
	Tenant      string
	RequestID   string // "": each call is a new create
	Fingerprint []byte // of what was asked; set with RequestID
	CreateKey   string // "": none; else one create for each within the tenant
	Digest      []byte // of what the key's client asked for; set with CreateKey
	Cluster     string // "": any
	Size        sandbox.Size
	Count       int           // 1 to 100, on one node, all or none
	TTL         time.Duration // how long the room is held
	Named       bool          // the caller is told the reservation's id, and why it was refused
	DryRun      bool          // choose, write nothing
	Replaces    string        // reservation that this one replaces; "": none
	Managed     bool          // wants a node with the runtime API
	Exclude     []node.ID
	Constraints Constraints
}

// Constraints are what a node must have, or had better have.
type Constraints struct {
	Labels           map[string]string
	Node             node.ID // only this one; "": any
	Prefer           node.ID
	SpreadKey        string
	MaxPerNode       int64 // of SpreadKey; 0: no limit
	CPUArchitecture  string
	CPUTemplate      []byte
	Artifact         Artifact // its holders are better, or:
	ArtifactRequired bool     // the only ones
}

// State is what a create key stands for; "" without one.
type State string

// The states of a create key.
const (
	KeyNew      State = "new"      // nobody had the key: the caller creates
	KeyPending  State = "pending"  // another caller creates
	KeyDone     State = "done"     // it was created
	KeyTakeover State = "takeover" // the other caller is gone: this one goes on where that one was
)

// Placement is the answer to a Request. Under KeyPending it has nothing but the state.
type Placement struct {
	State        State
	ID           int64  // 0 for a dry run
	Reservation  string // "" for a dry run
	Node         node.ID
	Endpoint     string
	Capabilities []string
	Hold         time.Duration // what is left of it; 0 once it was confirmed
	SandboxIDs   []sandbox.ID  // drawn for a node that takes them, else empty
	Confirmed    bool          // a repeated request whose sandbox was recorded
	SealedAnswer []byte        // under KeyDone what was stored with the record; nil: nothing was
}
