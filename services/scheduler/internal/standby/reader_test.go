package standby

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"berth/migrations"
	"berth/pkg/pgdb"
	"berth/pkg/pglocal"
	"berth/pkg/pgtest"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	role = "berth_scheduler"

	// waitLimit bounds every wait: what does not come by then fails the test.
	waitLimit = 2 * time.Minute
	pollPause = 10 * time.Millisecond
)

// pair is a primary and a standby that follows it.
type pair struct {
	t                *testing.T
	primary, standby *pgtest.Server
	database         string // the primary's URL of it
	replica          string // the standby's
}

func newPair(t *testing.T) *pair {
	t.Helper()
	primary := pgtest.NewServer(t, nil)
	name := strings.TrimPrefix(strings.SplitN(primary.New(migrations.FS).URL, "?", 2)[0], strings.SplitN(primary.URL(""), "?", 2)[0])
	p := &pair{t: t, primary: primary, standby: primary.Standby(t)}
	p.database, p.replica = primary.URL(name), p.standby.URL(name)
	p.exec(`INSERT INTO nodes (node_id, endpoint, source, cluster_id) VALUES ('n1', 'http://10.0.0.1:8000', 'registered', 'c1')`)
	return p
}

func (p *pair) open(url string) *pgdb.DB {
	p.t.Helper()
	db, err := pgdb.Open(p.t.Context(), pgdb.Config{URL: url, Name: "test", MaxConns: 4, MinConns: -1, Role: role})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(db.Close)
	return db
}

// exec runs sql on the primary as its owner. It returns after the commit.
func (p *pair) exec(sql string, args ...any) {
	p.t.Helper()
	p.on(p.database, sql, args...)
}

func (p *pair) on(url, sql string, args ...any) {
	p.t.Helper()
	db, err := pgdb.Open(p.t.Context(), pgdb.Config{URL: url, Name: "owner", MaxConns: 1, MinConns: -1})
	if err != nil {
		p.t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec(p.t.Context(), sql, args...); err != nil {
		p.t.Fatalf("%s: %v", sql, err)
	}
}

// bind makes a bound sandbox.
func (p *pair) bind(id sandbox.ID) {
	p.t.Helper()
	p.exec(`INSERT INTO bindings (sandbox_id, state, node_id, origin) VALUES ($1, 'bound', 'n1', 'recorded')`, id)
}

// end ends it.
func (p *pair) end(id sandbox.ID) {
	p.t.Helper()
	p.exec(`UPDATE bindings SET state = 'gone', revision = nextval('revisions'), ended_at = clock_timestamp(), ended_by = 'deleted' WHERE sandbox_id = $1`, id)
}

// pauseReplay keeps the standby where it is; what comes over the wire piles up.
func (p *pair) pauseReplay() { p.on(p.replica, "SELECT pg_wal_replay_pause()") }

func (p *pair) resumeReplay() { p.on(p.replica, "SELECT pg_wal_replay_resume()") }

// read runs a Reader over the pair until the test ends.
func (p *pair) read(bound time.Duration) *Reader {
	p.t.Helper()
	primary := p.open(p.database)
	log := slog.New(slog.DiscardHandler)
	r := New(primary, bindings.New(primary, bindings.DefaultConfig(), log, prometheus.NewRegistry()), Config{
		Open: func(ctx context.Context) (*pgdb.DB, error) {
			return pgdb.Open(ctx, pgdb.Config{URL: p.replica, Name: "query", MaxConns: 4, MinConns: -1, Role: role})
		}, MaxStaleness: bound,
	}, log, prometheus.NewRegistry())
	ctx, stop := context.WithCancel(context.WithoutCancel(p.t.Context()))
	var loops sync.WaitGroup
	for _, loop := range []func(context.Context) error{r.MarkLoop, r.ProbeLoop} {
		loops.Go(func() {
			if err := loop(ctx); err != nil {
				p.t.Errorf("loop = %v, want nil after a clean stop", err)
			}
		})
	}
	p.t.Cleanup(func() { stop(); loops.Wait(); r.Close() })
	return r
}

// eventually asks until f returns nil.
func (p *pair) eventually(f func() error) {
	p.t.Helper()
	deadline := time.NewTimer(waitLimit)
	defer deadline.Stop()
	tick := time.NewTicker(pollPause)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-deadline.C:
			p.t.Fatalf("not within %v: %v", waitLimit, err)
		case <-tick.C:
		}
	}
}

