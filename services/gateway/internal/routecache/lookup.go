package routecache

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

const (
	lookupWorkers = 2    // one connection each; more make every one slower
	lookupBatch   = 128  // ids a statement
	lookupQueue   = 5000 // waiting ids, beyond which the answer is "unavailable"
	sweepEvery    = time.Minute
)

// lookupRoutesSQL reads the bindings of many ids, and which database answers. There is always a
// row, with NULLs where no binding was found.
const lookupRoutesSQL = `
SELECT  concat_ws('/', (SELECT system_identifier FROM pg_control_system()),
        (SELECT oid FROM pg_database WHERE datname = current_database()),
        substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8), m.epoch) AS identity,
        b.sandbox_id, b.node_id, b.revision, b.incarnation, b.tenant_id, b.state
FROM    feed_meta AS m
LEFT JOIN bindings AS b ON b.sandbox_id = ANY (@ids::text[])`

type lookupRow struct {
	Identity    string
	SandboxID   *sandbox.ID
	NodeID      *node.ID
	Revision    *sandbox.Revision
	Incarnation *sandbox.Incarnation
	TenantID    *string
	State       *sandbox.State
}

// call is one id that is being read. All who want it wait for the same call.
type call struct {
	id         sandbox.ID
	generation uint64
	until      int64
	told       bool // the feed, or a create of our own, said something since it was asked
	done       chan struct{}
	err        error // valid once done is closed
}

// loader collects the ids that are missing. Its workers take what has queued up whenever one is
// free; there is no timer.
type loader struct {
	timeout   int64
	absentFor int64
	maxAbsent int

	mu     sync.Mutex
	calls  map[sandbox.ID]*call // queued or being read
	queue  []*call
	absent map[sandbox.ID]int64 // until when
	order  []sandbox.ID         // of absent, oldest first; may name some that are gone
	wake   chan struct{}
}

func (l *loader) init(cfg Config) {
	l.timeout, l.absentFor, l.maxAbsent = int64(cfg.LookupTimeout), int64(cfg.AbsentFor), cfg.MaxAbsent
	l.calls = map[sandbox.ID]*call{}
	l.absent = map[sandbox.ID]int64{}
	l.wake = make(chan struct{}, 1)
}

// ask returns the call for id, a new one or the one under way; nil when too many wait.
func (l *loader) ask(id sandbox.ID, now int64, generation uint64) (asked *call, shared bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.calls[id]; c != nil {
		return c, true
	}
	if len(l.queue) >= lookupQueue {
		return nil, false
	}
	c := &call{id: id, generation: generation, until: now + l.timeout, done: make(chan struct{})}
	l.calls[id] = c
	l.queue = append(l.queue, c)
	l.ring()
	return c, false
}

func (l *loader) ring() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *loader) take() []*call {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := min(len(l.queue), lookupBatch)
	batch := l.queue[:n:n]
	l.queue = l.queue[n:]
	if len(l.queue) > 0 {
		l.ring()
	}
	return batch
}

// again puts calls back that could not be answered.
func (l *loader) again(calls []*call) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = append(l.queue, calls...)
	l.ring()
}

// finish ends a call. Where there is no row, that is remembered only if nobody said anything about
// the id since it was asked: the answer may be older than that.
func (l *loader) finish(c *call, missing bool, err error, now int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.calls, c.id)
	if missing && !c.told {
		l.remember(c.id, now)
	}
	c.err = err
	close(c.done)
}

func (l *loader) remember(id sandbox.ID, now int64) {
	for len(l.order) > 0 && (len(l.order) >= l.maxAbsent || l.absent[l.order[0]] <= now) {
		delete(l.absent, l.order[0])
		l.order = l.order[1:]
	}
	if _, ok := l.absent[id]; !ok {
		l.order = append(l.order, id)
	}
	l.absent[id] = now + l.absentFor
}

func (l *loader) isAbsent(id sandbox.ID, now int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.absent[id] > now
}

// told ends what is remembered of id's absence, also what is just being read.
func (l *loader) told(id sandbox.ID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.absent, id)
	if c := l.calls[id]; c != nil {
		c.told = true
	}
}

func (l *loader) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.absent)
	l.order = nil
}

