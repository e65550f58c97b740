package routefeed

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/waittest"
	"berth/services/gateway/internal/routecache"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// The property: whatever writers do and connections suffer, no row is missed, no route is served
// that was superseded for longer than the bound, revisions never fall, and at rest the cache is the
// table. Each rule of the protocol is then taken away, and the property must fail.

const (
	sandboxes  = 40
	writers    = 6
	testBound  = time.Second
	historyFor = 4 * time.Second
)

// recorder stands between the follower and the real cache, and keeps a cache beside it that takes
// whatever comes last.
type recorder struct {
	*routecache.Cache
	follower *Follower

	mu        sync.Mutex
	delivered map[string]bool // key and revision of each row
	positions []string        // where each reset began
	wasReset  bool
	lastWins  map[sandbox.ID]route.Route
	lastFell  int // how often its revisions fell
	confirms  int
}

func (r *recorder) Reset(identity string) uint64 {
	r.mu.Lock()
	r.wasReset = true
	r.mu.Unlock()
	return r.Cache.Reset(identity)
}

func (r *recorder) Apply(routes []route.Route) {
	r.mu.Lock()
	for _, one := range routes {
		r.delivered[rowKey(string(one.Sandbox), int64(one.Revision))] = true
		if one.Revision < r.lastWins[one.Sandbox].Revision {
			r.lastFell++
		}
		r.lastWins[one.Sandbox] = one
	}
	r.mu.Unlock()
	r.Cache.Apply(routes)
}

func (r *recorder) Confirm(began time.Time) {
	r.mu.Lock()
	if r.wasReset {
		r.wasReset = false
		r.positions = append(r.positions, r.follower.position)
	}
	r.confirms++
	r.mu.Unlock()
	r.Cache.Confirm(began)
}

func (r *recorder) polls() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.confirms
}

func rowKey(id string, revision int64) string { return fmt.Sprint(id, "@", revision) }

// oracle knows when each change was acknowledged.
type oracle struct {
	mu   sync.Mutex
	acks map[sandbox.ID][]ack
}

type ack struct {
	revision sandbox.Revision
	at       time.Time
}

func (o *oracle) acknowledged(changes map[sandbox.ID]sandbox.Revision, at time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, revision := range changes {
		o.acks[id] = append(o.acks[id], ack{revision, at})
	}
}

// supersededFor is how long, at a moment, something newer than revision had been acknowledged.
func (o *oracle) supersededFor(id sandbox.ID, revision sandbox.Revision, at time.Time) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	longest := time.Duration(0)
	for _, a := range o.acks[id] {
		if a.revision > revision {
			longest = max(longest, at.Sub(a.at))
		}
	}
	return longest
}

// outcome is what a history did to the cache.
type outcome struct {
	rows, missed, wrongAtRest, fell, fellLastWins, serves int
	stalest                                               time.Duration
}

// history runs a random history against a follower that change has altered.
func history(t *testing.T, seed uint64, change func(*Follower)) outcome {
	t.Helper()
	s := newSetup(t, func(c *Config) { c.Rewind = 300 * time.Millisecond })
	cacheConfig := routecache.DefaultConfig()
	cacheConfig.Bound, cacheConfig.RecheckEvery, cacheConfig.LookupTimeout = testBound, testBound/2, testBound
	gateway := s.follower.db
	rec := &recorder{
		Cache:     routecache.New(gateway, cacheConfig, s.follower.log, nil),
		delivered: map[string]bool{}, lastWins: map[sandbox.ID]route.Route{},
	}
	s.cache = rec.Cache
	s.follower = New(s.follower.cfg, gateway, rec, func(string) {}, s.follower.log, nil)
	rec.follower = s.follower
	change(s.follower)
	s.node("n0", "http://127.0.0.1:8000")
	s.node("n1", "http://127.0.0.1:8001")
	s.start()

	ctx, stop := context.WithTimeout(t.Context(), historyFor)
	defer stop()
	known := &oracle{acks: map[sandbox.ID][]ack{}}
	var all sync.WaitGroup
	for i := range writers {
		all.Go(func() { write(ctx, s, known, rand.New(rand.NewPCG(seed, uint64(i)))) })
	}
	all.Go(func() { kill(ctx, s, rand.New(rand.NewPCG(seed, 100))) })
	var mu sync.Mutex
	var out outcome
	for i := range 2 {
		all.Go(func() {
			serves, stalest, fell := serve(ctx, s, known, rand.New(rand.NewPCG(seed, 200+uint64(i))))
			mu.Lock()
			defer mu.Unlock()
			out.serves, out.stalest, out.fell = out.serves+serves, max(out.stalest, stalest), out.fell+fell
		})
	}
	all.Wait()

	// At rest: two polls that began after the last change have come back whole.
	rested := rec.polls() + 2
	eventually(t, "the feed is read to its end", func() bool { return rec.polls() >= rested })
	out.rows, out.missed = missed(t, s, rec)
	out.wrongAtRest = wrong(t, s)
	rec.mu.Lock()
	defer rec.mu.Unlock()
	out.fellLastWins = rec.lastFell
	return out
}

