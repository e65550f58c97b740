package placement

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// round is one transaction of the worker: what it asks, what it read, what it decided.
type round struct {
	p     *Placer
	batch []*call

	keys    []pgdb.Key // waited for: requests, tenants, and one node if waits
	waits   bool       // for the node of the call that lost most
	tried   []node.ID  // nodes whose lock is taken if it is free
	planned []node.ID  // all of them
	tenants []string   // under a quota
	asked   []*Request

	locked map[node.ID]bool
	nodes  map[node.ID]*Node     // read under the locks, then with what this round adds
	ours   []*Node               // those of them that are locked, by id
	before map[[2]string]earlier // by tenant and request id
	claims map[[2]string]earlier // by tenant and create key: the live ones, this round's too
	usage  map[string]usage

	entries   []entry
	takeovers []takeover
	inserts   bool // some entries are written
	answers   []answered
	rest      []*call
}

// earlier is what a request id or a create key stands for already.
type earlier struct {
	TenantID     string
	Key          string // the request id or the create key
	PlacementID  int64
	Fingerprint  []byte
	CreateDigest []byte
	Outcome      Outcome
	Tries        int
	NodeID       *node.ID
	Reservation  *string
	SandboxIDs   []sandbox.ID `db:"sandbox_ids"`
	SealedAnswer []byte
	Endpoint     string
	Capabilities []string
	HoldMillis   *int64 // what is left; nil: nothing is open
	Overdue      bool   // it is open and past its expiry
}

// entry is a placement to be written: held room, or a refusal.
type entry struct {
	c          *call
	node       *Node // nil: refused
	refusal    error
	over       overQuota // of a refusal by quota
	id         string    // reservation id; it tells the rows of one statement apart
	sandboxIDs []sandbox.ID
	placement  int64 // after the write
}

// reasons are why nodes were refused; over a quota the nodes were not what stood in the way.
func (e *entry) reasons() map[Reason]int {
	if e.over.resource != "" {
		return map[Reason]int{}
	}
	return e.c.choice.Reasons
}

type answered struct {
	c *call
	answer
}

func (p *Placer) newRound(batch []*call) *round {
	d := &round{p: p, batch: batch, locked: map[node.ID]bool{}, nodes: map[node.ID]*Node{}}
	// Among many nodes a busy one is cheaper to avoid than to wait for. Whoever lost twice waits, for one
	// node: then it makes progress, and nobody holds one node while waiting for the next.
	var patient *call
	for _, c := range batch {
		if c.choice.Node != nil && c.losses >= patienceOfTries && (patient == nil || c.losses > patient.losses) {
			patient = c
		}
	}
	d.waits = patient != nil
	seen := map[pgdb.Key]bool{}
	add := func(key pgdb.Key) bool {
		first := !seen[key]
		seen[key] = true
		return first
	}
	for _, c := range batch {
		d.asked = append(d.asked, &c.r)
		if c.r.RequestID != "" {
			d.keys = append(d.keys, advisory.Request(c.r.Tenant, c.r.RequestID))
		}
		if c.r.CreateKey != "" {
			d.keys = append(d.keys, advisory.Request(c.r.Tenant, c.r.CreateKey))
		}
		if p.view.quotas.limit(c.r.Tenant) && add(advisory.Tenant(c.r.Tenant)) {
			d.keys = append(d.keys, advisory.Tenant(c.r.Tenant))
			d.tenants = append(d.tenants, c.r.Tenant)
		}
		if n := c.choice.Node; n != nil && add(advisory.Node(n.ID)) {
			d.planned = append(d.planned, n.ID)
			if d.waits && n.ID == patient.choice.Node.ID {
				d.keys = append(d.keys, advisory.Node(n.ID))
				d.locked[n.ID] = true
			} else {
				d.tried = append(d.tried, n.ID)
			}
		}
	}
	return d
}

// decide judges each call in order by what was read under the locks; nothing it does is visible before
// the commit.
func (d *round) decide() error {
	for _, c := range d.batch {
		if c.ctx.Err() != nil {
			continue // its caller has left, so it ends before the commit
		}
		if c.r.RequestID != "" {
			old, found := d.before[[2]string{c.r.Tenant, c.r.RequestID}]
			if found && d.replayed(c, old) {
				continue
			}
			c.tries = old.Tries
		}
		if c.r.CreateKey != "" && d.claimed(c) {
			continue
		}
		if err := d.place(c); err != nil {
			return err
		}
	}
	return nil
}

