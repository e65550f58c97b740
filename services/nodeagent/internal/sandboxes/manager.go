package sandboxes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"berth/services/internal/sandbox"
	"berth/services/nodeagent/internal/isolation"
	"berth/services/nodeagent/internal/journal"
	"berth/services/nodeagent/internal/proxy"
	"berth/services/nodeagent/internal/templates"
)

// Limits is the room of the node; what is 0 is not limited.
type Limits struct {
	Sandboxes   int
	CPUMillis   int64
	MemoryBytes int64
}

// Deps is what a Manager works with.
type Deps struct {
	Dir       string // folders of sandboxes
	Backend   *isolation.Backend
	Journal   *journal.Journal
	Fences    *journal.Fences
	Templates *templates.Set
	Limits    Limits
	Retention time.Duration // of tombstones
	// Answer draws up what the create of a sandbox answers, before the sandbox exists.
	Answer func(View) (json.RawMessage, error)
	Log    *slog.Logger
}

// Manager has the sandboxes of this node. It is safe for concurrent use.
type Manager struct {
	Deps

	background sync.WaitGroup // watchers, timers that fired, removals

	mu      sync.Mutex
	closing bool
	entries map[sandbox.ID]*entry
	created uint64
	failed  uint64
}

// New returns a manager without sandboxes; Restore brings back those of the journal.
func New(d Deps) *Manager {
	return &Manager{Deps: d, entries: make(map[sandbox.ID]*entry)}
}

// goAfter runs f in the background unless the manager is closing; Close waits for it.
func (m *Manager) goAfter(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.closing {
		m.background.Go(f)
	}
}

func (m *Manager) dir(id sandbox.ID) string { return filepath.Join(m.Dir, string(id)) }

func recordOf(state json.RawMessage) func(*journal.Record) error {
	return func(r *journal.Record) error {
		if r.Deleted != nil {
			return sandbox.ErrDeleted
		}
		r.State = state
		return nil
	}
}

// restoreAtOnce is how many sandboxes start at a time after a restart of the agent.
const restoreAtOnce = 4

// Restore brings back every sandbox of the journal and removes what is left of others. It returns when all run, or are
// paused, or have ended because their time is over. ctx bounds it.
func (m *Manager) Restore(ctx context.Context) error {
	if err := m.removeLeft(); err != nil {
		return err
	}
	found, err := m.remembered()
	if err != nil {
		return err
	}
	var starting sync.WaitGroup
	room := make(chan struct{}, restoreAtOnce)
	for _, e := range found {
		m.mu.Lock()
		m.entries[e.id] = e
		m.mu.Unlock()
		room <- struct{}{}
		starting.Go(func() {
			defer func() { <-room }()
			m.restoreOne(ctx, e)
		})
	}
	starting.Wait()
	return nil
}

// remembered returns the sandboxes of the journal. Records that are none are all told at once, before anything is started.
func (m *Manager) remembered() ([]*entry, error) {
	var found []*entry
	var errs []error
	for _, r := range m.Journal.All() {
		if r.Deleted != nil {
			continue
		}
		e := &entry{id: r.ID, created: make(chan struct{}), status: Creating}
		if err := json.Unmarshal(r.State, &e.state); err != nil {
			errs = append(errs, fmt.Errorf("%s does not tell a sandbox: %w: restore it, or move it away if that sandbox may be forgotten",
				m.Journal.Path(r.ID), err))
			continue
		}
		found = append(found, e)
	}
	return found, errors.Join(errs...)
}

func (m *Manager) restoreOne(ctx context.Context, e *entry) {
	e.life.Lock()
	defer e.life.Unlock()
	defer close(e.created)
	log := m.Log.With(slog.Any("sandbox", e.id))
	over := !e.state.EndAt.After(time.Now())
	switch {
	case e.state.Paused:
		m.setStatus(e, Paused)
		log.InfoContext(ctx, "sandbox is back, paused")
	case over && !e.state.AutoPause:
		log.InfoContext(ctx, "sandbox ended while the agent was away")
		if err := m.end(ctx, e); err != nil {
			log.ErrorContext(ctx, "sandbox could not be removed", slog.Any("error", err))
		}
	case over:
		m.comeBackPaused(ctx, e, log)
		log.InfoContext(ctx, "sandbox is back, paused for its time is over")
	default:
		if err := m.startProcesses(ctx, e); err != nil {
			log.ErrorContext(ctx, "sandbox could not be started again; it is paused, and a resume tries again", slog.Any("error", err))
			m.comeBackPaused(ctx, e, log)
			return
		}
		m.setStatus(e, Running)
		m.arm(ctx, e)
		log.InfoContext(ctx, "sandbox is back, its processes are new")
	}
}

func (m *Manager) comeBackPaused(ctx context.Context, e *entry, log *slog.Logger) {
	if err := m.change(e, func(s *State) { s.Paused = true }); err != nil {
		log.ErrorContext(ctx, "pause could not be remembered", slog.Any("error", err))
	}
	m.setStatus(e, Paused)
}

func (m *Manager) setStatus(e *entry, s Status) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e.status = s
}

// removeLeft removes folders that no live record explains.
func (m *Manager) removeLeft() error {
	entries, err := os.ReadDir(m.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return os.MkdirAll(m.Dir, 0o700) // workspaces are nobody else's business
	}
	if err != nil {
		return fmt.Errorf("look for left sandboxes: %w", err)
	}
	for _, e := range entries {
		if r, found := m.Journal.Get(sandbox.ID(e.Name())); found && r.Deleted == nil {
			continue
		}
		if err := removeAll(filepath.Join(m.Dir, e.Name())); err != nil {
			return fmt.Errorf("remove left sandbox: %w", err)
		}
	}
	return nil
}