// write changes random bindings in transactions that stay open a while, with savepoints and
// rollbacks.
func write(ctx context.Context, s *setup, known *oracle, rnd *rand.Rand) {
	for ctx.Err() == nil {
		var changes map[sandbox.ID]sandbox.Revision
		err := pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) (err error) {
			changes, err = changeSome(ctx, tx, rnd)
			return err
		})
		switch {
		case err == nil:
			known.acknowledged(changes, time.Now())
			if rnd.IntN(2) == 0 {
				_, _ = s.db.Exec(ctx, "NOTIFY route")
			}
		case errors.Is(err, errUndo), ctx.Err() != nil:
		default:
			s.t.Errorf("write: %v", err)
			return
		}
	}
}

var errUndo = errors.New("this one is rolled back")

func changeSome(ctx context.Context, tx pgx.Tx, rnd *rand.Rand) (map[sandbox.ID]sandbox.Revision, error) {
	changes := map[sandbox.ID]sandbox.Revision{}
	ids := []int{rnd.IntN(sandboxes), rnd.IntN(sandboxes)}
	slices.Sort(ids) // in the order of the key, so that two never wait for each other
	for _, n := range slices.Compact(ids) {
		id := sandbox.ID(fmt.Sprint("s", n))
		sql, args := bindSQL, pgx.StrictNamedArgs{"sandbox": id, "node": fmt.Sprint("n", rnd.IntN(2))}
		if rnd.IntN(4) == 0 {
			sql, args = endSQL, pgx.StrictNamedArgs{"sandbox": id}
		}
		var revision sandbox.Revision
		inner, err := tx, error(nil)
		savepoint := rnd.IntN(3) == 0
		if savepoint {
			if inner, err = tx.Begin(ctx); err != nil {
				return nil, err
			}
		}
		err = inner.QueryRow(ctx, sql, args).Scan(&revision)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return nil, err
		}
		undone := false
		if savepoint {
			if undone = rnd.IntN(2) == 0; undone {
				err = inner.Rollback(ctx)
			} else {
				err = inner.Commit(ctx)
			}
			if err != nil {
				return nil, err
			}
		}
		if revision > 0 && !undone {
			changes[id] = revision
		}
		pause(ctx, time.Duration(rnd.IntN(8))*time.Millisecond)
	}
	if rnd.IntN(50) == 0 {
		pause(ctx, 300*time.Millisecond)
	}
	if rnd.IntN(7) == 0 {
		return nil, errUndo
	}
	return changes, ctx.Err()
}

const killFeedSQL = `
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE  datname = current_database() AND application_name = 'berth gateway feed'`

func kill(ctx context.Context, s *setup, rnd *rand.Rand) {
	for ctx.Err() == nil {
		pause(ctx, 500*time.Millisecond+time.Duration(rnd.IntN(700))*time.Millisecond)
		_, _ = s.db.Exec(ctx, killFeedSQL)
	}
}