// load has id read and waits for it. The read does not depend on ctx: others may wait for it too.
// The error is ErrUnavailable or ctx's.
func (c *Cache) load(ctx context.Context, id sandbox.ID, again bool) error {
	call, shared := c.loader.ask(id, c.now(), c.generation.Load())
	switch {
	case call == nil:
		return fmt.Errorf("%w: too many look-ups wait", ErrUnavailable)
	case again:
		c.metrics.unconfirmed.Inc()
	case shared:
		c.metrics.shared.Inc()
	default:
		c.metrics.miss.Inc()
	}
	select {
	case <-call.done:
		return call.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run answers misses until ctx ends, then returns nil.
func (c *Cache) Run(ctx context.Context) error {
	var workers sync.WaitGroup
	defer workers.Wait()
	for range lookupWorkers {
		workers.Go(func() { c.work(ctx) })
	}
	sweep := time.NewTicker(sweepEvery)
	defer sweep.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-sweep.C:
			c.shards.sweep(c.now())
		}
	}
}

func (c *Cache) work(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			// Nobody waits for an answer that does not come.
			for _, call := range c.loader.take() {
				c.loader.finish(call, false, ErrUnavailable, c.now())
			}
			return
		case <-c.loader.wake:
			if batch := c.loader.take(); len(batch) > 0 {
				c.answer(ctx, batch)
			}
		}
	}
}

// answer reads a batch, stores what it found and ends its calls, or puts them back if the read
// failed and they have time left.
func (c *Cache) answer(ctx context.Context, batch []*call) {
	generation, began := c.generation.Load(), c.now()
	routes, err := c.readRoutes(ctx, batch)
	now := c.now()
	if err != nil {
		if !c.down.Swap(true) && ctx.Err() == nil {
			c.log.WarnContext(ctx, "routes cannot be read", slog.Any("error", err))
		}
		c.retry(ctx, batch, err)
		return
	}
	c.down.Store(false)
	forward(&c.contact, began)

	c.resetting.RLock()
	defer c.resetting.RUnlock()
	if generation != c.generation.Load() {
		c.loader.again(batch) // another database, or a gap: what was read may be of the old one
		return
	}
	for _, call := range batch {
		r, found := routes[call.id]
		if found {
			c.shards.put(r, now, began)
		} else if s := c.shards.get(call.id); s != nil && s.since < began {
			// The row was ended and swept so long ago that no feed row will tell of it.
			c.shards.remove(call.id, s)
		}
		if !found {
			c.metrics.unknown.Inc()
		}
		c.loader.finish(call, !found, nil, now)
	}
}

// retry puts calls back after a pause, and ends those whose time is over.
func (c *Cache) retry(ctx context.Context, batch []*call, cause error) {
	now := c.now()
	var rest []*call
	for _, call := range batch {
		if now >= call.until || ctx.Err() != nil {
			c.loader.finish(call, false, fmt.Errorf("%w: %w", ErrUnavailable, cause), now)
		} else {
			rest = append(rest, call)
		}
	}
	if len(rest) == 0 {
		return
	}
	pause := time.NewTimer(20*time.Millisecond + rand.N(60*time.Millisecond))
	defer pause.Stop()
	select {
	case <-pause.C:
		c.loader.again(rest)
	case <-ctx.Done():
		for _, call := range rest {
			c.loader.finish(call, false, ErrUnavailable, now)
		}
	}
}

// readRoutes reads the bindings of a batch, in whatever state they are. It fails on a database that
// is not the one the feed comes from.
func (c *Cache) readRoutes(ctx context.Context, batch []*call) (map[sandbox.ID]route.Route, error) {
	ids := make([]sandbox.ID, len(batch))
	for i, call := range batch {
		ids[i] = call.id
	}
	// Half of a caller's time, so that a connection that hangs leaves room for another try.
	ctx, cancel := context.WithTimeout(ctx, c.cfg.LookupTimeout/2)
	defer cancel()
	rows, err := c.db.Query(ctx, lookupRoutesSQL, pgx.StrictNamedArgs{"ids": ids})
	if err != nil {
		return nil, fmt.Errorf("look up %d routes: %w", len(ids), err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[lookupRow])
	if err != nil {
		return nil, fmt.Errorf("look up %d routes: %w", len(ids), err)
	}
	routes := make(map[sandbox.ID]route.Route, len(found))
	for _, row := range found {
		if want := c.identity.Load(); want != nil && *want != row.Identity {
			return nil, fmt.Errorf("look up %d routes: this is not the database the feed comes from", len(ids))
		}
		if row.SandboxID != nil {
			routes[*row.SandboxID] = route.Route{
				Sandbox: *row.SandboxID, Node: *row.NodeID, Revision: *row.Revision,
				Incarnation: *row.Incarnation, Tenant: *row.TenantID, State: *row.State,
			}
		}
	}
	return routes, nil
}
