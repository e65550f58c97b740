package routecache

import (
	"context"
	"errors"
	"log/slog"
	"net/url"
	"sync"
	"testing"
	"time"

	"berth/migrations"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
)

// TestNoRouteIsReadFromAStandby: a standby may lag without bound, and the bound of routes is 2 s. So a
// gateway that is given one answers nothing it has read there, whatever the feed's own connection says.
func TestNoRouteIsReadFromAStandby(t *testing.T) {
	t.Parallel()
	primary := pgtest.NewServer(t, nil)
	database := primary.New(migrations.FS)
	for _, sql := range []string{
		`INSERT INTO nodes (node_id, endpoint, source) VALUES ('n1', 'http://10.0.0.1:8000', 'static')`,
		`INSERT INTO bindings (sandbox_id, state, node_id, origin) VALUES ('s1', 'bound', 'n1', 'recorded')`,
	} {
		if _, err := database.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	u, err := url.Parse(database.URL)
	if err != nil {
		t.Fatal(err)
	}
	pool, err := pgdb.Open(t.Context(), pgdb.Config{URL: primary.Standby(t).URL(u.Path[1:]), Name: "standby", MaxConns: 2, MinConns: -1, Role: "berth_gateway"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	var there int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM bindings`).Scan(&there); err != nil || there != 1 {
		t.Fatalf("the standby has %d bindings, %v, want the one that must not be read", there, err)
	}

	c := New(pool, DefaultConfig(), slog.New(slog.DiscardHandler), nil)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var run sync.WaitGroup
	run.Go(func() { _ = c.Run(ctx) })
	t.Cleanup(func() { cancel(); run.Wait() })
	c.Confirm(time.Now()) // as a feed on the primary would
	if found, err := c.Lookup(t.Context(), "s1"); !errors.Is(err, ErrUnavailable) {
		t.Errorf("Lookup on a standby = %+v, %v, want ErrUnavailable: neither where s1 is nor that it is nowhere", found, err)
	}
}
