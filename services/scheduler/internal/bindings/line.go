package bindings

import (
	"context"
	"errors"
	"slices"
	"sync"
)

// errAlone tells a caller of a line to do its work itself: nobody serves, or it would hold the others up.
var errAlone = errors.New("not served together with others")

// line is where callers wait while somebody serves many of them at once. A batch is what waits when the
// former one is done, without a timer: an idle line serves one at once, a busy one serves many.
type line[Q, A any] struct {
	most int              // callers of one batch, from 1
	keys func(Q) []string // what no two callers of a batch share; nil: nothing

	mu      sync.Mutex
	waiting []*caller[Q, A] // in order of arrival
	servers int
	wake    chan struct{} // holds one: somebody may wait
}

// caller is one that waits.
type caller[Q, A any] struct {
	ctx   context.Context //nolint:containedctx // a caller of a batch ends by its own context, not the batch's
	asked Q
	done  chan answer[A] // takes one, never blocks
}

type answer[A any] struct {
	value A
	err   error
}

func (c *caller[Q, A]) answer(value A, err error) { c.done <- answer[A]{value, err} }

func newLine[Q, A any](most int, keys func(Q) []string) *line[Q, A] {
	return &line[Q, A]{most: most, keys: keys, wake: make(chan struct{}, 1)}
}

// ask waits for its answer as long as ctx lasts. errAlone: see there.
func (l *line[Q, A]) ask(ctx context.Context, asked Q) (A, error) {
	var none A
	c := &caller[Q, A]{ctx: ctx, asked: asked, done: make(chan answer[A], 1)}
	l.mu.Lock()
	if l.servers == 0 {
		l.mu.Unlock()
		return none, errAlone
	}
	l.waiting = append(l.waiting, c)
	l.mu.Unlock()
	l.signal()
	select {
	case <-ctx.Done():
		return none, ctx.Err()
	case a := <-c.done:
		return a.value, a.err
	}
}

func (l *line[Q, A]) signal() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// serve calls f for one batch after another until ctx ends, and then returns nil. f answers every caller it is
// given. Several may serve; what still waits when the last one ends does its work itself.
func (l *line[Q, A]) serve(ctx context.Context, f func(ctx context.Context, batch []*caller[Q, A])) error {
	l.mu.Lock()
	l.servers++
	l.mu.Unlock()
	defer l.leave()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-l.wake:
		}
		for ctx.Err() == nil { // before the line is touched: who is taken is answered
			batch := l.take()
			if len(batch) == 0 {
				break
			}
			f(ctx, batch)
		}
	}
}

// take removes the next batch: the oldest callers, but for those who share a key with one before them.
// Who has left is dropped.
func (l *line[Q, A]) take() []*caller[Q, A] {
	l.mu.Lock()
	defer l.mu.Unlock()
	var batch, rest []*caller[Q, A]
	taken := map[string]bool{}
	for _, c := range l.waiting {
		if c.ctx.Err() != nil {
			continue
		}
		// A key of one that stays is taken too, or a later caller would overtake it.
		if len(batch) == l.most || !l.free(c, taken) {
			rest = append(rest, c)
			continue
		}
		batch = append(batch, c)
	}
	l.waiting = rest
	if len(rest) > 0 && len(batch) > 0 {
		l.signal() // another server may go on meanwhile
	}
	return batch
}

// free reports whether c shares no key with taken, and takes its keys.
func (l *line[Q, A]) free(c *caller[Q, A], taken map[string]bool) bool {
	if l.keys == nil {
		return true
	}
	keys := l.keys(c.asked)
	free := !slices.ContainsFunc(keys, func(key string) bool { return taken[key] })
	for _, key := range keys {
		taken[key] = true
	}
	return free
}

func (l *line[Q, A]) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.servers--
	if l.servers > 0 {
		return
	}
	var none A
	for _, c := range l.waiting {
		c.answer(none, errAlone)
	}
	l.waiting = nil
}
