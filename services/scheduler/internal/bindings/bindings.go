package bindings

import (
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/measure"
	"berth/services/scheduler/internal/placement"
)

// Config says how long things are waited for before a binding is judged. All of it is measured on
// the database's clock.
type Config struct {
	Grace              time.Duration // a roster does not end a binding younger than this; 0: it always may
	TombstoneGrace     time.Duration // an id that is gone is not adopted again before this has passed
	TombstoneRetention time.Duration // rows that are gone are kept this long
	LostGrace          time.Duration // bindings of an absent, silent node are parked after this
	ParkedTTL          time.Duration // parked bindings are gone after this
	LeaseTTL           time.Duration // heartbeats must have flowed this long before a node is judged
	FeedRetention      time.Duration // rows of the feed are kept at least this long
	EventRetention     time.Duration // the log is kept this long and a day more at most; at least a day
	KeyGrace           time.Duration // a create key whose claim expired is settled after this
	DoorbellEvery      time.Duration // the bell rings at once, then at most this often

	// Limits are those under which placement finds room for a reservation that ended too early.
	Limits placement.Limits
}

// DefaultConfig returns what runs where nothing else is said.
func DefaultConfig() Config {
	return Config{
		Grace:              15 * time.Second, // a heartbeat's deadline and an interval
		TombstoneGrace:     30 * time.Second,
		TombstoneRetention: 10 * time.Minute,
		LostGrace:          5 * time.Minute,
		ParkedTTL:          15 * time.Minute,
		LeaseTTL:           30 * time.Second,
		FeedRetention:      15 * time.Minute,
		EventRetention:     7 * 24 * time.Hour,
		KeyGrace:           10 * time.Second, // two heartbeats
		DoorbellEvery:      10 * time.Millisecond,
	}
}

// Bindings says which node a sandbox lives on, and is the only writer of the route feed. All
// methods may be called at once, on any number of replicas.
type Bindings struct {
	db      *pgdb.DB
	cfg     Config
	log     *slog.Logger
	bell    *Doorbell
	metrics metrics
	sizes   batchSizes

	records *line[Assignment, []Assigned]
	lookups *line[sandbox.ID, Found]
	store   *measure.Store
}

// New returns the bindings in db. It starts nothing: Doorbell().Run, RecordLoop, LookupLoop, ParkLoop,
// RetentionLoop and StateLoop are the caller's to run.
func New(db *pgdb.DB, cfg Config, log *slog.Logger, reg prometheus.Registerer) *Bindings {
	return &Bindings{
		db: db, cfg: cfg, log: log, bell: newDoorbell(db, cfg.DoorbellEvery, log), metrics: newMetrics(reg), sizes: newBatchSizes(reg), store: measure.NewStore(reg),
		records: newLine[Assignment, []Assigned](recordBatch, recordKeys),
		lookups: newLine[sandbox.ID, Found](lookupBatch, nil),
	}
}

// Doorbell returns the bell that gateways hear after a commit that wrote the feed.
func (b *Bindings) Doorbell() *Doorbell { return b.bell }

// Assignment says that sandboxes run on a node.
type Assignment struct {
	Sandboxes     []sandbox.ID // at least one, each once; answers come in this order
	Node          node.ID
	Endpoint      string // exactly as the scheduler names it
	ReservationID string // "": an AgentENV caller, who cannot name its hold
	PlacementID   int64  // 0: not told
	Tenant        string // "": not told
	Size          sandbox.Size
	SealedAnswer  []byte // kept with the placement; nil: none

	// ExpectedRevision is the revision the caller saw of a binding to another node; 0: any.
	ExpectedRevision sandbox.Revision
}

// Assigned is a binding after it was recorded.
type Assigned struct {
	Sandbox     sandbox.ID
	Revision    sandbox.Revision
	Incarnation sandbox.Incarnation
}

// Found is where a bound sandbox is.
type Found struct {
	Node        node.ID
	Endpoint    string // of now, not of the day the sandbox was recorded
	Revision    sandbox.Revision
	Incarnation sandbox.Incarnation
	Status      node.Status // the effective one
}