// removeAll is os.RemoveAll for folders that their owner made unreadable.
func removeAll(dir string) error {
	if os.RemoveAll(dir) == nil {
		return nil
	}
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, _ error) error {
		if d != nil && d.IsDir() {
			_ = os.Chmod(path, 0o700)
		}
		return nil // a folder that could not be read is tried again below
	})
	return os.RemoveAll(dir)
}

// startProcesses starts the sandbox's command and watches it. e.life is held, e has no processes.
func (m *Manager) startProcesses(ctx context.Context, e *entry) error {
	m.mu.Lock()
	s := e.state
	m.mu.Unlock()
	dir := m.dir(e.id)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("sandbox folder: %w", err)
	}
	out, err := openOutput(filepath.Join(dir, "output.log"))
	if err != nil {
		return err
	}
	env := make([]string, 0, len(s.Template.Env)+len(s.Env))
	for _, vars := range []map[string]string{s.Template.Env, s.Env} { // later ones win
		for name, value := range vars {
			env = append(env, name+"="+value)
		}
	}
	run, err := m.Backend.Start(ctx, isolation.Spec{
		ID: string(e.id), Dir: filepath.Join(dir, "run"), Workspace: filepath.Join(dir, "workspace"),
		Argv: s.Template.Command, Builtin: s.Template.Builtin, Env: env, Output: out,
	})
	if err != nil {
		return errors.Join(err, out.Close())
	}
	m.mu.Lock()
	conns := proxy.NewConns(patient{run: run, ended: run.Exited(), ports: s.Template.Ports, until: time.Now().Add(listenWithin)})
	e.run, e.conns = run, conns
	m.mu.Unlock()
	watched := context.WithoutCancel(ctx)
	m.background.Go(func() {
		defer out.Close()
		defer conns.Close()
		m.watch(watched, e, run)
	})
	return nil
}

// watch waits for the end of everything inside, and deletes a sandbox that ended without being asked to.
func (m *Manager) watch(ctx context.Context, e *entry, run *isolation.Sandbox) {
	select {
	case <-run.Exited():
		m.Log.InfoContext(ctx, "the sandbox's command has ended; the sandbox stays until its time is over",
			slog.Any("sandbox", e.id), slog.Int("status", run.Status()))
		<-run.Done()
	case <-run.Done():
	}
	m.mu.Lock()
	unasked := e.run == run && !e.ended && !m.closing
	m.mu.Unlock()
	if !unasked {
		return
	}
	m.goAfter(func() {
		e.life.Lock()
		defer e.life.Unlock()
		m.mu.Lock()
		unasked := e.run == run && !e.ended && !m.closing
		m.mu.Unlock()
		if !unasked {
			return
		}
		m.Log.WarnContext(ctx, "everything in the sandbox has died; it is deleted", slog.Any("sandbox", e.id))
		if err := m.end(ctx, e); err != nil {
			m.Log.ErrorContext(ctx, "dead sandbox could not be removed", slog.Any("sandbox", e.id), slog.Any("error", err))
		}
	})
}

// Close ends every sandbox's processes and waits for all background work. The journal keeps the sandboxes: the next agent
// brings them back.
func (m *Manager) Close(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx) // a kill has a limit of its own, and must be tried
	m.mu.Lock()
	m.closing = true
	all := make([]*entry, 0, len(m.entries))
	for _, e := range m.entries {
		if e.timer != nil {
			e.timer.Stop()
		}
		all = append(all, e)
	}
	m.mu.Unlock()
	var ending sync.WaitGroup
	errs := make([]error, len(all))
	for i, e := range all {
		ending.Go(func() {
			e.life.Lock()
			defer e.life.Unlock()
			m.mu.Lock()
			run := e.run
			m.mu.Unlock()
			if run != nil {
				errs[i] = run.Kill(ctx)
			}
		})
	}
	ending.Wait()
	m.background.Wait()
	return errors.Join(errs...)
}

// PauseAll freezes what runs, for a stop: nothing inside is in the middle of a write when its processes end. The journal does not
// learn of it, so that the next agent starts them again. No create is taken from now on.
func (m *Manager) PauseAll(ctx context.Context) error {
	m.mu.Lock()
	m.closing = true
	var runs []*isolation.Sandbox
	for _, e := range m.entries {
		if e.timer != nil {
			e.timer.Stop()
		}
		if e.run != nil && !e.ended {
			runs = append(runs, e.run)
		}
	}
	m.mu.Unlock()
	var pausing sync.WaitGroup
	errs := make([]error, len(runs))
	for i, run := range runs {
		pausing.Go(func() { errs[i] = run.Pause(ctx) })
	}
	pausing.Wait()
	return errors.Join(errs...)
}

// sweepEvery is how often old tombstones are looked for.
const sweepEvery = time.Hour

// Run forgets tombstones after the retention, until ctx ends.
func (m *Manager) Run(ctx context.Context) error {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		before := time.Now().Add(-m.Retention)
		for _, r := range m.Journal.All() {
			if r.Deleted != nil && r.Deleted.Before(before) {
				m.Fences.Forget(r.ID)
			}
		}
		if err := m.Journal.ForgetDeleted(before); err != nil {
			m.Log.ErrorContext(ctx, "old tombstones stay", slog.Any("error", err))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}
