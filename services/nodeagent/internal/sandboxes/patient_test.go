package sandboxes

import (
	"context"
	"errors"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"berth/services/nodeagent/internal/isolation"
)

// listensAfter refuses until that long after its making.
type listensAfter struct{ at time.Time }

func (l listensAfter) Dial(context.Context, int) (net.Conn, error) {
	if time.Now().Before(l.at) {
		return nil, isolation.ErrRefused
	}
	ours, theirs := net.Pipe()
	return ours, theirs.Close()
}

func TestAYoungSandboxIsWaitedFor(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		port    int
		listens time.Duration
		limit   time.Duration
		ends    time.Duration // the command; 0: not
		took    time.Duration
		refused bool
	}{
		"who listens is reached at once":        {port: 3000, took: 0},
		"who listens soon is waited for":        {port: 3000, listens: 500 * time.Millisecond, took: 500 * time.Millisecond},
		"who never listens refuses in the end":  {port: 3000, listens: time.Hour, took: listenWithin, refused: true},
		"another port refuses at once":          {port: 4000, listens: 500 * time.Millisecond, refused: true},
		"a caller that leaves is not held":      {port: 3000, listens: time.Hour, limit: time.Second, took: time.Second, refused: true},
		"a command that has ended holds nobody": {port: 3000, listens: time.Hour, ends: 2 * time.Second, took: 2 * time.Second, refused: true},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ended := make(chan struct{})
				if tt.ends > 0 {
					time.AfterFunc(tt.ends, func() { close(ended) })
				}
				begun := time.Now()
				limit := tt.limit
				if limit == 0 {
					limit = time.Minute
				}
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				p := patient{run: listensAfter{begun.Add(tt.listens)}, ended: ended, ports: []int{3000}, until: begun.Add(listenWithin)}
				conn, err := p.Dial(ctx, tt.port)
				if conn != nil {
					_ = conn.Close()
				}
				if got := errors.Is(err, isolation.ErrRefused); got != tt.refused || !got && err != nil {
					t.Errorf("Dial = %v, want refused %v", err, tt.refused)
				}
				if took := time.Since(begun); took != tt.took {
					t.Errorf("it took %v, want %v", took, tt.took)
				}
			})
		})
	}
}
