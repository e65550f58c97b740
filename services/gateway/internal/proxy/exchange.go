package proxy

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// Why the gateway itself ended an exchange.
var (
	errNodeSilent   = errors.New("the node sent nothing for too long")
	errClientSilent = errors.New("the client sent nothing for too long")
	errDraining     = errors.New("the gateway is stopping")
	errNodeGone     = errors.New("the connection to the node has ended")
	errTooLarge     = errors.New("the request body is too large")
)

// What an exchange is doing, as bits: the sweeper judges silence by it.
const (
	readingClient uint32 = 1 << iota // waits for bytes of the client
	writingClient                    // waits for the client to take bytes
	bodySent                         // the request's body has ended
	answering                        // the final answer has begun
	streaming                        // it is a stream or a tunnel
)

// exchange is one request with its answer, or one tunnel, as the sweeper sees it. The copy loops
// store a coarse time; no timer is reset for a read.
type exchange struct {
	clock  *atomic.Int64
	cancel context.CancelCauseFunc
	unread func() // makes a read from the client return; its connection is then of no more use
	last   atomic.Int64
	state  atomic.Uint32
	shard  uint32

	over       atomic.Bool // ended, by whomever
	unreadUsed atomic.Bool
	dialled    atomic.Bool
	answered   atomic.Bool              // an answer of the attempt under way has begun
	conn       atomic.Pointer[nodeConn] // what the attempt under way runs on; nil once it is closed
}

func (x *exchange) touch()            { x.last.Store(x.clock.Load()) }
func (x *exchange) set(bits uint32)   { x.state.Or(bits) }
func (x *exchange) clear(bits uint32) { x.state.And(^bits) }

// end ends the exchange for cause, also where it waits for the client's body.
func (x *exchange) end(cause error) {
	x.over.Store(true)
	x.cancel(cause)
	x.stopReading()
}

// stopReading makes a read from the client return: the transport waits for it before it tells of
// any failure, and a client may be in no hurry.
func (x *exchange) stopReading() {
	if x.state.Load()&readingClient != 0 && x.unread != nil && x.unreadUsed.CompareAndSwap(false, true) {
		x.unread()
	}
}

// uses notes the connection of an attempt, and lost that it was closed.
func (x *exchange) uses(c *nodeConn) {
	x.answered.Store(false)
	x.conn.Store(c)
	x.dialled.Store(true)
	c.user.Store(x)
}

// Where an answer has begun nobody waits for the body: the answer tells what happened, and may be
// that another node is to have the body.
func (x *exchange) lost(c *nodeConn) {
	if x.conn.CompareAndSwap(c, nil) && !x.answered.Load() {
		x.stopReading()
	}
}

// abandons lets go of an attempt whose answer is not wanted: its connection will close, and that
// must not end the reading of a body that the next attempt needs.
func (x *exchange) abandons() { x.conn.Store(nil) }

// noMoreReads tells that nobody is left who wants more of the client's body. It is asked after
// readingClient is set, and end and lost look at readingClient last, so one of them sees the other.
func (x *exchange) noMoreReads() bool {
	return x.over.Load() || x.dialled.Load() && x.conn.Load() == nil
}

// Limits are how long silence may last. Length is never limited. Zero is no limit.
type Limits struct {
	FirstByte  time.Duration // of the node, from the last byte of the request to the first of the answer
	Idle       time.Duration // in a body, either way
	StreamIdle time.Duration // in a stream or tunnel
}

// overdue returns why an exchange in state that was silent for so long is to end, nil if it is not.
// A client that does not read is not silence.
func (l Limits) overdue(state uint32, silent time.Duration) error {
	over := func(limit time.Duration) bool { return limit > 0 && silent > limit }
	switch {
	case state&streaming != 0:
		if state&writingClient == 0 && over(l.StreamIdle) {
			return errNodeSilent
		}
	case state&answering != 0:
		if state&writingClient == 0 && over(l.Idle) {
			return errNodeSilent
		}
	case state&bodySent != 0:
		if over(l.FirstByte) {
			return errNodeSilent
		}
	case state&readingClient != 0:
		if over(l.Idle) {
			return errClientSilent
		}
	case over(l.Idle):
		return errNodeSilent // it takes no more of the body
	}
	return nil
}

const (
	registryShards = 16
	sweepEvery     = 250 * time.Millisecond
)

// registry has all open exchanges, and the coarse clock they use.
type registry struct {
	clock  atomic.Int64 // nanoseconds since base, as of the last sweep
	base   time.Time
	shards [registryShards]struct {
		mu   sync.Mutex
		open map[*exchange]struct{}
	}
}

func newRegistry() *registry {
	r := &registry{base: time.Now()}
	for i := range r.shards {
		r.shards[i].open = map[*exchange]struct{}{}
	}
	return r
}

func (r *registry) add(x *exchange) {
	x.clock = &r.clock
	x.shard = rand.Uint32N(registryShards)
	x.touch()
	s := &r.shards[x.shard]
	s.mu.Lock()
	s.open[x] = struct{}{}
	s.mu.Unlock()
}

func (r *registry) remove(x *exchange) {
	s := &r.shards[x.shard]
	s.mu.Lock()
	delete(s.open, x)
	s.mu.Unlock()
}

func (r *registry) len() int {
	n := 0
	for i := range r.shards {
		s := &r.shards[i]
		s.mu.Lock()
		n += len(s.open)
		s.mu.Unlock()
	}
	return n
}

// run moves the clock and ends what was silent too long, until ctx ends.
func (r *registry) run(ctx context.Context, limits Limits) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			now := int64(time.Since(r.base))
			r.clock.Store(now)
			r.each(func(x *exchange) {
				if why := limits.overdue(x.state.Load(), time.Duration(now-x.last.Load())); why != nil {
					x.end(why)
				}
			})
		}
	}
}

func (r *registry) each(f func(*exchange)) {
	for i := range r.shards {
		s := &r.shards[i]
		s.mu.Lock()
		for x := range s.open {
			f(x)
		}
		s.mu.Unlock()
	}
}
