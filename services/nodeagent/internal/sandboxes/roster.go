package sandboxes

import (
	"slices"
	"strings"

	"berth/services/internal/sandbox"
)

// Usage is what the sandboxes of a node take.
type Usage struct {
	Starting, Running, Paused          int
	CPUMillis, MemoryBytes             int64 // of starting and running ones
	PausedCPUMillis, PausedMemoryBytes int64
	Created, Failed                    uint64 // creates since the agent started
}

// Sandboxes is how many there are in any state.
func (u Usage) Sandboxes() int { return u.Starting + u.Running + u.Paused }

// Usage returns what the sandboxes take now.
func (m *Manager) Usage() Usage {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.usage()
}

func (m *Manager) usage() Usage {
	u := Usage{Created: m.created, Failed: m.failed}
	for _, e := range m.entries {
		switch {
		case e.ended:
		case e.status == Paused:
			u.Paused++
			u.PausedCPUMillis += e.state.CPUMillis
			u.PausedMemoryBytes += e.state.MemoryBytes
		default:
			if e.status == Creating {
				u.Starting++
			} else {
				u.Running++
			}
			u.CPUMillis += e.state.CPUMillis
			u.MemoryBytes += e.state.MemoryBytes
		}
	}
	return u
}

// List returns every sandbox, sorted by id. What is being created is in it, what is deleted is not.
func (m *Manager) List() []View {
	m.mu.Lock()
	views := make([]View, 0, len(m.entries))
	for _, e := range m.entries {
		if !e.ended {
			views = append(views, e.view())
		}
	}
	m.mu.Unlock()
	slices.SortFunc(views, func(a, b View) int { return strings.Compare(string(a.ID), string(b.ID)) })
	return views
}

// Get returns one sandbox, or ErrNotFound.
func (m *Manager) Get(id sandbox.ID) (View, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, found := m.entries[id]
	if !found || e.ended {
		return View{}, ErrNotFound
	}
	return e.view(), nil
}