func answered(r *Reader, how string) float64 {
	return testutil.ToFloat64(r.metrics.lookups.WithLabelValues(how))
}

// byStandby looks id up until the standby answers.
func (p *pair) byStandby(r *Reader, id sandbox.ID) {
	p.t.Helper()
	p.eventually(func() error {
		before := answered(r, fromStandby)
		found, err := r.Lookup(p.t.Context(), id)
		if err != nil {
			return err
		}
		if found.Node != "n1" || found.Endpoint != "http://10.0.0.1:8000" || found.Revision == 0 || found.Incarnation != 1 {
			p.t.Fatalf("Lookup(%s) = %+v", id, found)
		}
		if answered(r, fromStandby) == before {
			return errors.New("the primary answered")
		}
		return nil
	})
}

// direct asks the standby as it is, without any bound.
func (p *pair) direct(db *pgdb.DB, id sandbox.ID) bool {
	p.t.Helper()
	found, err := bindings.LookupOn(p.t.Context(), db, []sandbox.ID{id})
	if err != nil {
		p.t.Fatal(err)
	}
	return len(found) == 1
}

func TestAnEndedSandboxIsNotAnsweredForLongerThanTheBound(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	const bound = time.Second
	r := p.read(bound)
	p.bind("s1")
	p.byStandby(r, "s1") // the standby of an idle primary is in step

	p.pauseReplay()
	p.end("s1")
	ended := time.Now()
	p.eventually(func() error {
		asked := time.Now()
		_, err := r.Lookup(t.Context(), "s1")
		switch {
		case errors.Is(err, sandbox.ErrNotFound):
			return nil
		case err != nil:
			t.Fatal(err)
		case asked.Sub(ended) > bound:
			t.Fatalf("asked %v after its end, s1 was live; the bound is %v", asked.Sub(ended), bound)
		}
		return errors.New("still live")
	})
	// The control: it was the bound that kept the old row from being answered, not its absence.
	replica := p.open(p.replica)
	if !p.direct(replica, "s1") {
		t.Error("the standby has replayed the end: the test has shown nothing")
	}
	p.eventually(func() error {
		if age, known := r.staleness(); !known || age <= bound {
			return fmt.Errorf("staleness is %v", age)
		}
		return nil
	})
	if err := r.Ready(t.Context()); err != nil {
		t.Errorf("Ready = %v with a standby that lags, want nil: the primary answers", err)
	}

	p.resumeReplay()
	p.bind("s2")
	p.byStandby(r, "s2")
	if p.direct(replica, "s1") {
		t.Error("the standby answers and has not replayed the end of s1")
	}
}

func TestWhatAStandbyDoesNotHaveIsAskedOfThePrimary(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	r := p.read(time.Minute) // the standby stays good for that long, although it stands still
	p.bind("s1")
	p.byStandby(r, "s1")
	p.pauseReplay()
	p.bind("s2")
	before := answered(r, primaryMiss)
	if found, err := r.Lookup(t.Context(), "s2"); err != nil || found.Node != "n1" {
		t.Errorf("Lookup of what was bound a moment ago = %+v, %v, want it on n1", found, err)
	}
	if got := answered(r, primaryMiss) - before; got != 1 {
		t.Errorf("%v look-ups were misses, want 1", got)
	}
	if _, err := r.Lookup(t.Context(), "nobody"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("Lookup of nobody = %v, want ErrNotFound", err)
	}
}

