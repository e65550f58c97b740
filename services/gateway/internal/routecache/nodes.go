package routecache

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"berth/services/internal/node"
)

// nodeTable is all nodes by id. There are few and they rarely change, so a change copies the map
// and readers take no lock.
type nodeTable struct {
	mu    sync.Mutex
	table atomic.Pointer[nodeMaps]
}

type nodeMaps struct {
	byID    map[node.ID]*Node
	trusted map[string]bool
}

func (t *nodeTable) get(id node.ID) *Node {
	if m := t.table.Load(); m != nil {
		return m.byID[id]
	}
	return nil
}

func (t *nodeTable) all() []*Node {
	if m := t.table.Load(); m != nil {
		return slices.Collect(maps.Values(m.byID))
	}
	return nil
}

func (t *nodeTable) trustedAddress(address string) bool {
	m := t.table.Load()
	return m != nil && m.trusted[address]
}

// put keeps each of nodes that is not older than what is there, and returns what is there for the
// last of them.
func (t *nodeTable) put(nodes ...*Node) *Node {
	t.mu.Lock()
	defer t.mu.Unlock()
	next := &nodeMaps{byID: map[node.ID]*Node{}, trusted: map[string]bool{}}
	if m := t.table.Load(); m != nil {
		maps.Copy(next.byID, m.byID)
	}
	var last *Node
	for _, n := range nodes {
		if old := next.byID[n.ID]; old == nil || n.Revision >= old.Revision {
			next.byID[n.ID] = n
		}
		last = next.byID[n.ID]
	}
	for _, n := range next.byID {
		if n.Trusted {
			next.trusted[n.Address] = true
		}
	}
	t.table.Store(next)
	return last
}

func (t *nodeTable) clear() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.table.Store(nil)
}