// replayed answers a call whose request id stands for a live placement. One that the call replaces is
// not live any more.
func (d *round) replayed(c *call, old earlier) bool {
	replaces := old.Outcome == Reserved && old.Reservation != nil && *old.Reservation == c.r.Replaces
	if old.Outcome != Reserved && old.Outcome != Recorded || replaces {
		return false
	}
	if !bytes.Equal(old.Fingerprint, c.r.Fingerprint) {
		d.answers = append(d.answers, answered{c, answer{err: node.ErrRequestReused}})
		return true
	}
	if c.r.CreateKey != "" && old.Outcome == Reserved && old.Overdue {
		return false // its claim is over: whoever asks now takes over, its first caller too
	}
	placed := old.placement()
	if c.r.CreateKey != "" {
		placed.State = KeyNew
		if placed.Confirmed {
			placed.State, placed.SealedAnswer = KeyDone, old.SealedAnswer
		}
	}
	d.answers = append(d.answers, answered{c, answer{placed: placed}})
	return true
}

func (old *earlier) placement() Placement {
	placed := Placement{
		ID: old.PlacementID, Endpoint: old.Endpoint, Capabilities: old.Capabilities, SandboxIDs: old.SandboxIDs,
		Confirmed: old.Outcome == Recorded, Node: *old.NodeID, Reservation: *old.Reservation,
	}
	if old.HoldMillis != nil {
		// Past its expiry it still holds, until a sweep ends it; zero would say that it does not.
		placed.Hold = time.Duration(max(*old.HoldMillis, 1)) * time.Millisecond
	}
	return placed
}

func (d *round) place(c *call) error {
	if used, limited := d.usage[c.r.Tenant]; limited {
		if over := used.exceededBy(used, &c.r); over.resource != "" {
			d.entries = append(d.entries, entry{c: c, refusal: node.ErrQuota, over: over, id: uuid.NewString()})
			return nil
		}
	}
	planned := c.choice.Node
	if planned == nil {
		d.entries = append(d.entries, entry{c: c, refusal: c.choice.Cause, id: uuid.NewString()})
		return nil
	}
	n := d.nodes[planned.ID]
	if n == nil {
		d.p.view.readAt = time.Time{} // its row is gone
	}
	if n == nil || !d.locked[planned.ID] || check(&c.r, n, &d.p.cfg.Limits, c.choice.Unheard).stage != passed {
		if n = d.elsewhere(c); n == nil {
			d.lose(c, planned.ID)
			return nil
		}
	}
	ids, err := drawIDs(&c.r, n)
	if err != nil {
		return err
	}
	n.take(&c.r, 1)
	if used, limited := d.usage[c.r.Tenant]; limited {
		d.usage[c.r.Tenant] = used.add(&c.r)
	}
	d.entries = append(d.entries, entry{c: c, node: n, id: uuid.NewString(), sandboxIDs: ids})
	d.claim(c)
	return nil
}

// elsewhere chooses again among the nodes that this transaction has locked and read: another node now
// is better than the planned one a round later, unless it is much fuller, for where replicas hold most
// of the locks, all creates would gather on the few nodes that are left. Nil if none of them will do.
func (d *round) elsewhere(c *call) *Node {
	choice := d.p.chooser.Choose(&c.r, d.ours, d.p.draw(nil))
	if choice.Node == nil || c.losses < patienceOfTries && choice.score() > c.choice.score()+detour {
		return nil
	}
	c.choice = choice
	return choice.Node
}

// lose lets a call go on to another round, where it avoids a node whose lock it did not get.
func (d *round) lose(c *call, planned node.ID) {
	d.rest = append(d.rest, c)
	if d.locked[planned] {
		return // the node was full, and the view knows that now
	}
	c.losses++
	c.contended.Store(true)
	if c.avoid == nil {
		c.avoid = map[node.ID]bool{}
	}
	c.avoid[planned] = true
}

// drawIDs draws the ids of the sandboxes for a node that takes them, so that a lost answer never makes
// a second sandbox. Other nodes draw their own.
func drawIDs(r *Request, n *Node) ([]sandbox.ID, error) {
	if !n.has(route.CapabilityCreateKey) {
		return nil, nil
	}
	ids := make([]sandbox.ID, r.Count)
	for i := range ids {
		id, err := sandbox.NewID()
		if err != nil {
			return nil, err
		}
		ids[i] = id
	}
	return ids, nil
}

// stored drops the entries that need no row: refusals without request id above the rate.
func (d *round) stored() []entry {
	var kept []entry
	for i := range d.entries {
		e := &d.entries[i]
		if e.refusal == nil || e.c.r.RequestID != "" || d.p.stored.allow() {
			kept = append(kept, *e)
		}
	}
	return kept
}

