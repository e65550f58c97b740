package sandboxes

import (
	"context"
	"errors"
	"net"
	"slices"
	"time"

	"berth/services/nodeagent/internal/isolation"
	"berth/services/nodeagent/internal/proxy"
)

// A client talks to a sandbox right after its create was answered, when the command may not listen yet.
const (
	listenWithin = 10 * time.Second      // of the start, a port the template names is waited for
	listenCheck  = 10 * time.Millisecond // how often
)

// patient connects to a young sandbox: a port that its template names and that nobody listens on yet is tried again until somebody does,
// ctx ends, or the sandbox is not young any more. Any other port that refuses, refuses at once.
type patient struct {
	run   proxy.Dialer
	ended <-chan struct{} // the command's end: nobody will listen
	ports []int
	until time.Time
}

// Dial returns isolation.ErrRefused when nobody listens.
func (p patient) Dial(ctx context.Context, port int) (net.Conn, error) {
	conn, err := p.run.Dial(ctx, port)
	if !errors.Is(err, isolation.ErrRefused) || !slices.Contains(p.ports, port) {
		return conn, err
	}
	tick := time.NewTicker(listenCheck)
	defer tick.Stop()
	for errors.Is(err, isolation.ErrRefused) && time.Now().Before(p.until) {
		select {
		case <-tick.C:
			conn, err = p.run.Dial(ctx, port)
		case <-p.ended:
			return nil, err
		case <-ctx.Done():
			return nil, err
		}
	}
	return conn, err
}