func TestAStandbyThatIsGoneOrHangsIsNotMissed(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	r := p.read(time.Second)
	p.bind("s1")
	p.byStandby(r, "s1")

	ask := func(when string) {
		if _, err := r.Lookup(t.Context(), "s1"); err != nil {
			t.Errorf("Lookup with a standby that %s = %v, want the primary's answer", when, err)
		}
	}
	p.standby.Freeze()
	ask("hangs")
	p.standby.Thaw()
	p.byStandby(r, "s1")

	p.standby.Stop(pglocal.Immediate)
	ask("is gone")
	p.eventually(func() error {
		before := answered(r, primaryUnusable)
		ask("is known to be gone")
		if answered(r, primaryUnusable) == before {
			return errors.New("it was asked all the same")
		}
		return nil
	})
	p.standby.Start()
	p.byStandby(r, "s1")
}

func TestWithoutThePrimaryAnswersEndWithTheBound(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	short, long := p.read(time.Second), p.read(10*time.Minute)
	p.bind("s1")
	p.byStandby(short, "s1")
	p.byStandby(long, "s1")

	p.primary.Stop(pglocal.Immediate)
	away := time.Now()
	p.eventually(func() error {
		asked := time.Now()
		_, err := short.Lookup(t.Context(), "s1")
		switch {
		case err == nil && asked.Sub(away) > time.Second:
			t.Fatalf("answered %v after the primary was last there", asked.Sub(away))
		case err == nil:
			return errors.New("still within the bound")
		case !pgdb.Unavailable(err):
			t.Fatalf("Lookup without a primary = %v, want one that is unavailable", err)
		}
		return nil
	})
	if err := short.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "bound of staleness, 1s") {
		t.Errorf("Ready = %v, want the bound that cannot be kept", err)
	}
	if _, err := long.Lookup(t.Context(), "s1"); err != nil {
		t.Errorf("Lookup within a bound of 10 minutes = %v", err)
	}
	if err := long.Ready(t.Context()); err != nil {
		t.Errorf("Ready within a bound of 10 minutes = %v", err)
	}

	p.primary.Start()
	p.eventually(func() error { return short.Ready(t.Context()) })
	p.bind("s2")
	p.byStandby(short, "s2")
}

func TestAServerWithAnotherHistoryIsNotBelieved(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.bind("s1")
	replica := p.open(p.replica)
	p.eventually(func() error {
		if !p.direct(replica, "s1") {
			return errors.New("not replayed yet")
		}
		return nil
	})
	// A primary of its own from here on, as a fenced-off one that comes back: far ahead, and wrong.
	p.standby.Promote()
	p.on(p.replica, "SELECT pg_switch_wal()")
	p.on(p.replica, "CREATE TABLE ahead AS SELECT generate_series(1, 1000)")
	p.end("s1")

	r := p.read(time.Minute)
	p.eventually(func() error { return r.Ready(t.Context()) })
	p.eventually(func() error {
		if err := r.probeOnce(t.Context()); !errors.Is(err, errBehind) {
			return fmt.Errorf("probe = %w", err)
		}
		return nil
	})
	if !p.direct(replica, "s1") {
		t.Fatal("the other server does not have s1: the test shows nothing")
	}
	if _, err := r.Lookup(t.Context(), "s1"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("Lookup = %v, want ErrNotFound, as the primary knows it", err)
	}
}

func TestAPrimaryURLThatLeadsToAStandbyMakesNoMarks(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.database = p.replica
	r := p.read(time.Second)
	if err := r.mark(t.Context()); err == nil || !strings.Contains(err.Error(), "target_session_attrs=read-write") {
		t.Errorf("mark = %v, want what to add to the URL", err)
	}
	if err := r.Ready(t.Context()); err == nil {
		t.Error("Ready = nil without a primary")
	}
}
