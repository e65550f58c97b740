package sandboxes

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"berth/services/internal/sandbox"
	"berth/services/nodeagent/internal/journal"
	"berth/services/nodeagent/internal/proxy"
)

// Delete ends the sandbox for good. ErrNotFound: it is not here, or is deleted already. When it returns nil nothing of it runs.
func (m *Manager) Delete(ctx context.Context, id sandbox.ID) error {
	ctx = context.WithoutCancel(ctx)
	m.mu.Lock()
	e, found := m.entries[id]
	m.mu.Unlock()
	if !found {
		return ErrNotFound
	}
	select { // not find, which does not know a sandbox whose kill failed
	case <-e.created:
	case <-ctx.Done():
		return ctx.Err()
	}
	e.life.Lock()
	defer e.life.Unlock()
	m.mu.Lock()
	gone := m.entries[id] != e
	m.mu.Unlock()
	if gone {
		return ErrNotFound
	}
	if err := m.end(ctx, e); err != nil {
		return fmt.Errorf("delete %s: %w", id, err)
	}
	m.Log.InfoContext(ctx, "sandbox deleted", slog.Any("sandbox", id))
	return nil
}

// end writes the tombstone, kills the processes and removes the folder. e.life is held. It may be called again after an error. On a
// full disk, which may be this sandbox's own work, the tombstone comes last: what it takes is what the folder gave back.
func (m *Manager) end(ctx context.Context, e *entry) error {
	err := m.bury(e)
	full := journal.Full(err)
	if err != nil && !full {
		return err
	}
	m.mu.Lock()
	e.ended = true
	run := e.run
	if e.timer != nil {
		e.timer.Stop()
	}
	m.mu.Unlock()
	if run != nil {
		if err := run.Kill(ctx); err != nil {
			return err
		}
	}
	if full {
		if err := removeAll(m.dir(e.id)); err != nil {
			return fmt.Errorf("make room: %w", err)
		}
		if err := m.bury(e); err != nil {
			return err
		}
	}
	m.mu.Lock()
	delete(m.entries, e.id)
	m.mu.Unlock()
	m.removeFolder(ctx, e.id)
	return nil
}

// bury writes the tombstone.
func (m *Manager) bury(e *entry) error {
	return m.Journal.Update(e.id, func(r *journal.Record) error {
		if r.Deleted == nil {
			r.Deleted = new(time.Now().UTC())
		}
		r.State, r.Answer = nil, nil
		return nil
	})
}

// removeFolder takes the folder away at once and its content in the background, for a workspace may be large.
func (m *Manager) removeFolder(ctx context.Context, id sandbox.ID) {
	trash := filepath.Join(m.Dir, ".gone-"+string(id)+"-"+rand.Text())
	if err := os.Rename(m.dir(id), trash); err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			m.Log.WarnContext(ctx, "folder of a deleted sandbox stays until the agent restarts", slog.Any("sandbox", id), slog.Any("error", err))
		}
		return
	}
	m.goAfter(func() {
		if err := removeAll(trash); err != nil {
			m.Log.WarnContext(ctx, "folder of a deleted sandbox stays until the agent restarts", slog.Any("sandbox", id), slog.Any("error", err))
		}
	})
}

// Pause freezes the sandbox; its time stands still. ErrPaused: it is paused already.
func (m *Manager) Pause(ctx context.Context, id sandbox.ID) error {
	e, err := m.hold(ctx, id)
	if err != nil {
		return err
	}
	defer e.life.Unlock()
	return m.pause(context.WithoutCancel(ctx), e)
}

// pause is Pause with e.life held.
func (m *Manager) pause(ctx context.Context, e *entry) error {
	m.mu.Lock()
	status, run := e.status, e.run
	m.mu.Unlock()
	if status == Paused {
		return ErrPaused
	}
	if run != nil {
		if err := run.Pause(ctx); err != nil {
			return err
		}
	}
	if err := m.change(e, func(s *State) { s.Paused = true }); err != nil {
		if run != nil {
			err = errors.Join(err, run.Resume(ctx))
		}
		return err
	}
	m.mu.Lock()
	e.status = Paused
	if e.timer != nil {
		e.timer.Stop()
	}
	m.mu.Unlock()
	m.Log.InfoContext(ctx, "sandbox paused", slog.Any("sandbox", e.id))
	return nil
}

// Resume thaws the sandbox, or starts its processes anew if the agent was restarted meanwhile, and gives it the timeout from now; 0 is
// the one it had. ErrRunning: it is not paused.
func (m *Manager) Resume(ctx context.Context, id sandbox.ID, timeout time.Duration) (View, error) {
	e, err := m.hold(ctx, id)
	if err != nil {
		return View{}, err
	}
	defer e.life.Unlock()
	return m.resume(context.WithoutCancel(ctx), e, timeout)
}

// resume is Resume with e.life held.
func (m *Manager) resume(ctx context.Context, e *entry, timeout time.Duration) (View, error) {
	m.mu.Lock()
	status, run, last, closing := e.status, e.run, e.state.Timeout, m.closing
	m.mu.Unlock()
	if status != Paused {
		return View{}, ErrRunning
	}
	if closing {
		return View{}, ErrClosing
	}
	if timeout == 0 {
		timeout = last
	}
	var err error
	if run != nil {
		err = run.Resume(ctx)
	} else {
		limited, cancel := context.WithTimeout(ctx, createLimit)
		err = m.startProcesses(limited, e)
		cancel()
	}
	if err != nil {
		return View{}, err
	}
	err = m.change(e, func(s *State) {
		s.Paused, s.Timeout, s.EndAt = false, timeout, time.Now().Add(timeout)
	})
	if err != nil { // running but remembered as paused: make that true again
		m.mu.Lock()
		run = e.run
		m.mu.Unlock()
		return View{}, errors.Join(err, run.Pause(ctx))
	}
	m.setStatus(e, Running)
	m.arm(ctx, e)
	m.Log.InfoContext(ctx, "sandbox resumed", slog.Any("sandbox", e.id))
	m.mu.Lock()
	defer m.mu.Unlock()
	return e.view(), nil
}

