package bindings

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/route"
)

func TestTheFeedIsTrimmedBelowWhatEveryReaderHasSeen(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.mustReconcile("a", "s1", "s2")
	trim := func() {
		t.Helper()
		if err := c.trimFeed(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for value[bool](c, `SELECT pg_snapshot_xmin(pg_current_snapshot()) <= max(xid) FROM route_feed`) {
		// A transaction of any database of the server holds the horizon back; it ends.
	}
	trim()
	if got := c.feed(); got != 2 {
		t.Fatalf("feed rows = %d, want 2: the mark is young", got)
	}
	c.exec(`UPDATE feed_marks SET at = at - interval '16 minutes'`)
	c.mustReconcile("a", "s1", "s2", "s3") // after the mark
	trim()
	if got := value[string](c, `SELECT string_agg(key, ',') FROM route_feed`); got != "s3" {
		t.Errorf("feed = %q, want only what came after the mark", got)
	}
	if got := value[bool](c, `SELECT floor = (SELECT min(horizon) FROM feed_marks) AND floor > '0' FROM feed_meta`); !got {
		t.Error("the floor is not at the mark's horizon")
	}
	c.exec(`UPDATE feed_marks SET at = at - interval '16 minutes'`)
	trim()
	if got := value[int64](c, `SELECT count(*) FROM feed_marks WHERE at < now() - interval '15 minutes'`); got != 1 {
		t.Errorf("%d old marks, want the newest of them only", got)
	}
}

// A row that commits late has a low xid: a transaction that is open when the mark is made keeps its
// rows, however high those of others are.
func TestTheFeedKeepsWhatCommitsLate(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	ctx := context.WithoutCancel(t.Context())
	late, err := c.owner.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = late.Rollback(ctx) }()
	if _, err := late.Exec(ctx, `INSERT INTO route_feed (kind, key, revision) VALUES ('key', 'late', 1)`); err != nil {
		t.Fatal(err)
	}
	c.mustReconcile("a", "s1")
	if err := c.trimFeed(ctx); err != nil { // a mark, while it is open
		t.Fatal(err)
	}
	if err := late.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	c.exec(`UPDATE feed_marks SET at = at - interval '16 minutes'`)
	if err := c.trimFeed(ctx); err != nil {
		t.Fatal(err)
	}
	if got := value[int64](c, `SELECT count(*) FROM route_feed WHERE key = 'late'`); got != 1 {
		t.Errorf("the late row is gone, and no reader has seen it")
	}
}

func TestANodesChangeIsAnnouncedWithAHigherRevision(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	var first, second int64
	err := c.db.Tx(t.Context(), func(tx pgx.Tx) (err error) {
		if first, err = AnnounceNode(t.Context(), tx, NodeChange{Node: "a", Endpoint: "http://10.0.0.1:1"}); err != nil {
			return err
		}
		second, err = AnnounceNode(t.Context(), tx, NodeChange{Node: "a", Cluster: "c1", Endpoint: "http://10.0.0.1:2", Above: first + 1000})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if first <= 0 || second != first+1001 {
		t.Errorf("revisions = %d, %d, want the second one above what it was told", first, second)
	}
	got := value[string](c, `SELECT kind || ' ' || key || ' ' || node_id || ' ' || cluster_id || ' ' || endpoint FROM route_feed WHERE revision = $1`, second)
	if got != "node a a c1 http://10.0.0.1:2" {
		t.Errorf("feed row = %q", got)
	}
}

func TestTheBellRingsAtOnceAndThenAtMostOnceInItsTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var rings []time.Duration
		start := time.Now()
		d := newDoorbell(nil, 10*time.Millisecond, slog.New(slog.DiscardHandler))
		d.ring = func(context.Context) error {
			rings = append(rings, time.Since(start))
			return errors.New("nobody hears it") // which is no reason to stop
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- d.Run(ctx) }()

		d.Ring()
		synctest.Wait()
		for range 35 { // one a millisecond
			<-time.After(time.Millisecond)
			d.Ring()
		}
		<-time.After(time.Second)
		d.Ring()
		synctest.Wait()
		stop()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
		want := []time.Duration{0, 10, 20, 30, 40, 1035}
		if len(rings) != len(want) {
			t.Fatalf("rang at %v, want %v ms", rings, want)
		}
		for i, at := range want {
			if rings[i] != at*time.Millisecond {
				t.Errorf("ring %d at %v, want %d ms", i, rings[i], at)
			}
		}
	})
}

func TestTheBellIsHeardOnItsChannelAfterTheCommit(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	conn, err := pgx.Connect(t.Context(), c.owner.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	if _, err := conn.Exec(t.Context(), "LISTEN "+route.Channel); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Doorbell().Run(ctx) }()
	c.mustRecord(on("a", "s1"))
	heard, err := conn.WaitForNotification(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if heard.Payload != "" || c.row("s1").State != "bound" {
		t.Errorf("heard %+v, want a ring without payload", heard)
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
}
