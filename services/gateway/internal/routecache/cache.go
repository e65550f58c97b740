package routecache

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// ErrUnavailable is returned where PostgreSQL did not answer and nothing known may be served: it is
// not known whether the sandbox exists.
var ErrUnavailable = errors.New("routes are unavailable")

// Config is how long what is known may be used, and how much is kept.
type Config struct {
	Bound         time.Duration // how old a full read of the feed may be for entries to be fresh
	RecheckEvery  time.Duration // an unconfirmed entry is re-read at most this often
	StaleLimit    time.Duration // how long known routes are served without PostgreSQL
	LookupTimeout time.Duration // a miss is answered within this
	AbsentFor     time.Duration // how long "no such sandbox" is remembered
	TombstoneFor  time.Duration // how long an ended binding is
	MaxEntries    int
	MaxAbsent     int
}

// Bound is how long a fresh route may have been superseded.
const Bound = 2 * time.Second

// DefaultConfig returns the limits of the design.
func DefaultConfig() Config {
	return Config{
		Bound: Bound, RecheckEvery: time.Second, StaleLimit: 15 * time.Minute, LookupTimeout: 2 * time.Second,
		AbsentFor: time.Second, TombstoneFor: 10 * time.Minute, MaxEntries: 500_000, MaxAbsent: 100_000,
	}
}

// Found is a live route and the node it leads to.
type Found struct {
	route.Route
	Node  *Node
	Stale bool // PostgreSQL does not answer; this is what was known
}

// Cache is safe for use by many goroutines. Run must run for misses to be answered.
type Cache struct {
	cfg    Config
	db     *pgdb.DB
	log    *slog.Logger
	base   time.Time
	shards shards
	nodes  nodeTable
	loader loader

	// resetting is held for writing while everything is dropped, and for reading by whoever stores:
	// nothing of an older generation is stored after a reset.
	resetting  sync.RWMutex
	generation atomic.Uint64
	identity   atomic.Pointer[string]

	freshUntil atomic.Int64 // nanoseconds since base
	contact    atomic.Int64 // when PostgreSQL was last known to answer
	down       atomic.Bool  // the last read failed

	suspects suspects
	metrics  metrics
}

// New returns a cache that reads db. reg may be nil.
func New(db *pgdb.DB, cfg Config, log *slog.Logger, reg prometheus.Registerer) *Cache {
	c := &Cache{cfg: cfg, db: db, log: log, base: time.Now()}
	c.shards.init(cfg.MaxEntries, cfg.TombstoneFor)
	c.loader.init(cfg)
	c.suspects.asked = map[node.ID]int64{}
	c.metrics = newMetrics(reg, c)
	return c
}

func (c *Cache) now() int64 { return int64(time.Since(c.base)) }

// Lookup returns the live route of id. Errors: sandbox.ErrNotFound; ErrUnavailable; ctx's. A fresh
// hit does no I/O.
func (c *Cache) Lookup(ctx context.Context, id sandbox.ID) (Found, error) {
	now := c.now()
	if s := c.shards.get(id); s != nil {
		s.used.Store(now)
		if now < c.freshUntil.Load() {
			c.metrics.hit.Inc()
			return c.found(ctx, s, false)
		}
		return c.unconfirmed(ctx, s, now)
	}
	if c.loader.isAbsent(id, now) {
		c.metrics.unknown.Inc()
		return Found{}, sandbox.ErrNotFound
	}
	if err := c.load(ctx, id, false); err != nil {
		return Found{}, err
	}
	s := c.shards.get(id)
	if s == nil {
		return Found{}, sandbox.ErrNotFound
	}
	return c.found(ctx, s, false)
}

// unconfirmed serves an entry that the feed does not vouch for.
func (c *Cache) unconfirmed(ctx context.Context, s *slot, now int64) (Found, error) {
	every := int64(c.cfg.RecheckEvery)
	if confirmed := s.confirmed.Load(); confirmed > 0 && now-confirmed < every {
		c.metrics.unconfirmed.Inc()
		return c.found(ctx, s, false)
	}
	if c.down.Load() {
		// One question a second finds out when it is back; nobody waits for that.
		if asked := s.asked.Load(); now-asked >= every && s.asked.CompareAndSwap(asked, now) {
			c.loader.ask(s.route.Sandbox, now, c.generation.Load())
		}
		return c.stale(ctx, s)
	}
	err := c.load(ctx, s.route.Sandbox, true)
	switch {
	case errors.Is(err, ErrUnavailable):
		return c.stale(ctx, s)
	case err != nil:
		return Found{}, err
	}
	if s = c.shards.get(s.route.Sandbox); s == nil {
		return Found{}, sandbox.ErrNotFound
	}
	return c.found(ctx, s, false)
}

