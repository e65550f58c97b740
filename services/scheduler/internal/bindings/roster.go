package bindings

import (
	"time"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// recheckHeld is when a sandbox is judged again that another live node has: a node that came back under
// another id lists it while the lease of its former one runs out.
const recheckHeld = 10 * time.Second

// change is what a roster means for one sandbox.
type change int

const (
	leave         change = iota // as it should be, or not to be judged: nothing changes
	counted                     // bound here and listed: its hold ends, for the report counts it
	adopted                     // nobody has it: bound here
	moved                       // parked, or its node has no live lease: bound here
	revived                     // gone long enough that no late roster can be meant: bound here
	ended                       // bound here, not listed, old enough: gone
	spared                      // bound here, not listed, but younger than the grace
	late                        // gone a moment ago: the roster is older than that
	orphanDeleted               // gone by intent: the node must end it
	orphanHeld                  // another live node has it
	postponed                   // it would change, but enough else does in this heartbeat
	changeCount   = int(iota)
)

// String returns the change as metrics and logs say it, and "" for what is no change.
func (c change) String() string {
	switch c {
	case adopted:
		return "adopted"
	case moved:
		return "moved"
	case revived:
		return "revived"
	case ended:
		return "ended"
	case spared:
		return "spared"
	case late:
		return "late"
	case orphanDeleted:
		return "orphan_deleted"
	case orphanHeld:
		return "orphan_held_elsewhere"
	case postponed:
		return "postponed"
	case leave, counted:
	}
	return ""
}

// binds reports whether c leads to a row bound here.
func (c change) binds() bool { return c == adopted || c == moved || c == revived }

// writes reports whether c changes a row that exists.
func (c change) writes() bool { return c == moved || c == revived || c == ended }

// kind returns the event that c is, and "" where it is none. Orphans are events when they are new.
func (c change) kind() Kind {
	switch c {
	case adopted:
		return KindAdopted
	case moved:
		return KindMoved
	case revived:
		return KindRevived
	case ended:
		return KindGone
	default:
		return ""
	}
}

// view is what a roster is judged by besides the rows: whose it is, and the database's time when the
// rows were read.
type view struct {
	Node           node.ID
	Cordoned       bool // the node takes nothing new, nor what a drain parked there
	AsOf           time.Time
	Grace          time.Duration // a binding younger than this is not ended
	TombstoneGrace time.Duration // what is gone shorter than this is not adopted again
	Orphans        bool          // the node has rows of orphans; no judgement goes by it
}

// judge returns what it means for one sandbox that the roster lists it or not, while its row is held;
// nil: there is none.
func (v view) judge(listed bool, held *Held) change {
	if !listed {
		switch {
		case held == nil || held.State != sandbox.Bound || held.NodeID != v.Node:
			return leave
		case v.AsOf.Sub(held.BoundAt) < v.Grace:
			return spared
		}
		return ended
	}
	if held == nil {
		return adopted
	}
	switch held.State {
	case sandbox.Bound:
		switch {
		case held.NodeID == v.Node:
			return counted
		case held.HolderLive:
			return orphanHeld
		}
		return moved
	case sandbox.Parked:
		if v.Cordoned && held.NodeID == v.Node && held.EndedBy != nil && *held.EndedBy == sandbox.EndedByDrain {
			return leave // its route was taken from it on purpose; uncordoning the node gives it back
		}
		return moved
	case sandbox.Gone:
		return v.judgeGone(held)
	}
	return leave // a newer version's state: that version judges it
}

func (v view) judgeGone(held *Held) change {
	if held.EndedBy != nil && (*held.EndedBy == sandbox.EndedByDelete || *held.EndedBy == sandbox.EndedBySuspend) {
		return orphanDeleted
	}
	if held.EndedAt != nil && v.AsOf.Sub(*held.EndedAt) < v.TombstoneGrace {
		return late
	}
	return revived
}

// again returns how long after v.AsOf held may be judged otherwise, though the roster stays the same;
// 0: it will not.
func (v view) again(c change, held *Held) time.Duration {
	switch c {
	case spared:
		return max(v.Grace-v.AsOf.Sub(held.BoundAt), time.Millisecond)
	case late:
		return max(v.TombstoneGrace-v.AsOf.Sub(*held.EndedAt), time.Millisecond)
	case orphanHeld:
		return recheckHeld // the holder's lease may end: then the sandbox is here
	case postponed:
		return time.Millisecond
	default:
		return 0
	}
}
