package journal

import (
	"sync"

	"berth/services/internal/sandbox"
)

type revisions struct {
	mu sync.Mutex
	of map[sandbox.ID]sandbox.Revision
}

func newRevisions() *revisions { return &revisions{of: make(map[sandbox.ID]sandbox.Revision)} }

// raise sets the highest revision of id to r if it is higher, and returns the highest.
func (v *revisions) raise(id sandbox.ID, r sandbox.Revision) sandbox.Revision {
	v.mu.Lock()
	defer v.mu.Unlock()
	if r > v.of[id] {
		v.of[id] = r
	}
	return v.of[id]
}

func (v *revisions) get(id sandbox.ID) sandbox.Revision {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.of[id]
}

func (v *revisions) forget(id sandbox.ID) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.of, id)
}
