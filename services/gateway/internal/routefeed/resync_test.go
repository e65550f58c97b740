package routefeed

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"berth/pkg/pgdb"
	"berth/services/gateway/internal/routecache"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

func (s *setup) resyncs(reason string) float64 {
	return testutil.ToFloat64(s.follower.metrics.resyncs.WithLabelValues(reason))
}

// change does something to the database that a reader must notice.
func (s *setup) change(sql string) {
	s.t.Helper()
	if _, err := s.db.Exec(s.t.Context(), sql); err != nil {
		s.t.Fatal(err)
	}
}

func TestAReaderBeginsAnewWhenItMust(t *testing.T) {
	t.Parallel()
	for reason, sql := range map[string]string{
		"identity": "UPDATE feed_meta SET epoch = gen_random_uuid()",
		"floor":    "UPDATE feed_meta SET floor = pg_snapshot_xmax(pg_current_snapshot())::text::bigint::text::xid8",
		"rewind":   killFeedSQL, // within ten seconds of its start it has nothing to go back to
	} {
		t.Run(reason, func(t *testing.T) {
			t.Parallel()
			s := newSetup(t, nil)
			s.node("n1", "http://127.0.0.1:8001")
			s.bind("s1", "n1")
			s.start()
			if _, err := s.cache.Lookup(t.Context(), "s1"); err != nil {
				t.Fatal(err)
			}
			if reason == "floor" {
				// Retention has deleted rows up to here, and transactions have gone by since.
				for range 3 {
					s.bind("s2", "n1")
				}
			}
			s.change(sql)
			eventually(t, "the reader begins anew", func() bool { return s.resyncs(reason) > 0 })
			s.change("UPDATE feed_meta SET floor = '0'")
			s.bind("s1", "n1")
			revision := s.bind("s1", "n1")
			eventually(t, "it follows on", func() bool {
				f, err := s.cache.Lookup(t.Context(), "s1")
				return err == nil && f.Revision == revision && s.cache.Fresh()
			})
		})
	}
}

func TestAConnectionThatEndsRewindsWithoutBeginningAnew(t *testing.T) {
	t.Parallel()
	s := newSetup(t, func(c *Config) { c.Rewind = 200 * time.Millisecond })
	s.node("n1", "http://127.0.0.1:8001")
	s.start()
	until := time.NewTimer(500 * time.Millisecond) // the ring is older than the rewind by then
	defer until.Stop()
	<-until.C
	polls := func() float64 {
		return testutil.ToFloat64(s.follower.metrics.polls.WithLabelValues("timer"))
	}
	before := polls()
	s.change(killFeedSQL)
	s.bind("s1", "n1") // nobody listens
	eventually(t, "it follows on", func() bool { return polls() > before+3 })
	found := false
	s.cache.Routes(func(r route.Route) bool {
		found = found || r.Sandbox == "s1"
		return true
	})
	if !found || s.resyncs("rewind") != 0 || s.resyncs("start") != 1 {
		t.Errorf("found %v after %g rewinds and %g starts", found, s.resyncs("rewind"), s.resyncs("start"))
	}
}

func TestRowsOfAnUnknownKindAreSkippedAndCounted(t *testing.T) {
	t.Parallel()
	s := newSetup(t, nil)
	s.node("n1", "http://127.0.0.1:8001")
	s.start()
	s.change("ALTER TABLE route_feed DROP CONSTRAINT route_feed_kind_is_known")
	s.change("INSERT INTO route_feed (kind, key, revision) VALUES ('of-tomorrow', 'x', 1)")
	s.bind("s1", "n1")
	eventually(t, "the rows behind it are read", func() bool {
		f, err := s.cache.Lookup(t.Context(), "s1")
		return err == nil && f.Route.Node == "n1"
	})
	eventually(t, "it is counted", func() bool {
		return testutil.ToFloat64(s.follower.metrics.rows.WithLabelValues("unknown")) == 1
	})
}

func TestARestartReadsRoutesInTheBackground(t *testing.T) {
	t.Parallel()
	s := newSetup(t, nil)
	s.node("n1", "http://127.0.0.1:8001")
	s.change(`INSERT INTO bindings (sandbox_id, state, node_id, origin) SELECT 's' || n, 'bound', 'n1', 'recorded' FROM generate_series(1, 12000) AS n`)
	s.start()
	eventually(t, "all routes are there unasked", func() bool { return s.cache.Len() == 12000 })
}

func TestMetricsRegisterOnce(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	f := New(DefaultConfig("postgres:///"), nil, nil, func(string) {}, nil, reg)
	if _, ok := f.Lag(); ok {
		t.Error("a reader that never read has a lag")
	}
	if n, err := testutil.GatherAndCount(reg, "berth_gateway_route_feed_lag_seconds"); n != 1 || err != nil {
		t.Errorf("the lag is exported %d times, %v", n, err)
	}
}

// frozen is a relay before PostgreSQL that, told so, passes no more bytes and closes nothing.
type frozen struct {
	ice   atomic.Bool
	chop  atomic.Bool // one message in twenty ends its connection instead
	thaw  chan struct{}
	conns atomic.Int32
}

