package bindings

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/placement"
)

// Told is one thing that a node tells of a sandbox.
type Told struct {
	Kind        Kind // KindCreate, KindDelete, KindPause, KindResume, KindFork
	Sandbox     sandbox.ID
	Size        sandbox.Size // zero: not told
	Disk        int64        // bytes
	Incarnation sandbox.Incarnation
	Seq         int64 // grows within an instance; 0: not told

	// Refused is why the event does not act, EffectStale or EffectRepeated; it is stored all the same.
	Refused Effect
}

// Hearing is what one node tells, in order.
type Hearing struct {
	Node     node.ID
	Cluster  string
	Cordoned bool
	Instance string
	Told     []Told
}

// Heard is what came of a hearing. It counts once the transaction has committed: Listened.
type Heard struct {
	Fed    bool // the feed was written: ring after the commit
	events []Event
}

// Effects returns what came of each thing that was told, in order.
func (h Heard) Effects() []Effect {
	var effects []Effect
	for _, e := range h.events {
		if e.Told {
			effects = append(effects, e.Effect)
		}
	}
	return effects
}

// heard is what an event means for its sandbox.
type heard int

const (
	nothing heard = iota // but for its line in the log
	arrives              // bound here, with a hold
	leaves               // gone
	strays               // bound elsewhere: an orphan
)

// hear returns what e means while its sandbox's row is held, nil: there is none, and the word for it. The
// rules are the roster's, but that an event takes nothing from another node, dead or alive, and spares no
// tombstone but that of a deletion: a roster, which is the truth, comes within a heartbeat.
func (v view) hear(e Told, held *Held) (heard, Effect) {
	here := held != nil && held.State == sandbox.Bound && held.NodeID == v.Node
	switch {
	case e.Kind == KindDelete && here && (e.Incarnation == 0 || e.Incarnation == held.Incarnation):
		return leaves, EffectEnded
	case e.Kind == KindPause && here:
		return nothing, EffectNoted
	case e.Kind == KindDelete, e.Kind == KindPause:
		return nothing, EffectIgnored
	case held != nil && held.State == sandbox.Bound && !here:
		return strays, EffectOrphan
	}
	switch v.judge(true, held) {
	case counted:
		if e.Kind == KindResume {
			return nothing, EffectNoted
		}
		return nothing, EffectAlready
	case adopted, moved, revived, late:
		return arrives, EffectBound
	case orphanDeleted:
		return nothing, EffectDeleted
	default:
		return nothing, EffectIgnored // parked by a drain of this node, or a newer version's state
	}
}

// Hear makes the bindings follow what a node tells and writes it into the log. It joins the caller's
// transaction, which holds advisory.Sandbox of every sandbox that is told of and has locked the node's
// lease, so no roster of the node is compared meanwhile. ErrRaced: see there.
func (b *Bindings) Hear(ctx context.Context, tx pgx.Tx, h Hearing) (Heard, error) {
	out, err := b.hear(ctx, tx, h)
	if err != nil && placement.HoldAppeared(err) {
		err = fmt.Errorf("%w: %w", ErrRaced, err)
	}
	if err != nil {
		return Heard{}, fmt.Errorf("hear %d events of %s: %w", len(h.Told), h.Node, err)
	}
	return out, nil
}

func (b *Bindings) hear(ctx context.Context, tx pgx.Tx, h Hearing) (Heard, error) {
	v := view{Node: h.Node, Cordoned: h.Cordoned}
	held, err := lockHeld(ctx, tx, h.acting())
	if err != nil {
		return Heard{}, err
	}
	if err := tx.QueryRow(ctx, readClockSQL).Scan(&v.AsOf); err != nil {
		return Heard{}, fmt.Errorf("read the clock: %w", err)
	}
	var (
		out     Heard
		effects = make([]Effect, len(h.Told))
		strayed []seen
		settled = map[sandbox.ID]bool{} // arrived here, or ended: no orphan
	)
	for _, round := range h.rounds() {
		var arrived, left []Told
		for _, i := range round {
			e := h.Told[i]
			var means heard
			means, effects[i] = v.hear(e, held[e.Sandbox])
			switch means {
			case arrives:
				arrived = append(arrived, e)
			case leaves:
				left = append(left, e)
			case strays:
				strayed = append(strayed, seen{e.Sandbox, OrphanHeld, held[e.Sandbox].NodeID})
			case nothing:
			}
			if e.Kind == KindDelete || means == arrives {
				settled[e.Sandbox] = true
			}
		}
		if err := h.change(ctx, tx, held, arrived, left); err != nil {
			return Heard{}, err
		}
		out.Fed = out.Fed || len(arrived)+len(left) > 0
	}
	for i, e := range h.Told {
		if e.Refused != "" {
			effects[i] = e.Refused
		}
		out.events = append(out.events, h.event(e, effects[i]))
	}
	orphans, err := h.orphans(ctx, tx, strayed, settled)
	if err != nil {
		return Heard{}, err
	}
	out.events = append(out.events, orphans...)
	return out, Note(ctx, tx, out.events...)
}

