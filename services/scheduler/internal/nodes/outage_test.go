package nodes

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/migrations"
	"berth/pkg/pgdb"
	"berth/pkg/pglocal"
	"berth/pkg/pgtest"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
)

// A database that went away is told as such, at once; when it is back, nothing acknowledged is lost and
// nobody has to do anything.
func TestADatabaseThatGoesAwayAndComesBack(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, nil)
	db := server.New(migrations.FS)
	c := &cell{Database: db, t: t}
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA, "s1"))
	for _, mode := range []pglocal.StopMode{pglocal.Fast, pglocal.Immediate} {
		server.Stop(mode)
		limited, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		if _, err := r.Heartbeat(limited, beatOf("a", "i1", endpointA, "s1")); !pgdb.Unavailable(err) || limited.Err() != nil {
			t.Errorf("Heartbeat without a database = %v, want it told unavailable in time", err)
		}
		if err := r.Unregister(limited, "a", "i1"); !pgdb.Unavailable(err) || limited.Err() != nil {
			t.Errorf("Unregister without a database = %v, want it told unavailable in time", err)
		}
		if _, err := r.routes.Lookup(limited, "s1"); !pgdb.Unavailable(err) || limited.Err() != nil {
			t.Errorf("Lookup without a database = %v, want it told unavailable in time", err)
		}
		if _, err := r.routes.Record(limited, bindings.Assignment{
			Sandboxes: []sandbox.ID{"s2"}, Node: "a", Endpoint: endpointA,
		}); !pgdb.Unavailable(err) || limited.Err() != nil {
			t.Errorf("Record without a database = %v, want it told unavailable in time", err)
		}
		cancel()
		server.Start()
		var err error
		for range 100 { // connections that died are found one by one
			if _, err = r.Heartbeat(t.Context(), beatOf("a", "i1", endpointA, "s1")); err == nil {
				break
			}
			if !pgdb.Unavailable(err) {
				t.Fatalf("Heartbeat after the database came back = %v", err)
			}
		}
		if err != nil {
			t.Fatalf("Heartbeat = %v, long after the database came back", err)
		}
		if found, err := r.routes.Lookup(t.Context(), "s1"); err != nil || found.Node != "a" {
			t.Errorf("Lookup = %+v, %v, want the binding that was acknowledged", found, err)
		}
	}
}

func TestLoopsEndWithTheirContext(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	routes := bindings.New(r.db, bindings.DefaultConfig(), slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	for name, run := range map[string]func(context.Context) error{
		"due": r.DueLoop, "expire": r.ExpireLoop, "status": r.StatusLoop,
		"park": routes.ParkLoop, "retention": routes.RetentionLoop, "states": routes.StateLoop, "doorbell": routes.Doorbell().Run,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, stop := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- run(ctx) }()
			stop()
			if err := <-ended; err != nil {
				t.Errorf("%s = %v, want nil", name, err)
			}
		})
	}
}

// More nodes than there are turns have names that the resolver is silent about: the others go on.
func TestNamesThatNobodyResolvesHoldNoOtherNodeUp(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	named := DefaultConfig().SlowPaths + 1
	asked := make(chan string, named)
	known, stuck := []netip.Addr{netip.MustParseAddr("10.0.0.9")}, make(chan struct{})
	guard, err := route.NewGuard(route.GuardConfig{
		CIDRs: route.DefaultCIDRs, Schemes: route.DefaultSchemes, Loopback: true,
		Resolve: func(ctx context.Context, host string) ([]netip.Addr, error) {
			asked <- host
			select {
			case <-stuck:
				return known, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	r.guard = guard
	accepted := make(chan error, named)
	for i := range named {
		go func() {
			_, err := r.Heartbeat(t.Context(), beatOf(fmt.Sprintf("named-%d", i), "i1", fmt.Sprintf("http://n%d.example:8000", i)))
			accepted <- err
		}()
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for i := range named {
		select {
		case <-asked:
		case <-ctx.Done():
			t.Fatalf("%d of %d names are asked about: the others wait behind them", i, named)
		}
	}
	if _, err := r.Heartbeat(ctx, beatOf("a", "i1", endpointA)); err != nil {
		t.Errorf("Heartbeat of a node with an address = %v", err)
	}
	close(stuck)
	for range named {
		if err := <-accepted; err != nil {
			t.Errorf("Heartbeat once its name resolved = %v", err)
		}
	}
	if got := len(r.slow); got != 0 {
		t.Errorf("%d turns are taken by nobody", got)
	}
}

func TestOneNodeThatCannotBeMadeAbsentKeepsNoOther(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	for _, id := range []string{"a", "b"} {
		r.must(t, beatOf(id, "i1", "http://127.0.0.1:8001"))
	}
	c.exec(`UPDATE node_leases SET expires_at = now() - interval '30 days'`)
	c.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused'; END $$`)
	c.exec(`CREATE TRIGGER refuse BEFORE UPDATE ON nodes FOR EACH ROW WHEN (OLD.node_id = 'a') EXECUTE FUNCTION refuse()`)
	if err := r.expire(t.Context()); err == nil || !strings.Contains(err.Error(), "expire a") {
		t.Errorf("expire = %v, want the trouble of a", err)
	}
	if got := value[string](c, `SELECT string_agg(node_id, ',' ORDER BY node_id) FROM nodes WHERE present`); got != "a" {
		t.Errorf("present are %s, want a alone", got)
	}
}
