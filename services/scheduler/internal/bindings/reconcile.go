package bindings

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/placement"
)

// Report is a roster that is to be compared with the bindings.
type Report struct {
	Node     node.ID
	Cluster  string
	Roster   node.Roster
	Cordoned bool

	// Delta, where Partial is set, has the only sandboxes to look at: those whose entry differs from a
	// roster that was compared before. Else all of the roster and all that is bound to the node is.
	Partial bool
	Delta   []sandbox.ID
}

// Outcome is what came of a report. Its numbers count once the transaction has committed: Settle.
type Outcome struct {
	Orphans []sandbox.ID // by id; the node must end these
	Fed     bool         // the feed was written: ring after the commit

	// RecheckIn is when the same roster may mean something else, because a grace is over then; 0: not
	// before the next full comparison.
	RecheckIn time.Duration

	counts  [changeCount]int
	example [changeCount]sandbox.ID // one of each, for the log
	events  []Event
}

// ChangesAtOnce bounds the bindings that one call of a node changes. Each of them is a row, its F and a line of
// the log: all of the largest roster, on a machine that is busy, would outlast the caller again and again,
// and its node would never get a lease. The rest changes with the next heartbeats, which are compared in full.
const ChangesAtOnce = 10_000

// recheckBusy is when a holder's lease is looked at again that was being renewed or ended.
const recheckBusy = 5 * time.Second

// judged is one sandbox of a comparison.
type judged struct {
	entry  node.Entry
	listed bool
	held   *Held
	change change
}

// Reconcile makes the bindings of a node what its roster says, by the table of judge, in the
// transaction of its heartbeat, which holds advisory.Node. It reads all rows without locking them, and
// locks and judges again only those that would change: most rosters change little. ErrRaced: see
// there.
func (b *Bindings) Reconcile(ctx context.Context, tx pgx.Tx, r Report) (Outcome, error) {
	all, v, err := b.compare(ctx, tx, r)
	if err != nil {
		return Outcome{}, fmt.Errorf("reconcile %s: %w", r.Node, err)
	}
	postpone(all, ChangesAtOnce)
	if err := lockChanged(ctx, tx, v, all); err != nil {
		return Outcome{}, fmt.Errorf("reconcile %s: %w", r.Node, err)
	}
	busy, err := spareLive(ctx, tx, r.Node, all)
	if err != nil {
		return Outcome{}, fmt.Errorf("reconcile %s: %w", r.Node, err)
	}
	out := sum(v, all)
	if busy {
		out.recheck(recheckBusy)
	}
	if err := apply(ctx, tx, r, all); err != nil {
		return Outcome{}, fmt.Errorf("reconcile %s: %w", r.Node, err)
	}
	if out.events, err = tell(ctx, tx, r, v, all); err != nil {
		return Outcome{}, fmt.Errorf("reconcile %s: %w", r.Node, err)
	}
	return out, nil
}

// heldRows are bindings as they are judged, without a lock.
const heldRows = `
SELECT  b.sandbox_id, b.state, b.node_id, b.revision, b.incarnation, b.origin, b.tenant_id, b.spread_key, b.cpu_millis,
        b.memory_bytes, b.placement_id, b.bound_at, b.ended_at, b.ended_by,
        COALESCE(l.ended_at IS NULL AND l.expires_at > clock_timestamp(), false) AS holder_live
FROM    bindings AS b
LEFT JOIN node_leases AS l ON l.node_id = b.node_id`

// selectBoundHereSQL reads what is bound to a node: of most rosters that is all, from a few neighbouring pages.
const selectBoundHereSQL = heldRows + `
WHERE   b.node_id = @node AND b.state = 'bound'`

const selectHeldSQL = heldRows + `
WHERE   b.sandbox_id = ANY (@ids::text[])`

const readClockSQL = `SELECT clock_timestamp()`

// readClockHereSQL reads besides whether the node has rows of orphans: most have none, and then there is
// nothing to compare them with.
const readClockHereSQL = `SELECT clock_timestamp(), EXISTS (SELECT 1 FROM orphans WHERE node_id = @node)`

func (b *Bindings) compare(ctx context.Context, tx pgx.Tx, r Report) ([]*judged, view, error) {
	v := view{Node: r.Node, Cordoned: r.Cordoned, Grace: b.cfg.Grace, TombstoneGrace: b.cfg.TombstoneGrace}
	if err := tx.QueryRow(ctx, readClockHereSQL, pgx.StrictNamedArgs{"node": r.Node}).Scan(&v.AsOf, &v.Orphans); err != nil {
		return nil, v, fmt.Errorf("read the clock: %w", err)
	}
	ids := r.Delta
	if !r.Partial {
		ids = r.Roster.IDs()
	}
	held, err := r.read(ctx, tx, ids)
	if err != nil {
		return nil, v, fmt.Errorf("read bindings: %w", err)
	}

	all := make([]*judged, 0, len(ids)+len(held))
	for _, id := range ids {
		j := &judged{entry: node.Entry{Sandbox: id}, held: held[id]}
		j.entry, j.listed = r.entry(id)
		delete(held, id)
		all = append(all, j)
	}
	for id, row := range held {
		all = append(all, &judged{entry: node.Entry{Sandbox: id}, held: row})
	}
	slices.SortFunc(all, func(x, y *judged) int { return cmp.Compare(x.entry.Sandbox, y.entry.Sandbox) })
	for _, j := range all {
		j.change = v.judge(j.listed, j.held)
	}
	return all, v, nil
}