// stale serves what was known. An ended binding is not known to have stayed so.
func (c *Cache) stale(ctx context.Context, s *slot) (Found, error) {
	if !s.route.Live() || c.PastStaleLimit() {
		return Found{}, ErrUnavailable
	}
	c.metrics.stale.Inc()
	return c.found(ctx, s, true)
}

func (c *Cache) found(ctx context.Context, s *slot, stale bool) (Found, error) {
	if !s.route.Live() {
		return Found{}, sandbox.ErrNotFound
	}
	n := c.nodes.get(s.route.Node)
	if n == nil {
		var err error
		if n, err = c.Node(ctx, s.route.Node); err != nil {
			if errors.Is(err, node.ErrNotObserved) {
				return Found{}, sandbox.ErrNotFound
			}
			return Found{}, err
		}
	}
	return Found{Route: s.route, Node: n, Stale: stale}, nil
}

// PastStaleLimit tells that PostgreSQL has not answered for so long that nothing is served any more.
func (c *Cache) PastStaleLimit() bool {
	return c.now()-c.contact.Load() > int64(c.cfg.StaleLimit)
}

// Fresh tells whether the feed vouches for the entries now.
func (c *Cache) Fresh() bool { return c.now() < c.freshUntil.Load() }

// Put keeps a route that this process has made itself, if it is newer than what is known.
func (c *Cache) Put(r route.Route) { c.Apply([]route.Route{r}) }

// Apply keeps each of routes that is newer than what is known, and ends what is remembered of their
// absence. They may come late, twice or in any order.
func (c *Cache) Apply(routes []route.Route) {
	c.resetting.RLock()
	defer c.resetting.RUnlock()
	now := c.now()
	for _, r := range routes {
		c.shards.put(r, now, 0)
		c.loader.told(r.Sandbox)
	}
}

// Fill keeps routes that were read under generation, if it has not ended: what the feed has told
// since is newer and stays.
func (c *Cache) Fill(generation uint64, routes []route.Route) {
	c.resetting.RLock()
	defer c.resetting.RUnlock()
	if generation != c.generation.Load() {
		return
	}
	now := c.now()
	for _, r := range routes {
		c.shards.put(r, now, 0)
	}
}

// ApplyNodes keeps nodes that are not older than what is known.
func (c *Cache) ApplyNodes(nodes []*Node) {
	if len(nodes) > 0 {
		c.nodes.put(nodes...)
	}
}

// Reset drops everything and begins the next generation, whose number it returns: the database is
// now the one identity names, or the feed has a gap. Look-ups on another database are refused from
// here on.
func (c *Cache) Reset(identity string) (generation uint64) {
	c.resetting.Lock()
	defer c.resetting.Unlock()
	c.identity.Store(&identity)
	generation = c.generation.Add(1)
	c.freshUntil.Store(0)
	c.shards.clear()
	c.nodes.clear()
	c.loader.forget()
	return generation
}

// Confirm says that the feed was read to its end by a poll that began at: entries are fresh until
// the bound after that. The bound only moves forward.
func (c *Cache) Confirm(began time.Time) {
	at := int64(began.Sub(c.base))
	forward(&c.freshUntil, at+int64(c.cfg.Bound))
	forward(&c.contact, at)
	c.down.Store(false)
}

func forward(v *atomic.Int64, to int64) {
	for old := v.Load(); to > old; old = v.Load() {
		if v.CompareAndSwap(old, to) {
			return
		}
	}
}

// Len returns how many entries there are, ended ones included.
func (c *Cache) Len() int { return c.shards.len() }

// Routes calls f for each entry, ended ones included, until it returns false.
func (c *Cache) Routes(f func(route.Route) bool) { c.shards.each(f) }
