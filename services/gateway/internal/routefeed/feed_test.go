package routefeed

import (
	"context"
	"log/slog"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"berth/migrations"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
	"berth/services/gateway/internal/routecache"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// gatewayURL is d's URL whose every connection acts as berth_gateway, so that a missing grant shows.
func gatewayURL(t *testing.T, d *pgtest.Database) string {
	t.Helper()
	u, err := url.Parse(d.URL)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	q.Set("role", "berth_gateway")
	u.RawQuery = q.Encode()
	return u.String()
}

// writer is what the scheduler does to bindings, in the form the feed relies on: change and feed row
// in one statement.
type writer struct {
	t  testing.TB
	db *pgdb.DB
}

const bindSQL = `
WITH changed AS (
        INSERT INTO bindings AS b (sandbox_id, state, node_id, origin, tenant_id)
        VALUES (@sandbox, 'bound', @node, 'recorded', 't1')
        ON CONFLICT (sandbox_id) DO UPDATE
        SET    state = 'bound', node_id = @node, ended_at = NULL, ended_by = NULL,
               revision = GREATEST(b.revision + 1, nextval('revisions')), incarnation = b.incarnation + 1
        RETURNING sandbox_id, state, node_id, revision, incarnation, tenant_id)
INSERT  INTO route_feed (kind, key, revision, state, node_id, incarnation, tenant_id)
SELECT  'binding', sandbox_id, revision, state, node_id, incarnation, tenant_id FROM changed
RETURNING revision`

const endSQL = `
WITH changed AS (
        UPDATE bindings AS b
        SET    state = 'gone', ended_at = clock_timestamp(), ended_by = 'deleted',
               revision = GREATEST(b.revision + 1, nextval('revisions'))
        WHERE  sandbox_id = @sandbox AND state = 'bound'
        RETURNING sandbox_id, state, node_id, revision, incarnation, tenant_id)
INSERT  INTO route_feed (kind, key, revision, state, node_id, incarnation, tenant_id)
SELECT  'binding', sandbox_id, revision, state, node_id, incarnation, tenant_id FROM changed
RETURNING revision`

const nodeSQL = `
WITH changed AS (
        INSERT INTO nodes AS n (node_id, endpoint, source, capabilities)
        VALUES (@node, @endpoint, 'registered', @capabilities)
        ON CONFLICT (node_id) DO UPDATE
        SET    endpoint = @endpoint, capabilities = @capabilities, endpoint_revision = nextval('revisions')
        RETURNING node_id, endpoint, endpoint_revision)
INSERT  INTO route_feed (kind, key, revision, endpoint)
SELECT  'node', node_id, endpoint_revision, endpoint FROM changed
RETURNING revision`

func (w writer) write(ctx context.Context, sql string, args pgx.StrictNamedArgs) int64 {
	w.t.Helper()
	var revision int64
	if err := w.db.QueryRow(ctx, sql, args).Scan(&revision); err != nil {
		w.t.Fatal(err)
	}
	return revision
}

func (w writer) bind(id, node string) sandbox.Revision {
	w.t.Helper()
	return sandbox.Revision(w.write(w.t.Context(), bindSQL, pgx.StrictNamedArgs{"sandbox": id, "node": node}))
}

func (w writer) end(id string) {
	w.t.Helper()
	w.write(w.t.Context(), endSQL, pgx.StrictNamedArgs{"sandbox": id})
}

func (w writer) node(id, endpoint string, capabilities ...string) {
	w.t.Helper()
	if capabilities == nil {
		capabilities = []string{}
	}
	w.write(w.t.Context(), nodeSQL, pgx.StrictNamedArgs{"node": id, "endpoint": endpoint, "capabilities": capabilities})
}

func (w writer) ring() {
	w.t.Helper()
	if _, err := w.db.Exec(w.t.Context(), "NOTIFY route"); err != nil {
		w.t.Error(err)
	}
}

// setup is a database, a cache and a follower that are not running yet.
type setup struct {
	writer
	cache    *routecache.Cache
	follower *Follower
	keys     chan string
}

func newSetup(t *testing.T, change func(*Config)) *setup {
	t.Helper()
	d := pgtest.New(t, migrations.FS)
	s := &setup{writer: writer{t, d.DB}, keys: make(chan string, 100)}
	gateway := d.As(t, "berth_gateway")
	cfg := DefaultConfig(gatewayURL(t, d))
	if change != nil {
		change(&cfg)
	}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	s.cache = routecache.New(gateway, routecache.DefaultConfig(), log, nil)
	s.follower = New(cfg, gateway, s.cache, func(id string) { s.keys <- id }, log, nil)
	return s
}

// useDatabase makes cache and follower read in bulk and one by one from db.
func (s *setup) useDatabase(db *pgdb.DB) {
	s.cache = routecache.New(db, routecache.DefaultConfig(), s.follower.log, nil)
	s.follower = New(s.follower.cfg, db, s.cache, s.follower.onKey, s.follower.log, nil)
}

// start runs cache and follower until the test ends.
func (s *setup) start() {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = s.cache.Run(ctx) })
	running.Go(func() { _ = s.follower.Run(ctx) })
	s.t.Cleanup(func() { cancel(); running.Wait() })
	eventually(s.t, "the feed is read", s.follower.Ready)
}

