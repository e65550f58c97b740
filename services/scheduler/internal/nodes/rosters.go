package nodes

import (
	"bytes"
	"cmp"
	"sync"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// maxKept bounds the roster entries that a replica remembers of all nodes together, about 100 bytes
// each.
const maxKept = 1 << 20

// keptRosters remembers the roster that each node's bindings were last compared with by this replica,
// so that a changed one need not be compared in full. What is not remembered costs a full comparison.
type keptRosters struct {
	mu      sync.Mutex
	most    int // entries
	entries int
	byNode  map[node.ID]keptRoster
}

type keptRoster struct {
	digest []byte
	roster node.Roster
}

func newKeptRosters(most int) *keptRosters {
	return &keptRosters{most: most, byNode: map[node.ID]keptRoster{}}
}

// keep remembers a roster whose comparison has committed.
func (k *keptRosters) keep(id node.ID, digest []byte, roster node.Roster) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.drop(id)
	if k.entries+len(roster) > k.most {
		clear(k.byNode)
		k.entries = 0
	}
	if len(roster) > k.most {
		return
	}
	k.byNode[id] = keptRoster{digest: digest, roster: roster}
	k.entries += len(roster)
}

func (k *keptRosters) forget(id node.ID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.drop(id)
}

func (k *keptRosters) drop(id node.ID) {
	k.entries -= len(k.byNode[id].roster)
	delete(k.byNode, id)
}

// delta returns the sandboxes whose entries differ between the remembered roster and this one, in
// order, if the remembered one is the one with digest, which the lease row has.
func (k *keptRosters) delta(id node.ID, digest []byte, roster node.Roster) ([]sandbox.ID, bool) {
	k.mu.Lock()
	kept, found := k.byNode[id]
	k.mu.Unlock()
	if !found || !bytes.Equal(kept.digest, digest) {
		return nil, false
	}
	return difference(kept.roster, roster), true
}

// difference returns the sandboxes that only one of two rosters lists, or both with another
// incarnation, in order.
func difference(before, now node.Roster) []sandbox.ID {
	var ids []sandbox.ID
	for len(before) > 0 || len(now) > 0 {
		order := 0
		switch {
		case len(before) == 0:
			order = 1
		case len(now) == 0:
			order = -1
		default:
			order = cmp.Compare(before[0].Sandbox, now[0].Sandbox)
		}
		switch {
		case order < 0:
			ids, before = append(ids, before[0].Sandbox), before[1:]
		case order > 0:
			ids, now = append(ids, now[0].Sandbox), now[1:]
		default:
			if before[0].Incarnation != now[0].Incarnation {
				ids = append(ids, now[0].Sandbox)
			}
			before, now = before[1:], now[1:]
		}
	}
	return ids
}