// read returns the rows of ids, and where the comparison is not partial all that is bound to the node. The
// clock was read before, so no age comes out longer than it is.
func (r Report) read(ctx context.Context, tx pgx.Tx, ids []sandbox.ID) (map[sandbox.ID]*Held, error) {
	held := make(map[sandbox.ID]*Held, len(ids))
	query := func(sql string, args pgx.StrictNamedArgs) error {
		rows, err := tx.Query(ctx, sql, args)
		if err != nil {
			return err
		}
		found, err := collectHeld(rows)
		maps.Copy(held, found)
		return err
	}
	if !r.Partial {
		if err := query(selectBoundHereSQL, pgx.StrictNamedArgs{"node": r.Node}); err != nil {
			return nil, err
		}
	}
	var others []sandbox.ID
	for _, id := range ids {
		if held[id] == nil {
			others = append(others, id)
		}
	}
	if len(others) == 0 {
		return held, nil
	}
	return held, query(selectHeldSQL, pgx.StrictNamedArgs{"ids": others})
}

// entry returns the roster's entry of id, and whether it has one.
func (r Report) entry(id sandbox.ID) (node.Entry, bool) {
	at, found := slices.BinarySearchFunc(r.Roster, id, func(e node.Entry, id sandbox.ID) int { return cmp.Compare(e.Sandbox, id) })
	if !found {
		return node.Entry{Sandbox: id}, false
	}
	return r.Roster[at], true
}

// postpone leaves all changes but the first most to a later comparison.
func postpone(all []*judged, most int) {
	for _, j := range all {
		switch {
		case !j.change.binds() && j.change != ended:
		case most > 0:
			most--
		default:
			j.change = postponed
		}
	}
}

// lockChanged locks the rows that would change and judges them again, as they are now.
func lockChanged(ctx context.Context, tx pgx.Tx, v view, all []*judged) error {
	var ids []sandbox.ID
	for _, j := range all {
		if j.change.writes() {
			ids = append(ids, j.entry.Sandbox)
		}
	}
	locked, err := lockHeld(ctx, tx, ids)
	if err != nil {
		return err
	}
	for _, j := range all {
		if j.change.writes() {
			j.held = locked[j.entry.Sandbox] // nil: forgotten meanwhile
			j.change = v.judge(j.listed, j.held)
		}
	}
	return nil
}

// lockDeadLeasesSQL returns which nodes have no live lease, and keeps those leases as they are until
// this transaction ends. A lease that is locked is being written: its node is taken for alive. To wait
// here could deadlock, for this transaction has its own node's lease.
const lockDeadLeasesSQL = `
SELECT  node_id
FROM    node_leases
WHERE   node_id = ANY (@nodes::text[]) AND NOT (ended_at IS NULL AND expires_at > clock_timestamp())
ORDER   BY node_id
FOR     SHARE SKIP LOCKED`

const selectUnheardSQL = `
SELECT  id
FROM    unnest(@nodes::text[]) AS id
WHERE   NOT EXISTS (SELECT 1 FROM node_leases AS l WHERE l.node_id = id)`

// spareLive leaves sandboxes where they are whose holder's lease came alive after it was read, and
// tells whether there were any.
func spareLive(ctx context.Context, tx pgx.Tx, here node.ID, all []*judged) (busy bool, err error) {
	var holders []node.ID
	for _, j := range all {
		if j.change == moved && j.held.State == sandbox.Bound && j.held.NodeID != here {
			holders = append(holders, j.held.NodeID)
		}
	}
	if len(holders) == 0 {
		return false, nil
	}
	slices.Sort(holders)
	holders = slices.Compact(holders)
	dead := make(map[node.ID]bool, len(holders))
	for _, query := range []string{lockDeadLeasesSQL, selectUnheardSQL} {
		rows, err := tx.Query(ctx, query, pgx.StrictNamedArgs{"nodes": holders})
		if err != nil {
			return false, fmt.Errorf("judge %d leases: %w", len(holders), err)
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[node.ID])
		if err != nil {
			return false, fmt.Errorf("judge %d leases: %w", len(holders), err)
		}
		for _, id := range ids {
			dead[id] = true
		}
	}
	for _, j := range all {
		if j.change == moved && j.held.State == sandbox.Bound && j.held.NodeID != here && !dead[j.held.NodeID] {
			j.change, busy = orphanHeld, true
		}
	}
	return busy, nil
}

func sum(v view, all []*judged) Outcome {
	var out Outcome
	for _, j := range all {
		out.counts[j.change]++
		out.example[j.change] = j.entry.Sandbox
		out.Fed = out.Fed || j.change.binds() || j.change == ended
		if j.change == orphanDeleted {
			out.Orphans = append(out.Orphans, j.entry.Sandbox)
		}
		if in := v.again(j.change, j.held); in > 0 {
			out.recheck(in)
		}
	}
	return out
}

