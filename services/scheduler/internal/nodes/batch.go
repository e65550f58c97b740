package nodes

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
)

// renewLimit is a little less than the role's statement timeout, so that it is this side that says
// what it was doing.
const renewLimit = 4 * time.Second

// renewed is a lease that was renewed as it was.
type renewed struct {
	NodeID   node.ID
	Epoch    int64
	Cordoned bool
	Draining bool
}

// waiting is a beat that waits for its statement.
type waiting struct {
	beat *prepared
	gone <-chan struct{} // its caller left
	done chan renewal    // holds one
}

// renewal is what came of a beat in its statement: renewed, or nil for one that is to take the slow
// path.
type renewal struct {
	renewed *renewed
	err     error
}

// Batcher renews the leases of many heartbeats in one statement. A batch is what waits when the
// statement before it has ended: as large as the load makes it, and an idle one waits for nothing.
type Batcher struct {
	most  int
	renew func(ctx context.Context, beats []*prepared) (map[node.ID]*renewed, error)
	size  prometheus.Observer

	mu      sync.Mutex
	queue   []*waiting // in order of arrival
	stopped bool
	wake    chan struct{} // holds one: the queue may have something
}

func newBatcher(most int, renew func(context.Context, []*prepared) (map[node.ID]*renewed, error), size prometheus.Observer) *Batcher {
	return &Batcher{most: most, renew: renew, size: size, wake: make(chan struct{}, 1)}
}

// submit waits until beat was in a statement. It returns nil without an error when its lease was not
// renewed.
func (b *Batcher) submit(ctx context.Context, beat *prepared) (*renewed, error) {
	w := &waiting{beat: beat, gone: ctx.Done(), done: make(chan renewal, 1)}
	b.mu.Lock()
	if b.stopped {
		b.mu.Unlock()
		return nil, errStopped(beat.Node)
	}
	b.queue = append(b.queue, w)
	b.mu.Unlock()
	b.signal()

	select {
	case <-ctx.Done():
		return nil, fmt.Errorf("heartbeat of %s: %w", beat.Node, ctx.Err())
	case r := <-w.done:
		return r.renewed, r.err
	}
}

// errStopped is an answer that the caller may give to another replica.
func errStopped(id node.ID) error {
	return fmt.Errorf("heartbeat of %s: this replica stops: %w", id, pgdb.ErrPoolWait)
}

func (b *Batcher) signal() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// Run renews what waits until ctx ends, then refuses the rest and returns nil. It runs once.
func (b *Batcher) Run(ctx context.Context) error {
	defer b.stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-b.wake:
		}
		for ctx.Err() == nil { // before the queue is touched: what is taken is answered
			batch := b.take()
			if len(batch) == 0 {
				break
			}
			b.send(ctx, batch)
		}
	}
}

// take removes the next batch from the queue: the oldest beats, at most one of each node, for a
// statement may update a row once. Beats whose callers left are dropped.
func (b *Batcher) take() []*waiting {
	b.mu.Lock()
	defer b.mu.Unlock()
	var batch, rest []*waiting
	picked := make(map[node.ID]bool, min(len(b.queue), b.most))
	for _, w := range b.queue {
		select {
		case <-w.gone:
			continue
		default:
		}
		if len(batch) == b.most || picked[w.beat.Node] {
			rest = append(rest, w)
			continue
		}
		picked[w.beat.Node] = true
		batch = append(batch, w)
	}
	b.queue = rest
	return batch
}

func (b *Batcher) send(ctx context.Context, batch []*waiting) {
	beats := make([]*prepared, len(batch))
	for i, w := range batch {
		beats[i] = w.beat
	}
	b.size.Observe(float64(len(batch)))
	limited, cancel := context.WithTimeout(ctx, renewLimit)
	defer cancel()
	answers, err := b.renew(limited, beats)
	for _, w := range batch {
		if err != nil {
			w.done <- renewal{err: err}
			continue
		}
		w.done <- renewal{renewed: answers[w.beat.Node]}
	}
}

func (b *Batcher) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stopped = true
	for _, w := range b.queue {
		w.done <- renewal{err: errStopped(w.beat.Node)}
	}
	b.queue = nil
}
