package sandboxes

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"berth/services/nodeagent/internal/isolation"
)

const (
	// listenLimit is how long a start waits for the ports its template names. One that opens them later, or never, is
	// no failure: the ports are a promise of the template to people, and only that of a first request soon after.
	listenLimit = 5 * time.Second
	listenPause = 5 * time.Millisecond
)

// awaitPorts waits until somebody listens on each port, the command has ended, or the limit is over. Clients send their
// first request right after the create; without this they would meet an application that has not begun to listen, and an
// SDK takes that answer for a dead sandbox.
func (m *Manager) awaitPorts(ctx context.Context, e *entry, run *isolation.Sandbox, ports []int) {
	ctx, cancel := context.WithTimeout(ctx, listenLimit)
	defer cancel()
	pause := time.NewTicker(listenPause)
	defer pause.Stop()
	for _, port := range ports {
		for {
			conn, err := run.Dial(ctx, port)
			if err == nil {
				_ = conn.Close() // it was only a question
				break
			}
			if !errors.Is(err, isolation.ErrRefused) {
				return
			}
			select {
			case <-pause.C:
				continue
			case <-run.Exited():
			case <-run.Done():
			case <-ctx.Done():
				m.Log.InfoContext(ctx, "the sandbox does not listen yet", slog.Any("sandbox", e.id), slog.Int("port", port))
			}
			return
		}
	}
}