// tell answers all that was decided. The transaction has committed.
func (d *round) tell() {
	for _, a := range d.answers {
		a.c.answer(a.placed, a.err)
	}
	for i := range d.entries {
		e := &d.entries[i]
		c := e.c
		if e.refusal != nil {
			d.p.metrics.refused(e.refusal, e.over.resource)
			told := refused(&c.r, e.refusal, e.reasons(), c.tries)
			if e.over.resource != "" {
				told = e.over.tell(told)
			}
			told.Placement = e.placement
			c.answer(Placement{}, told)
			continue
		}
		d.p.metrics.placed(c.arrived)
		c.answer(Placement{
			ID: e.placement, Reservation: e.id, Node: e.node.ID, Endpoint: e.node.Endpoint, Capabilities: e.node.Capabilities,
			Hold: c.r.TTL, SandboxIDs: e.sandboxIDs, State: stateOfNew(&c.r),
		}, nil)
	}
}

// refusalWords are the refusals as the rows spell them.
var refusalWords = map[error]string{ //nolint:gochecknoglobals // a constant table
	node.ErrNoneReady: "no_ready_node", node.ErrNoRoom: "capacity", node.ErrConstraints: "constraints", node.ErrQuota: "quota",
}

// columns are the entries as arrays, one for each column; texts, for pgx has no array of arrays of unequal length.
type columns struct {
	ids, tenants, clusters, outcomes, sandboxIDs, strategies, reasons, candidates, spreadKeys []string
	requestIDs, createKeys, nodes, refusals                                                   []*string
	fingerprints, digests                                                                     [][]byte
	counts                                                                                    []int32
	cpuMillis, memoryBytes, ttlMillis                                                         []int64
	named                                                                                     []bool
}

func (c *columns) add(e *entry, strategy Strategy) error {
	r := &e.c.r
	outcome, reasons, candidates := Rejected, e.reasons(), e.c.choice.Candidates
	var requestID, createKey, nodeID, refusal *string
	if e.refusal == nil {
		outcome, nodeID = Reserved, new(string(e.node.ID))
	} else {
		refusal = new(refusalWords[e.refusal])
	}
	if e.over.resource != "" {
		candidates = []Candidate{e.over.candidate()}
	}
	if r.RequestID != "" {
		requestID = &r.RequestID
	}
	if r.CreateKey != "" {
		createKey = &r.CreateKey
	}
	if candidates == nil {
		candidates = []Candidate{}
	}
	reasonsJSON, err := json.Marshal(reasons)
	if err != nil {
		return fmt.Errorf("write reasons: %w", err)
	}
	candidatesJSON, err := json.Marshal(candidates)
	if err != nil {
		return fmt.Errorf("write candidates: %w", err)
	}
	c.ids = append(c.ids, e.id)
	c.tenants = append(c.tenants, r.Tenant)
	c.clusters = append(c.clusters, r.Cluster)
	c.outcomes = append(c.outcomes, string(outcome))
	c.sandboxIDs = append(c.sandboxIDs, joinIDs(e.sandboxIDs))
	c.strategies = append(c.strategies, string(strategy))
	c.reasons = append(c.reasons, string(reasonsJSON))
	c.candidates = append(c.candidates, string(candidatesJSON))
	c.spreadKeys = append(c.spreadKeys, r.Constraints.SpreadKey)
	c.requestIDs = append(c.requestIDs, requestID)
	c.createKeys = append(c.createKeys, createKey)
	c.digests = append(c.digests, r.Digest)
	c.nodes = append(c.nodes, nodeID)
	c.refusals = append(c.refusals, refusal)
	c.fingerprints = append(c.fingerprints, r.Fingerprint)
	c.counts = append(c.counts, int32(r.Count))
	c.cpuMillis = append(c.cpuMillis, r.Size.CPUMillis)
	c.memoryBytes = append(c.memoryBytes, r.Size.MemoryBytes)
	c.ttlMillis = append(c.ttlMillis, r.TTL.Milliseconds())
	c.named = append(c.named, r.Named)
	return nil
}

func joinIDs(ids []sandbox.ID) string {
	var text []byte
	for i, id := range ids {
		if i > 0 {
			text = append(text, ',')
		}
		text = append(text, id...)
	}
	return string(text)
}

// run is the whole transaction, in two trips.
func (d *round) run(ctx context.Context) error {
	started := time.Now()
	return d.p.inTwoTrips(ctx, d.question(), func(results *reader) error {
		if err := d.read(results); err != nil {
			return err
		}
		if d.waits {
			d.p.metrics.waited(started)
		}
		return d.decide()
	}, d.write, d.written)
}
