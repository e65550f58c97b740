package sandboxes

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"berth/services/internal/sandbox"
	"berth/services/nodeagent/internal/isolation"
	"berth/services/nodeagent/internal/proxy"
	"berth/services/nodeagent/internal/templates"
)

// Status is what a sandbox is.
type Status string

// The states, as the API spells those it shows; creating is told as running.
const (
	Creating Status = "creating"
	Running  Status = "running"
	Paused   Status = "paused"
)

// State is what the journal keeps of a sandbox so that it can be started again.
type State struct {
	TemplateID   string             `json:"templateID"` // as the create named it
	Template     templates.Template `json:"template"`
	Metadata     map[string]string  `json:"metadata,omitempty"`
	Env          map[string]string  `json:"env,omitempty"`
	Reservation  string             `json:"reservation,omitempty"`
	StartedAt    time.Time          `json:"startedAt"`
	EndAt        time.Time          `json:"endAt"`
	Timeout      time.Duration      `json:"timeout"` // as asked for last; a resume by traffic gets it again
	Paused       bool               `json:"paused,omitempty"`
	AutoPause    bool               `json:"autoPause,omitempty"`
	AutoResume   bool               `json:"autoResume,omitempty"`
	TrafficToken string             `json:"trafficToken,omitempty"` // set: whoever talks to its ports must show it
	CPUMillis    int64              `json:"cpuMillis"`
	MemoryBytes  int64              `json:"memoryBytes"`
}

// View is a sandbox as it was at one moment.
type View struct {
	ID     sandbox.ID
	Status Status
	State
}

// entry is one sandbox of a Manager.
type entry struct {
	id      sandbox.ID
	created chan struct{} // closed when creating is over, whatever came of it

	life sync.Mutex // one change of its life at a time; held while processes start, freeze and end

	// The rest is guarded by Manager.mu.
	status Status
	state  State
	run    *isolation.Sandbox // nil: no processes
	conns  *proxy.Conns       // to run
	timer  *time.Timer
	ended  bool // a tombstone is written: unknown to everybody
}

func (e *entry) view() View { return View{ID: e.id, Status: e.status, State: e.state} }

// recordState writes the state to the journal. e.life is held.
func (m *Manager) recordState(e *entry, s State) error {
	text, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("remember %s: %w", e.id, err)
	}
	return m.Journal.Update(e.id, recordOf(text))
}

// change replaces the state of e, on disk first. e.life is held.
func (m *Manager) change(e *entry, alter func(*State)) error {
	m.mu.Lock()
	s := e.state
	m.mu.Unlock()
	alter(&s)
	if err := m.recordState(e, s); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	e.state = s
	return nil
}

// hold returns the live entry of id with its life held, after its create is over. The caller calls e.life.Unlock.
func (m *Manager) hold(ctx context.Context, id sandbox.ID) (*entry, error) {
	e, err := m.find(ctx, id)
	if err != nil {
		return nil, err
	}
	e.life.Lock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if e.ended {
		e.life.Unlock()
		return nil, ErrNotFound
	}
	return e, nil
}

// find returns the entry of id once its create is over.
func (m *Manager) find(ctx context.Context, id sandbox.ID) (*entry, error) {
	m.mu.Lock()
	e, found := m.entries[id]
	m.mu.Unlock()
	if !found {
		return nil, ErrNotFound
	}
	select {
	case <-e.created:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.entries[id] != e || e.ended {
		return nil, ErrNotFound
	}
	return e, nil
}