// eventually waits until what holds.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !holds() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 10 s: %s", what)
		}
		<-tick.C
	}
}

func TestAMoveReachesTheCacheInMilliseconds(t *testing.T) {
	t.Parallel()
	s := newSetup(t, nil)
	s.node("n1", "http://127.0.0.1:8001")
	s.node("n2", "http://127.0.0.1:8002", "route_revision")
	s.bind("s1", "n1")
	s.start()

	found, err := s.cache.Lookup(t.Context(), "s1")
	if err != nil || found.Node.Address != "127.0.0.1:8001" {
		t.Fatalf("Lookup(s1) = %+v, %v; want it at n1", found, err)
	}
	moved := time.Now()
	revision := s.bind("s1", "n2")
	s.ring()
	eventually(t, "the move is seen", func() bool {
		found, err = s.cache.Lookup(t.Context(), "s1")
		return err == nil && found.Route.Node == "n2"
	})
	if took := time.Since(moved); took > time.Second { // milliseconds on a quiet machine
		t.Errorf("the move was seen after %s", took)
	}
	want := route.Route{Sandbox: "s1", Node: "n2", Revision: revision, Incarnation: 2, Tenant: "t1", State: sandbox.Bound}
	if diff := cmp.Diff(want, found.Route); diff != "" {
		t.Errorf("route (-want +got):\n%s", diff)
	}
	if !found.Node.Revisions {
		t.Error("the node's capability is not known")
	}

	s.end("s1")
	eventually(t, "the end is seen", func() bool {
		_, err = s.cache.Lookup(t.Context(), "s1")
		return err == sandbox.ErrNotFound //nolint:errorlint // the sentinel itself is promised
	})
}

func TestANodeThatMovesIsDialledAtItsNewAddress(t *testing.T) {
	t.Parallel()
	s := newSetup(t, nil)
	s.node("n1", "http://127.0.0.1:8001")
	s.bind("s1", "n1")
	s.start()
	if _, err := s.cache.Lookup(t.Context(), "s1"); err != nil {
		t.Fatal(err)
	}
	s.node("n1", "http://127.0.0.1:8009", "h2c")
	eventually(t, "the new address is seen", func() bool {
		found, err := s.cache.Lookup(t.Context(), "s1")
		return err == nil && found.Node.Address == "127.0.0.1:8009" && found.Node.H2C
	})
}

func TestAChangedKeyIsTold(t *testing.T) {
	t.Parallel()
	s := newSetup(t, nil)
	s.start()
	if all := <-s.keys; all != "" {
		t.Errorf("the first thing told is %q, want all keys", all)
	}
	if _, err := s.db.Exec(t.Context(), "SELECT feed_key('0123456789ab')"); err != nil {
		t.Fatal(err)
	}
	select {
	case id := <-s.keys:
		if id != "0123456789ab" {
			t.Errorf("told of key %q", id)
		}
	case <-time.After(5 * time.Second):
		t.Error("no key was told")
	}
}
