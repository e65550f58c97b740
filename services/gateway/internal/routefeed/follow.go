package routefeed

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/prometheus/client_golang/prometheus"

	"berth/pkg/pgdb"
	"berth/services/gateway/internal/routecache"
	"berth/services/internal/route"
)

// sink is the cache that is kept up to date.
type sink interface {
	Reset(identity string) (generation uint64)
	Apply(routes []route.Route)
	ApplyNodes(nodes []*routecache.Node)
	Fill(generation uint64, routes []route.Route)
	Confirm(began time.Time)
}

// Config is where the feed is read and how often.
type Config struct {
	URL         string        // a direct connection: LISTEN does not pass a pooler
	Poll        time.Duration // between two polls, give or take a fifth, if no bell rings
	PollLimit   time.Duration // a poll that takes longer ends its connection
	Rewind      time.Duration // how far back a new connection begins
	DialTimeout time.Duration
	MaxFill     int // routes read in the background after a reset
}

// DefaultConfig returns the times of the design for a feed at url.
func DefaultConfig(url string) Config {
	return Config{
		URL: url, Poll: 100 * time.Millisecond, PollLimit: time.Second, Rewind: 10 * time.Second,
		DialTimeout: 2 * time.Second, MaxFill: 500_000,
	}
}

const (
	firstRedial = 50 * time.Millisecond
	maxRedial   = time.Second
)

// Follower reads the feed of one database. Run it once.
type Follower struct {
	cfg     Config
	db      *pgdb.DB
	cache   sink
	onKey   func(publicID string)
	log     *slog.Logger
	metrics metrics

	// What is known of the database, used by Run's goroutine only.
	identity string
	epoch    string
	timeline string
	position string
	lsn      int64
	ring     ring
	fill     context.CancelFunc
	filling  sync.WaitGroup

	ready atomic.Bool
	last  atomic.Int64 // when the last good poll began, in Unix nanoseconds; 0: never

	// The protocol, in parts that tests replace one by one to see that each is needed.
	pollSQL string
	first   func(*session) []step // what a new connection does before it reads
	began   func(began, ended time.Time) time.Time
	polled  func() // after a poll's rows came, before they are applied
}

// step is one thing a new connection does.
type step func(ctx context.Context) error

// New returns a follower that keeps cache up to date. db is for reading in bulk, besides the feed's
// own connection. onKey is told the public id of each API key that changed, "" for all of them; it
// must be quick. reg may be nil.
func New(cfg Config, db *pgdb.DB, cache sink, onKey func(publicID string), log *slog.Logger, reg prometheus.Registerer) *Follower {
	f := &Follower{
		cfg: cfg, db: db, cache: cache, onKey: onKey, log: log,
		pollSQL: pollFeedSQL,
		first:   func(s *session) []step { return []step{s.listen, s.identify} },
		began:   func(began, _ time.Time) time.Time { return began },
		polled:  func() {},
	}
	f.ring.span = cfg.Rewind
	f.metrics = newMetrics(reg, f)
	return f
}

// Ready tells whether the feed has been read to its end once.
func (f *Follower) Ready() bool { return f.ready.Load() }

// Lag returns how long ago the last good poll began, and false before the first.
func (f *Follower) Lag() (time.Duration, bool) {
	at := f.last.Load()
	return time.Since(time.Unix(0, at)), at != 0
}

// Run follows the feed until ctx ends, then returns nil. It survives every failure of the database.
func (f *Follower) Run(ctx context.Context) error {
	defer f.filling.Wait()
	defer f.stopFilling()
	failures := 0
	for ctx.Err() == nil {
		polls, err := f.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if polls > 0 {
			failures = 0
		}
		if failures == 0 {
			f.log.WarnContext(ctx, "route feed lost", slog.Any("error", err))
		}
		pause(ctx, rand.N(min(maxRedial, firstRedial<<min(failures, 10))))
		failures++
	}
	return nil
}

// follow reads the feed on one connection until something fails, and returns how many polls were
// good.
func (f *Follower) follow(ctx context.Context) (polls int, err error) {
	s, err := f.connect(ctx)
	if err != nil {
		return 0, err
	}
	defer s.close(ctx)
	for _, step := range f.first(s) {
		if err := f.limited(ctx, step); err != nil {
			return 0, err
		}
	}
	if err := f.begin(ctx, s); err != nil {
		return 0, err
	}
	for woke := "timer"; ; polls++ {
		began := time.Now()
		if err := f.poll(ctx, s, began); err != nil {
			return polls, err
		}
		f.metrics.polls.WithLabelValues(woke).Inc()
		if polls == 0 {
			f.log.InfoContext(ctx, "following the route feed")
		}
		if woke, err = s.wait(ctx, began.Add(f.cfg.Poll*4/5+rand.N(f.cfg.Poll*2/5+1))); err != nil {
			return polls, err
		}
	}
}