// serve looks random routes up and measures how old what it got was.
func serve(ctx context.Context, s *setup, known *oracle, rnd *rand.Rand) (serves int, stalest time.Duration, fell int) {
	last := map[sandbox.ID]sandbox.Revision{}
	for ctx.Err() == nil {
		id := sandbox.ID(fmt.Sprint("s", rnd.IntN(sandboxes)))
		began := time.Now()
		found, err := s.cache.Lookup(ctx, id)
		switch {
		case err == nil:
			serves++
			stalest = max(stalest, known.supersededFor(id, found.Revision, began))
			if found.Revision < last[id] {
				fell++
			}
			last[id] = found.Revision
		case errors.Is(err, sandbox.ErrNotFound), errors.Is(err, routecache.ErrUnavailable), ctx.Err() != nil:
		default:
			s.t.Errorf("Lookup(%s): %v", id, err)
		}
		pause(ctx, time.Duration(rnd.IntN(1000))*time.Microsecond)
	}
	return serves, stalest, fell
}

// missed counts the rows of the feed that were visible at no reset and never delivered.
func missed(t *testing.T, s *setup, rec *recorder) (rows, missing int) {
	t.Helper()
	rec.mu.Lock()
	defer rec.mu.Unlock()
	found, err := s.db.Query(t.Context(), `
SELECT key, revision FROM route_feed AS f
WHERE  kind = 'binding' AND NOT EXISTS (SELECT FROM unnest(@positions::text[]) AS p WHERE pg_visible_in_snapshot(f.xid, p::pg_snapshot))`,
		pgx.StrictNamedArgs{"positions": rec.positions})
	if err != nil {
		t.Fatal(err)
	}
	var key string
	var revision int64
	if _, err := pgx.ForEachRow(found, []any{&key, &revision}, func() error {
		rows++
		if !rec.delivered[rowKey(key, revision)] {
			missing++
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return rows, missing
}

// wrong counts the bindings that differ from what the cache says, without asking the database for
// what it lacks.
func wrong(t *testing.T, s *setup) (wrong int) {
	t.Helper()
	cached := map[sandbox.ID]route.Route{}
	s.cache.Routes(func(r route.Route) bool {
		cached[r.Sandbox] = r
		return true
	})
	found, err := s.db.Query(t.Context(), "SELECT sandbox_id, revision, node_id, state FROM bindings")
	if err != nil {
		t.Fatal(err)
	}
	var row route.Route
	if _, err := pgx.ForEachRow(found, []any{&row.Sandbox, &row.Revision, &row.Node, &row.State}, func() error {
		if r, ok := cached[row.Sandbox]; ok && (r.Revision != row.Revision || r.Node != row.Node || r.State != row.State) {
			wrong++
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return wrong
}

func TestNoRowIsMissedAndNoRouteServedBeyondTheBound(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	got := history(t, seed, func(*Follower) {})
	t.Logf("seed %d: %+v", seed, got)
	if got.missed != 0 || got.wrongAtRest != 0 || got.fell != 0 || got.stalest > testBound {
		t.Errorf("seed %d: %d of %d rows missed, %d wrong at rest, %d revisions fell, stalest %s (bound %s)",
			seed, got.missed, got.rows, got.wrongAtRest, got.fell, got.stalest, testBound)
	}
	if got.rows < 50 || got.serves < 100 {
		t.Errorf("seed %d: a history of %d rows and %d serves proves nothing", seed, got.rows, got.serves)
	}
	// Control: in a cache that takes what comes last, the same rows let revisions fall.
	if got.fellLastWins == 0 {
		t.Errorf("seed %d: a cache without the revision check was right too", seed)
	}
}

// seqCursorSQL is what looks simpler and loses what commits late.
const seqCursorSQL = `
SELECT  m.epoch::text AS epoch, substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) AS timeline,
        pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint AS lsn,
        coalesce((SELECT max(feed_id) FROM route_feed), 0)::text AS position, false AS gone,
        f.kind, f.key, f.revision, f.state, f.node_id, f.incarnation, f.tenant_id
FROM    feed_meta AS m
LEFT JOIN route_feed AS f
ON      f.feed_id > CASE WHEN @position::text LIKE '%:%' THEN 0 ELSE @position::text::bigint END`

func TestControlASequenceAsCursorMissesRows(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	got := history(t, seed, func(f *Follower) { f.pollSQL = seqCursorSQL })
	t.Logf("seed %d: %+v", seed, got)
	if got.missed == 0 {
		t.Errorf("seed %d: a sequence as cursor missed none of %d rows", seed, got.rows)
	}
}

// bellAfterSnapshot changes a route and rings just after the first poll took its snapshot, with a
// poll so slow that only the bell can tell of it, and returns whether it did. LISTEN comes before
// that poll or after it.
func bellAfterSnapshot(t *testing.T, listenFirst bool) bool {
	t.Helper()
	s := newSetup(t, func(c *Config) { c.Poll, c.PollLimit, c.MaxFill = 20*time.Second, 5*time.Second, 0 })
	s.node("n1", "http://127.0.0.1:8001")
	s.node("n2", "http://127.0.0.1:8002")
	s.bind("s1", "n1")
	var current *session
	s.follower.first = func(session *session) []step {
		current = session
		if listenFirst {
			return []step{session.listen, session.identify}
		}
		return []step{session.identify}
	}
	rung := make(chan struct{})
	s.follower.polled = sync.OnceFunc(func() {
		s.bind("s1", "n2")
		s.ring()
		if !listenFirst {
			if err := current.listen(s.t.Context()); err != nil {
				s.t.Error(err)
			}
		}
		close(rung)
	})
	s.start()
	waittest.Receive(s.t, "the first poll", rung)
	deadline := time.NewTimer(2 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for seen := false; ; {
		s.cache.Routes(func(r route.Route) bool {
			seen = seen || r.Sandbox == "s1" && r.Node == "n2"
			return true
		})
		select {
		case <-deadline.C:
			return seen
		case <-tick.C:
			if seen {
				return true
			}
		}
	}
}

func TestABellBetweenSnapshotAndWaitIsHeard(t *testing.T) {
	t.Parallel()
	if !bellAfterSnapshot(t, true) {
		t.Error("a bell after the poll's snapshot was lost")
	}
}

func TestControlListeningAfterTheReadLosesABell(t *testing.T) {
	t.Parallel()
	if bellAfterSnapshot(t, false) {
		t.Error("the bell was heard though LISTEN came after the read: the control proves nothing")
	}
}

// staleAfterSlowPoll lets a change be acknowledged while a poll's answer is under way, and returns
// for how long the old route was served after that.
func staleAfterSlowPoll(t *testing.T, change func(*Follower)) time.Duration {
	t.Helper()
	const slow = 700 * time.Millisecond
	s := newSetup(t, func(c *Config) { c.Poll, c.PollLimit, c.MaxFill = 20*time.Second, 5*time.Second, 0 })
	cfg := routecache.DefaultConfig()
	cfg.Bound, cfg.RecheckEvery = testBound, time.Millisecond
	s.cache = routecache.New(s.follower.db, cfg, s.follower.log, nil)
	s.follower.cache = s.cache
	s.node("n1", "http://127.0.0.1:8001")
	s.node("n2", "http://127.0.0.1:8002")
	s.bind("s1", "n1")
	changed := make(chan time.Time, 1)
	s.follower.polled = sync.OnceFunc(func() {
		if _, err := s.cache.Lookup(s.t.Context(), "s1"); err != nil { // known before the change
			s.t.Error(err)
		}
		s.bind("s1", "n2")
		changed <- time.Now()
		pause(s.t.Context(), slow)
	})
	change(s.follower)
	s.start()
	superseded := waittest.Receive(s.t, "the change", changed)
	var last time.Time // when the old route was last asked for and got
	eventually(t, "the new route is served", func() bool {
		asked := time.Now()
		f, err := s.cache.Lookup(t.Context(), "s1")
		if err == nil && f.Route.Node == "n1" {
			last = asked
		}
		return err == nil && f.Route.Node == "n2"
	})
	return last.Sub(superseded)
}

func TestFreshnessCountsFromAPollsBeginning(t *testing.T) {
	t.Parallel()
	if got := staleAfterSlowPoll(t, func(*Follower) {}); got > testBound {
		t.Errorf("served for %s after it was superseded, the bound is %s", got, testBound)
	}
}

func TestControlFreshnessFromAPollsEndExceedsTheBound(t *testing.T) {
	t.Parallel()
	got := staleAfterSlowPoll(t, func(f *Follower) { f.began = func(_, ended time.Time) time.Time { return ended } })
	if got <= testBound {
		t.Errorf("served for %s only: the control proves nothing", got)
	}
}