// relay puts a relay before the server of rawURL and returns the URL through it.
func relay(t *testing.T, rawURL string) (*frozen, string) {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	network, behind := "tcp", u.Host
	host := q.Get("host")
	if filepath.IsAbs(host) {
		port := q.Get("port")
		if port == "" {
			port = "5432"
		}
		network, behind = "unix", filepath.Join(host, ".s.PGSQL."+port)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &frozen{thaw: make(chan struct{})}
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial(network, behind)
			if err != nil {
				client.Close()
				continue
			}
			f.conns.Add(1)
			defer context.AfterFunc(ctx, func() { client.Close(); server.Close() })()
			running.Go(func() { f.pass(ctx, client, server) })
			running.Go(func() { f.pass(ctx, server, client) })
		}
	})
	t.Cleanup(func() { stop(); listener.Close(); running.Wait() })
	q.Del("host")
	q.Del("port")
	u.Host, u.RawQuery = listener.Addr().String(), q.Encode()
	if u.User == nil {
		u.User = url.User(q.Get("user"))
	}
	return f, u.String()
}

func (f *frozen) pass(ctx context.Context, from, to net.Conn) {
	defer to.Close()
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if f.ice.Load() {
			select {
			case <-f.thaw:
			case <-ctx.Done():
				return
			}
		}
		if f.chop.Load() && rand.IntN(20) == 0 {
			from.Close()
			return
		}
		if _, failed := to.Write(buffer[:n]); failed != nil || err != nil {
			return
		}
	}
}

func TestC36AFrozenFeedIsNoticedAndTheBoundHolds(t *testing.T) {
	t.Parallel()
	s := newSetup(t, nil)
	ice, through := relay(t, s.follower.cfg.URL)
	s.follower.cfg.URL = through
	s.node("n1", "http://127.0.0.1:8001")
	s.node("n2", "http://127.0.0.1:8002")
	s.bind("s1", "n1")
	s.start()
	if f, err := s.cache.Lookup(t.Context(), "s1"); err != nil || f.Route.Node != "n1" {
		t.Fatalf("%+v, %v", f, err)
	}
	// (a) only the feed's connection is frozen; a new one is frozen too.
	ice.ice.Store(true)
	s.bind("s1", "n2")
	s.ring()
	moved := time.Now()
	eventually(t, "the move is seen", func() bool {
		f, err := s.cache.Lookup(t.Context(), "s1")
		if err != nil {
			t.Fatalf("a known route failed: %v", err)
		}
		return f.Route.Node == "n2"
	})
	if took := time.Since(moved); took > 2500*time.Millisecond {
		t.Errorf("seen after %s, the bound is 2 s", took)
	}
	before := ice.conns.Load()
	eventually(t, "the reader opens another connection by itself", func() bool { return ice.conns.Load() > before })
	ice.ice.Store(false)
	close(ice.thaw)
	eventually(t, "the feed is back", s.cache.Fresh)
}

func TestC36WithAllConnectionsFrozenKnownRoutesAreServed(t *testing.T) {
	t.Parallel()
	s := newSetup(t, nil)
	ice, through := relay(t, s.follower.cfg.URL)
	s.follower.cfg.URL = through
	pool, err := pgdb.Open(t.Context(), pgdb.Config{URL: through, Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	s.useDatabase(pool)
	s.node("n1", "http://127.0.0.1:8001")
	s.node("n2", "http://127.0.0.1:8002")
	s.bind("s1", "n1")
	s.start()
	if _, err := s.cache.Lookup(t.Context(), "s1"); err != nil {
		t.Fatal(err)
	}
	ice.ice.Store(true)
	s.bind("s1", "n2")
	eventually(t, "the route is marked", func() bool {
		began := time.Now()
		f, err := s.cache.Lookup(t.Context(), "s1")
		if took := time.Since(began); err != nil || took > 2500*time.Millisecond {
			t.Fatalf("a known route: %v after %s", err, took)
		}
		return f.Stale
	})
	if _, err := s.cache.Lookup(t.Context(), "s9"); errors.Is(err, sandbox.ErrNotFound) || err == nil {
		t.Errorf("an unknown route is %v, absence cannot be known", err)
	}
	ice.ice.Store(false)
	close(ice.thaw)
	thawed := time.Now()
	eventually(t, "the move is seen", func() bool {
		f, err := s.cache.Lookup(t.Context(), "s1")
		return err == nil && f.Route.Node == "n2"
	})
	if took := time.Since(thawed); took > 2500*time.Millisecond {
		t.Errorf("seen %s after the thaw", took)
	}
}

func TestC07AHiccupOfTheDatabaseIsNotSeenOnKnownRoutes(t *testing.T) {
	t.Parallel()
	s := newSetup(t, nil)
	hiccups, through := relay(t, s.follower.cfg.URL)
	s.follower.cfg.URL = through
	pool, err := pgdb.Open(t.Context(), pgdb.Config{URL: through, Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	s.useDatabase(pool)
	s.node("n1", "http://127.0.0.1:8001")
	s.bind("page", "n1")
	for i := range 20 {
		s.bind(fmt.Sprint("cold", i), "n1")
	}
	s.follower.cfg.MaxFill = 0 // what was not asked for is not known
	s.start()
	if _, err := s.cache.Lookup(t.Context(), "page"); err != nil {
		t.Fatal(err)
	}
	hiccups.chop.Store(true)
	var all sync.WaitGroup
	for i := range 200 {
		all.Go(func() {
			if f, err := s.cache.Lookup(t.Context(), "page"); err != nil || f.Route.Node != "n1" {
				t.Errorf("a known route: %+v, %v", f, err)
			}
			id := sandbox.ID(fmt.Sprint("cold", i%20))
			f, err := s.cache.Lookup(t.Context(), id)
			if err == nil && f.Sandbox != id || err != nil && !errors.Is(err, routecache.ErrUnavailable) {
				t.Errorf("a route not asked for before: %+v, %v; want it, or that it cannot be known", f, err)
			}
		})
	}
	all.Wait()
}