// begin decides where a new connection reads from.
func (f *Follower) begin(ctx context.Context, s *session) error {
	switch {
	case f.identity == "":
		return f.resync(ctx, s, "start")
	case s.identity != f.identity:
		return f.resync(ctx, s, "identity")
	}
	position, ok := f.ring.back()
	if !ok {
		return f.resync(ctx, s, "rewind")
	}
	f.position = position
	return nil
}

// poll reads and applies what is new, once. Freshness counts from its beginning: what was
// acknowledged before that is visible to it.
func (f *Follower) poll(ctx context.Context, s *session, began time.Time) error {
	var p polled
	if err := f.limited(ctx, func(ctx context.Context) (err error) {
		p, err = s.poll(ctx, f.pollSQL, f.position)
		return err
	}); err != nil {
		return err
	}
	f.polled()
	switch {
	case p.epoch != f.epoch || p.timeline != f.timeline:
		if err := f.limited(ctx, s.identify); err != nil {
			return err
		}
		return f.resync(ctx, s, "identity")
	case p.gone:
		return f.resync(ctx, s, "floor")
	case p.lsn < f.lsn:
		return f.resync(ctx, s, "lsn")
	}
	if err := f.apply(ctx, s, p); err != nil {
		return err
	}
	f.position, f.lsn = p.position, p.lsn
	f.good(f.began(began, time.Now()))
	return nil
}

// good notes a poll that was applied whole.
func (f *Follower) good(began time.Time) {
	f.ring.add(began, f.position)
	f.last.Store(began.UnixNano())
	f.cache.Confirm(began)
	f.ready.Store(true)
}

// apply hands on what a poll found. A node's row in the feed has not all there is to know, so the
// node itself is read.
func (f *Follower) apply(ctx context.Context, s *session, p polled) error {
	if len(p.nodes) > 0 {
		var nodes []*routecache.Node
		if err := f.limited(ctx, func(ctx context.Context) (err error) {
			nodes, err = s.nodes(ctx, p.nodes)
			return err
		}); err != nil {
			return err
		}
		f.cache.ApplyNodes(nodes)
	}
	if len(p.routes) > 0 {
		f.cache.Apply(p.routes)
	}
	for _, id := range p.keys {
		f.onKey(id)
	}
	for kind, n := range p.kinds {
		f.metrics.rows.WithLabelValues(kind).Add(float64(n))
	}
	return nil
}

// limited runs one step against the database within the limit of a poll.
func (f *Follower) limited(ctx context.Context, do step) error {
	ctx, cancel := context.WithTimeout(ctx, f.cfg.PollLimit)
	defer cancel()
	return do(ctx)
}

// connect opens the feed's own connection, to a server that can be written to: a standby may lag
// without bound.
func (f *Follower) connect(ctx context.Context) (*session, error) {
	cfg, err := pgx.ParseConfig(f.cfg.URL)
	if err != nil {
		return nil, errors.New("the feed's database URL cannot be read") // the reason could quote a password
	}
	cfg.ConnectTimeout = f.cfg.DialTimeout
	cfg.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
	cfg.RuntimeParams["application_name"] = "berth gateway feed"
	ctx, cancel := context.WithTimeout(ctx, f.cfg.DialTimeout)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, pgdb.ExplainConnect(f.cfg.URL, err)
	}
	return &session{conn: conn}, nil
}

// pause waits for d or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// ring remembers positions of the last polls.
type ring struct {
	span time.Duration
	past []mark
}

type mark struct {
	at       time.Time
	position string
}

// add keeps a position, and the youngest one that is a span older than it.
func (r *ring) add(at time.Time, position string) {
	r.past = append(r.past, mark{at, position})
	drop := 0
	for drop+1 < len(r.past) && at.Sub(r.past[drop+1].at) >= r.span {
		drop++
	}
	r.past = r.past[drop:]
}

// back returns the youngest position that is a span older than the last, if there is one. After a
// crash PostgreSQL hands out again the numbers of transactions whose log had not been flushed: a
// younger position could take such a new transaction for one that it has seen.
func (r *ring) back() (position string, ok bool) {
	if len(r.past) == 0 {
		return "", false
	}
	oldest, last := r.past[0], r.past[len(r.past)-1]
	if last.at.Sub(oldest.at) < r.span {
		return "", false
	}
	return oldest.position, true
}

func (r *ring) clear() { r.past = nil }
