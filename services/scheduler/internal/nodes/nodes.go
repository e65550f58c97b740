package nodes

import (
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/measure"
)

// Config says how nodes are kept. Times are measured on the database's clock.
type Config struct {
	LeaseTTL       time.Duration // a node is unhealthy when it was silent this long
	HeartbeatEvery time.Duration // asked of Berth nodes
	Batch          int           // most heartbeats in one statement
	FullReconcile  time.Duration // a roster is compared in full after this, give or take a fifth
	RegisteredTTL  time.Duration // a registered node is absent this long after its lease ended
	Grace          time.Duration // a confirmed hold older than this makes its node due for a comparison
	SlowPaths      int           // heartbeats that may be in a transaction of their own at once
	Tellings       int           // transactions of events that may be under way at once
}

// DefaultConfig returns what runs where nothing else is said.
func DefaultConfig() Config {
	return Config{
		LeaseTTL:       30 * time.Second,
		HeartbeatEvery: 5 * time.Second,
		Batch:          100,
		FullReconcile:  time.Minute,
		RegisteredTTL:  time.Hour,
		Grace:          15 * time.Second,
		SlowPaths:      4,
		Tellings:       2,
	}
}

// Nodes says which nodes there are and which are alive. All methods may be called at once, on any
// number of replicas.
type Nodes struct {
	db      *pgdb.DB
	routes  *bindings.Bindings
	cfg     Config
	guard   *route.Guard
	log     *slog.Logger
	batcher *Batcher
	slow    chan struct{} // a place for each slow path that may be under way
	rosters *keptRosters
	metrics metrics
	store   *measure.Store

	conflicts *seldom
	odd       *seldom       // nodes that tell what is no event
	telling   chan struct{} // a place for each telling that may be under way
}

// New returns the nodes in db. It starts nothing: Batcher().Run, DueLoop, ExpireLoop and StatusLoop
// are the caller's to run, and Heartbeat answers only while the batcher runs.
func New(db *pgdb.DB, routes *bindings.Bindings, cfg Config, guard *route.Guard, log *slog.Logger, reg prometheus.Registerer) *Nodes {
	n := &Nodes{
		db: db, routes: routes, cfg: cfg, guard: guard, log: log,
		slow: make(chan struct{}, cfg.SlowPaths), rosters: newKeptRosters(maxKept), metrics: newMetrics(reg), store: measure.NewStore(reg),
		conflicts: newSeldom(), odd: newSeldom(), telling: make(chan struct{}, cfg.Tellings),
	}
	n.batcher = newBatcher(cfg.Batch, n.renew, n.metrics.batchSize)
	return n
}

// Batcher returns what renews the leases of many heartbeats in one statement.
func (n *Nodes) Batcher() *Batcher { return n.batcher }

// Beat is one heartbeat. Ids and tags in it have passed node.ParseID and node.CheckTag; texts from
// the machine are stored as they are sent.
type Beat struct {
	Node     node.ID
	Instance string // one for each process start
	Cluster  string
	Version  string
	Commit   string
	Machine  *Machine  // nil: not sent
	Snapshot *Snapshot // nil: not sent
	Peer     *Peer     // nil, or either field blank: no peer

	Roster          node.Roster
	RosterUnchanged bool   // no sandboxes were sent: RosterDigest stands for them
	RosterDigest    []byte // asked only where RosterUnchanged is set

	Endpoint     string // "": not sent
	Caller       string // the caller's IP address: its place where no endpoint is sent
	MayRegister  bool   // the caller has a node token and registration is on
	Labels       map[string]string
	Capabilities []string
	Capacity     Capacity
	Seq          int64 // grows within an instance; 0: not sent

	TemplateDigest []byte // of the CPU template the node has, as cputemplate.Digest makes it; nil: none
}

// Machine is what a node says about its hardware.
type Machine struct {
	CPUFamily       string `json:"cpu_family"`
	CPUModel        string `json:"cpu_model"`
	CPUModelName    string `json:"cpu_model_name"`
	CPUArchitecture string `json:"cpu_architecture"`
	CPUConfig       string `json:"-"` // JSON; it has a column of its own
}

// Disk is one file system of a node.
type Disk struct {
	MountPoint     string `json:"mount_point"`
	Device         string `json:"device"`
	FilesystemType string `json:"filesystem_type"`
	UsedBytes      uint64 `json:"used_bytes"`
	TotalBytes     uint64 `json:"total_bytes"`
}

// Snapshot is what a node says about its load, in scheduler.v1's units. Numbers that are wider than
// their column are stored as the widest it takes.
type Snapshot struct {
	Status                     node.Status
	AllocatedCPU               uint32 // whole vCPUs
	AllocatedMemoryBytes       uint64
	CPUPercent                 uint32
	CPUCount                   uint32
	MemoryUsedBytes            uint64
	MemoryTotalBytes           uint64
	Disks                      []Disk
	SandboxCount               uint32
	SandboxStartingCount       uint32
	CreateSuccesses            uint64
	CreateFails                uint64
	ReportedAtUnixMS           int64 // the node's clock: shown, never compared
	PausedSandboxCount         uint32
	PausedAllocatedCPU         uint32
	PausedAllocatedMemoryBytes uint64
}

// Peer is where a node serves others from its store.
type Peer struct{ Backend, Address string }

// Capacity is what a node declares it can take; 0 declares nothing.
type Capacity struct {
	Sandboxes   uint32
	CPUMillis   int64
	MemoryBytes int64
}

// Answer is what a node is told.
type Answer struct {
	CPUConfigJSON  string // "": no template, or the node was told
	LeaseTTL       time.Duration
	NextHeartbeat  time.Duration
	SendFullRoster bool
	Orphans        []sandbox.ID // the node must end these
	Epoch          int64
	Cordoned       bool
	Draining       bool
}

// Member is a node that a source lists.
type Member struct {
	ID       node.ID
	Endpoint string
}

// Observed is a node that was heard and has not unregistered.
type Observed struct {
	ID           node.ID
	Endpoint     string
	Cluster      string
	Instance     string
	Version      string
	Commit       string
	Machine      *Machine // nil: never sent
	Snapshot     Snapshot // Status is the effective one; ReportedAtUnixMS is LastSeen where none was sent
	LastSeen     time.Time
	LeaseLeft    time.Duration // negative once the lease expired
	Epoch        int64
	SkewMS       int64 // the node's clock less the database's; 0 when unknown
	Cordoned     bool
	DrainID      int64 // 0: none
	Labels       map[string]string
	Capabilities []string
	ConfigError  string
}

// StaticNode is a node of the configuration.
type StaticNode struct {
	ID       node.ID
	Endpoint string
}