func (o *Outcome) recheck(in time.Duration) {
	if o.RecheckIn == 0 || in < o.RecheckIn {
		o.RecheckIn = in
	}
}

// apply writes: reservations before new rows, as Record does, and those before rows that change.
func apply(ctx context.Context, tx pgx.Tx, r Report, all []*judged) error {
	var (
		reported, over []sandbox.ID // whose holds end: listed here; ended or moved from elsewhere
		ending         []sandbox.ID
		unknown        []node.Entry
	)
	for _, j := range all {
		id := j.entry.Sandbox
		switch j.change {
		case counted:
			reported = append(reported, id)
		case adopted, revived:
			unknown = append(unknown, j.entry)
			reported = append(reported, id)
		case moved:
			over = append(over, id)
		case ended:
			over = append(over, id)
			ending = append(ending, id)
		case leave, spared, late, orphanDeleted, orphanHeld, postponed:
		}
	}
	if err := placement.Listed(ctx, tx, r.Node, reported); err != nil {
		return err
	}
	if err := placement.DropHolds(ctx, tx, over); err != nil {
		return err
	}
	owners, err := placement.Adopt(ctx, tx, r.Node, unknown)
	if err != nil {
		return err
	}
	var want []binding
	for _, j := range all {
		if j.change.binds() {
			want = append(want, j.binding(r.Node, owners[j.entry.Sandbox]))
		}
	}
	if _, err = bind(ctx, tx, r.Node, r.Cluster, want); err != nil {
		return err
	}
	_, err = end(ctx, tx, ending, sandbox.Gone, sandbox.EndedByRoster)
	return err
}

// tell shows the orphans that were listed and writes what changed into the log, and returns those events.
func tell(ctx context.Context, tx pgx.Tx, r Report, v view, all []*judged) ([]Event, error) {
	var (
		events []Event
		orphan []seen
		here   = map[sandbox.ID]bool{}
	)
	for _, j := range all {
		id := j.entry.Sandbox
		if j.change.binds() || j.change == counted {
			here[id] = true
		}
		if kind := j.change.kind(); kind != "" {
			events = append(events, j.event(r, kind))
		}
		switch j.change {
		case orphanDeleted:
			orphan = append(orphan, seen{Sandbox: id, Reason: OrphanDeleted})
		case orphanHeld:
			orphan = append(orphan, seen{Sandbox: id, Reason: OrphanHeld, Holder: j.held.NodeID})
		default:
		}
	}
	if len(orphan) > 0 || v.Orphans {
		shown, err := showOrphans(ctx, tx, r.Node, r.Cluster, orphan, func(id sandbox.ID) bool { return here[id] })
		if err != nil {
			return nil, err
		}
		events = append(events, shown...)
	}
	return events, Note(ctx, tx, events...)
}

func (j *judged) event(r Report, kind Kind) Event {
	e := Event{Kind: kind, Cluster: r.Cluster, Node: r.Node, Sandbox: j.entry.Sandbox}
	switch {
	case kind == KindGone:
		e.Effect = Effect(sandbox.EndedByRoster)
	case kind == KindMoved && j.held.NodeID != r.Node:
		e.Detail = map[string]any{"from_node_id": j.held.NodeID}
	}
	return e
}

// binding returns the row to bind to here. What a placement knows goes before what the row says, and
// that before what the node says.
func (j *judged) binding(here node.ID, owner placement.Owner) binding {
	w := binding{
		Sandbox: j.entry.Sandbox, Incarnation: 1, Origin: sandbox.Adopted, Tenant: owner.Tenant,
		SpreadKey: owner.SpreadKey, Size: owner.Size, PlacementID: owner.PlacementID,
	}
	if j.held != nil {
		w.Locked, w.Incarnation = true, j.held.Incarnation
		if j.held.NodeID != here {
			w.Incarnation++
		}
		if j.change == moved {
			w.Origin = j.held.Origin
		}
		w.inherit(j.held)
	}
	if w.Size == (sandbox.Size{}) {
		w.Size = j.entry.Size
	}
	return w
}

// Postponed reports whether more is to change, so that the next heartbeat should come soon.
func (o *Outcome) Postponed() bool { return o.counts[postponed] > 0 }

// Settle counts, logs and rings for an outcome whose transaction has committed.
func (b *Bindings) Settle(ctx context.Context, n node.ID, o Outcome) {
	var attrs []any
	for c, count := range o.counts {
		word := change(c).String()
		if word == "" || count == 0 {
			continue
		}
		b.metrics.changes.WithLabelValues(word).Add(float64(count))
		attrs = append(attrs, slog.Group(word, slog.Int("count", count), slog.Any("sandbox", o.example[c])))
	}
	if len(attrs) > 0 {
		b.log.InfoContext(ctx, "roster changed bindings", append(attrs, slog.Any("node", n))...)
	}
	b.Count(o.events...)
	if o.Fed {
		b.bell.Ring()
	}
}