// acting returns the sandboxes of events that act, each once, in order.
func (h Hearing) acting() []sandbox.ID {
	var ids []sandbox.ID
	for _, e := range h.Told {
		if e.Refused == "" {
			ids = append(ids, e.Sandbox)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// rounds returns the places of events that act, so that no round has two of one sandbox, and those of one
// sandbox keep their order. Nearly every batch is one round.
func (h Hearing) rounds() [][]int {
	var rounds [][]int
	next := make(map[sandbox.ID]int, len(h.Told))
	for i, e := range h.Told {
		if e.Refused != "" {
			continue
		}
		round := next[e.Sandbox]
		next[e.Sandbox]++
		if round == len(rounds) {
			rounds = append(rounds, nil)
		}
		rounds[round] = append(rounds[round], i)
	}
	return rounds
}

// change writes one round: holds, then new rows, then old ones. held is then as the rows are.
func (h Hearing) change(ctx context.Context, tx pgx.Tx, held map[sandbox.ID]*Held, arrived, left []Told) error {
	ended := sandboxes(left)
	if err := placement.DropHolds(ctx, tx, ended); err != nil {
		return err
	}
	arrivals := make([]placement.Arrival, len(arrived))
	for i, e := range arrived {
		arrivals[i] = placement.Arrival{Sandbox: e.Sandbox, Size: e.Size, Created: e.Kind == KindCreate && held[e.Sandbox] == nil}
	}
	owners, err := placement.Arrive(ctx, tx, h.Node, arrivals)
	if err != nil {
		return err
	}
	want := make([]binding, len(arrived))
	for i, e := range arrived {
		want[i] = e.binding(h.Node, held[e.Sandbox], owners[e.Sandbox])
	}
	bound, err := bind(ctx, tx, h.Node, h.Cluster, want)
	if err != nil {
		return err
	}
	gone, err := end(ctx, tx, ended, sandbox.Gone, sandbox.EndedByEvent)
	if err != nil {
		return err
	}
	for _, w := range want {
		held[w.Sandbox] = &Held{
			SandboxID: w.Sandbox, State: sandbox.Bound, NodeID: h.Node, Incarnation: bound[w.Sandbox].Incarnation,
			TenantID: w.Tenant, SpreadKey: w.SpreadKey, CPUMillis: w.Size.CPUMillis, MemoryBytes: w.Size.MemoryBytes,
		}
	}
	for _, a := range gone {
		row := held[a.Sandbox]
		row.State, row.EndedBy, row.EndedAt = sandbox.Gone, new(sandbox.EndedByEvent), new(time.Time)
	}
	return nil
}

// binding returns the row to bind to here.
func (e Told) binding(here node.ID, held *Held, owner placement.Owner) binding {
	w := binding{
		Sandbox: e.Sandbox, Incarnation: 1, Origin: sandbox.FromEvent, Tenant: owner.Tenant,
		SpreadKey: owner.SpreadKey, Size: owner.Size, PlacementID: owner.PlacementID,
	}
	if held != nil {
		w.Locked, w.Incarnation = true, held.Incarnation
		if held.NodeID != here {
			w.Incarnation++
		}
		w.inherit(held)
	}
	return w
}

func sandboxes(told []Told) []sandbox.ID {
	ids := make([]sandbox.ID, len(told))
	for i, e := range told {
		ids[i] = e.Sandbox
	}
	return ids
}

func (h Hearing) event(e Told, effect Effect) Event {
	out := Event{
		Kind: e.Kind, Effect: effect, Told: true, Cluster: h.Cluster, Node: h.Node, Instance: h.Instance,
		Sandbox: e.Sandbox, Size: e.Size, Disk: e.Disk,
	}
	if e.Seq != 0 || e.Incarnation != 0 {
		out.Detail = map[string]any{"seq": e.Seq, "incarnation": int64(e.Incarnation)}
	}
	return out
}

// orphans shows what strayed, and forgets what is settled.
func (h Hearing) orphans(ctx context.Context, tx pgx.Tx, strayed []seen, settled map[sandbox.ID]bool) ([]Event, error) {
	if len(strayed)+len(settled) == 0 {
		return nil, nil
	}
	slices.SortFunc(strayed, func(x, y seen) int { return cmp.Compare(x.Sandbox, y.Sandbox) })
	strayed = slices.CompactFunc(strayed, func(x, y seen) bool { return x.Sandbox == y.Sandbox })
	return showOrphans(ctx, tx, h.Node, h.Cluster, strayed, func(id sandbox.ID) bool { return settled[id] })
}

// Listened counts and rings for what was heard, once its transaction has committed.
func (b *Bindings) Listened(h Heard) {
	b.Count(h.events...)
	if h.Fed {
		b.bell.Ring()
	}
}