// Connect makes the sandbox run for at least the timeout from now, never less than it has; 0 is the default. resumed
// reports that it was paused.
func (m *Manager) Connect(ctx context.Context, id sandbox.ID, timeout time.Duration) (v View, resumed bool, err error) {
	e, err := m.hold(ctx, id)
	if err != nil {
		return View{}, false, err
	}
	defer e.life.Unlock()
	if timeout == 0 {
		timeout = DefaultTimeout
	}
	v, err = m.resume(context.WithoutCancel(ctx), e, timeout)
	if !errors.Is(err, ErrRunning) {
		return v, err == nil, err
	}
	v, err = m.lengthen(ctx, e, timeout)
	return v, false, err
}

// lengthen moves the end to the timeout from now unless it is later already. e.life is held.
func (m *Manager) lengthen(ctx context.Context, e *entry, timeout time.Duration) (View, error) {
	end := time.Now().Add(timeout)
	m.mu.Lock()
	later := end.After(e.state.EndAt)
	m.mu.Unlock()
	if later {
		if err := m.change(e, func(s *State) { s.EndAt, s.Timeout = end, timeout }); err != nil {
			return View{}, err
		}
		m.arm(ctx, e)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return e.view(), nil
}

// Refresh is Connect of a running sandbox, for older clients: it only lengthens. ErrPaused: it is paused.
func (m *Manager) Refresh(ctx context.Context, id sandbox.ID, timeout time.Duration) error {
	e, err := m.hold(ctx, id)
	if err != nil {
		return err
	}
	defer e.life.Unlock()
	if m.statusOf(e) == Paused {
		return ErrPaused
	}
	_, err = m.lengthen(ctx, e, timeout)
	return err
}

func (m *Manager) statusOf(e *entry) Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	return e.status
}

// SetTimeout ends the sandbox that long from now, sooner or later than before; 0 ends it before SetTimeout returns. ErrPaused: it
// is paused.
func (m *Manager) SetTimeout(ctx context.Context, id sandbox.ID, timeout time.Duration) error {
	e, err := m.hold(ctx, id)
	if err != nil {
		return err
	}
	defer e.life.Unlock()
	if m.statusOf(e) == Paused {
		return ErrPaused
	}
	err = m.change(e, func(s *State) {
		s.EndAt = time.Now().Add(timeout)
		if timeout > 0 {
			s.Timeout = timeout
		}
	})
	if err != nil {
		return err
	}
	if timeout == 0 {
		return m.timeIsOver(context.WithoutCancel(ctx), e)
	}
	m.arm(ctx, e)
	return nil
}

// expireAgain is the pause before a sandbox that could not be ended in time is tried again: a full disk has room at some time.
const expireAgain = 5 * time.Second

// arm sets the timer of a running sandbox to its end.
func (m *Manager) arm(ctx context.Context, e *entry) { m.armAfter(ctx, e, 0) }

// armAfter is arm with a pause that passes at least.
func (m *Manager) armAfter(ctx context.Context, e *entry, least time.Duration) {
	ctx = context.WithoutCancel(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	if e.timer != nil {
		e.timer.Stop()
	}
	if m.closing || e.ended || e.status != Running {
		return
	}
	e.timer = time.AfterFunc(max(least, time.Until(e.state.EndAt)), func() {
		m.goAfter(func() { m.expire(ctx, e) })
	})
}

// expire ends a sandbox whose timer fired, unless its end was moved meanwhile.
func (m *Manager) expire(ctx context.Context, e *entry) {
	e.life.Lock()
	defer e.life.Unlock()
	m.mu.Lock()
	over := !m.closing && !e.ended && e.status == Running && !time.Now().Before(e.state.EndAt)
	m.mu.Unlock()
	if !over {
		m.arm(ctx, e)
		return
	}
	if err := m.timeIsOver(ctx, e); err != nil {
		m.Log.ErrorContext(ctx, "sandbox could not be ended in time", slog.Any("sandbox", e.id), slog.Duration("again_after", expireAgain),
			slog.Any("error", err))
		m.armAfter(ctx, e, expireAgain)
	}
}

// timeIsOver pauses or deletes the sandbox, as its create asked. e.life is held.
func (m *Manager) timeIsOver(ctx context.Context, e *entry) error {
	m.mu.Lock()
	pause := e.state.AutoPause
	m.mu.Unlock()
	m.Log.InfoContext(ctx, "the sandbox's time is over", slog.Any("sandbox", e.id), slog.Bool("pause", pause))
	if pause {
		return m.pause(ctx, e)
	}
	return m.end(ctx, e)
}

// Reach returns the connections of the running sandbox for a request to one of its ports. One that is paused is resumed if its create asked for that, and
// is ErrPaused otherwise.
func (m *Manager) Reach(ctx context.Context, id sandbox.ID) (*proxy.Conns, View, error) {
	for {
		e, err := m.find(ctx, id)
		if err != nil {
			return nil, View{}, err
		}
		m.mu.Lock()
		v, conns := e.view(), e.conns
		m.mu.Unlock()
		if v.Status == Running {
			return conns, v, nil
		}
		if !v.AutoResume {
			return nil, v, ErrPaused
		}
		if _, err := m.Resume(ctx, id, 0); err != nil && !errors.Is(err, ErrRunning) {
			return nil, v, err
		}
	}
}
