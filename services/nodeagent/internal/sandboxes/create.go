package sandboxes

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"berth/services/internal/sandbox"
	"berth/services/nodeagent/internal/journal"
)

// Create is what a client asks for. What is zero takes the template's or the node's default.
type Create struct {
	ID          sandbox.ID // empty: draw one
	Reservation string
	TemplateID  string
	Timeout     time.Duration
	Metadata    map[string]string
	Env         map[string]string
	AutoPause   bool
	AutoResume  bool
	Private     bool // its ports ask for a token
	CPUMillis   int64
	MemoryBytes int64
}

// DefaultTimeout is the life of a sandbox whose create names none; the E2B API types say so.
const DefaultTimeout = 300 * time.Second

// createLimit bounds a create from admission to the first process.
const createLimit = 60 * time.Second

// Create makes a sandbox and returns the answer for its client. It makes one sandbox for each id, whatever happens in between:
// a second create of an id waits for the first and returns its answer, and the create of a deleted one is sandbox.ErrDeleted. A
// create goes on when its caller leaves. ErrFull: there is no room; templates.ErrUnknown: there is no such template. After an error the
// id is free again.
func (m *Manager) Create(ctx context.Context, c Create) (json.RawMessage, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createLimit)
	defer cancel()
	state, err := m.newState(c)
	if err != nil {
		return nil, err
	}
	if c.ID == "" {
		if c.ID, err = sandbox.NewID(); err != nil {
			return nil, err
		}
	}
	e, first, err := m.admit(c.ID, state)
	if err != nil {
		return nil, err
	}
	if !first {
		return m.repeated(ctx, c.ID)
	}
	answer, err := m.make(ctx, e)
	m.mu.Lock()
	if err != nil {
		m.failed++
		delete(m.entries, c.ID)
	} else {
		m.created++
		e.status = Running
	}
	m.mu.Unlock()
	if err == nil {
		m.arm(ctx, e)
	}
	close(e.created)
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", c.ID, err)
	}
	m.Log.InfoContext(ctx, "sandbox created", slog.Any("sandbox", c.ID), slog.String("template", state.Template.Name))
	return answer, nil
}

func (m *Manager) newState(c Create) (State, error) {
	t, err := m.Templates.Find(c.TemplateID)
	if err != nil {
		return State{}, err
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	if c.CPUMillis == 0 {
		c.CPUMillis = t.CPUMillis
	}
	if c.MemoryBytes == 0 {
		c.MemoryBytes = t.MemoryBytes
	}
	now := time.Now()
	s := State{
		TemplateID: c.TemplateID, Template: t, Metadata: c.Metadata, Env: c.Env, Reservation: c.Reservation,
		StartedAt: now, EndAt: now.Add(c.Timeout), Timeout: c.Timeout, AutoPause: c.AutoPause, AutoResume: c.AutoResume,
		CPUMillis: c.CPUMillis, MemoryBytes: c.MemoryBytes,
	}
	if c.Private {
		s.TrafficToken = rand.Text()
	}
	return s, nil
}

// admit takes the id for a new sandbox, in memory. first is false when it is taken already.
func (m *Manager) admit(id sandbox.ID, s State) (e *entry, first bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r, found := m.Journal.Get(id); found && r.Deleted != nil {
		return nil, false, sandbox.ErrDeleted
	}
	if e, found := m.entries[id]; found {
		if e.ended {
			return nil, false, sandbox.ErrDeleted
		}
		return e, false, nil
	}
	if m.closing {
		return nil, false, ErrClosing
	}
	if reason := m.Limits.refuses(m.usage(), s); reason != "" {
		return nil, false, fmt.Errorf("%w: %s", ErrFull, reason)
	}
	e = &entry{id: id, created: make(chan struct{}), status: Creating, state: s}
	m.entries[id] = e
	return e, true, nil
}

// refuses says what the node has no room for, given what is there already; "" if the sandbox fits.
func (l Limits) refuses(u Usage, s State) (reason string) {
	switch {
	case l.Sandboxes > 0 && u.Sandboxes() >= l.Sandboxes:
		return fmt.Sprintf("%d of %d sandboxes", u.Sandboxes(), l.Sandboxes)
	case l.CPUMillis > 0 && u.CPUMillis+u.PausedCPUMillis+s.CPUMillis > l.CPUMillis:
		return fmt.Sprintf("%d of %d thousandths of a core, %d more are asked for", u.CPUMillis+u.PausedCPUMillis, l.CPUMillis, s.CPUMillis)
	case l.MemoryBytes > 0 && u.MemoryBytes+u.PausedMemoryBytes+s.MemoryBytes > l.MemoryBytes:
		return fmt.Sprintf("%d of %d bytes of memory, %d more are asked for", u.MemoryBytes+u.PausedMemoryBytes, l.MemoryBytes, s.MemoryBytes)
	}
	return ""
}

// repeated waits for the create that has the id and returns what it answered.
func (m *Manager) repeated(ctx context.Context, id sandbox.ID) (json.RawMessage, error) {
	if _, err := m.find(ctx, id); err != nil && !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	switch r, found := m.Journal.Get(id); {
	case found && r.Deleted != nil:
		return nil, sandbox.ErrDeleted
	case !found || r.Answer == nil:
		return nil, fmt.Errorf("create %s: the first create of this id has failed", id)
	default:
		return r.Answer, nil
	}
}

// make writes the record with the answer, then starts the processes. After a failure nothing is left.
func (m *Manager) make(ctx context.Context, e *entry) (json.RawMessage, error) {
	e.life.Lock()
	defer e.life.Unlock()
	m.mu.Lock()
	closing := m.closing
	m.mu.Unlock()
	if closing { // Close may have passed this sandbox already, and would not end what starts now
		return nil, ErrClosing
	}
	answer, err := m.Answer(e.view())
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(e.state)
	if err != nil {
		return nil, err
	}
	err = m.Journal.Update(e.id, func(r *journal.Record) error {
		r.State, r.Answer = text, answer
		return nil
	})
	if err == nil {
		err = m.startProcesses(ctx, e)
	}
	if err != nil {
		m.discard(ctx, e) // also of a write that failed half-way: it may be on disk all the same
		return nil, err
	}
	return answer, nil
}

func (m *Manager) discard(ctx context.Context, e *entry) {
	if err := m.Journal.Forget(e.id); err != nil {
		m.Log.ErrorContext(ctx, "failed create stays in the journal", slog.Any("sandbox", e.id), slog.Any("error", err))
	}
	m.Fences.Forget(e.id)
	m.removeFolder(ctx, e.id)
}
