package bindings

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

func TestARosterIsMadeTrue(t *testing.T) {
	t.Parallel()
	const older = `UPDATE bindings SET bound_at = bound_at - interval '1 hour'`
	tests := map[string]struct {
		given   func(c *cell)
		listed  []string
		want    bindingRow // its revision is not compared
		fed     bool
		orphans []sandbox.ID
		holds   int64 // on a
	}{
		"what it lists and nobody has is adopted": {
			given: func(*cell) {}, listed: []string{"s"}, fed: true,
			want: bindingRow{State: sandbox.Bound, Node: "a", Incarnation: 1},
		},
		"what is bound here stays, and its hold ends": {
			given: func(c *cell) { c.mustRecord(on("a", "s")) }, listed: []string{"s"},
			want: bindingRow{State: sandbox.Bound, Node: "a", Incarnation: 1, CPUMillis: 500},
		},
		"what a live node has stays there": {
			given: func(c *cell) { c.mustRecord(on("b", "s")); c.exec(older) }, listed: []string{"s"},
			want: bindingRow{State: sandbox.Bound, Node: "b", Incarnation: 1, CPUMillis: 500},
		},
		"what a node has whose lease expired moves here, its tenant kept": {
			given: func(c *cell) {
				c.mustRecord(ofTenant("t1", on("b", "s")))
				c.exec(`UPDATE node_leases SET expires_at = clock_timestamp() - interval '1 second' WHERE node_id = 'b'`)
			}, listed: []string{"s"}, fed: true,
			want: bindingRow{State: sandbox.Bound, Node: "a", Incarnation: 2, CPUMillis: 500, Tenant: "t1"},
		},
		"what a node has that was never heard moves here": {
			given:  func(c *cell) { c.mustRecord(on("b", "s")); c.exec(`DELETE FROM node_leases WHERE node_id = 'b'`) },
			listed: []string{"s"}, fed: true,
			want: bindingRow{State: sandbox.Bound, Node: "a", Incarnation: 2, CPUMillis: 500},
		},
		"what was parked here comes back as the same incarnation": {
			given: func(c *cell) { c.mustRecord(on("a", "s")); c.park1("a") }, listed: []string{"s"}, fed: true,
			want: bindingRow{State: sandbox.Bound, Node: "a", Incarnation: 1, CPUMillis: 500},
		},
		"what was parked elsewhere comes as another incarnation": {
			given: func(c *cell) { c.mustRecord(on("b", "s")); c.park1("b") }, listed: []string{"s"}, fed: true,
			want: bindingRow{State: sandbox.Bound, Node: "a", Incarnation: 2, CPUMillis: 500},
		},
		"what was deleted is an orphan": {
			given: func(c *cell) {
				c.mustRecord(on("a", "s"))
				if _, err := c.Release(c.t.Context(), "s", 0); err != nil {
					c.t.Fatal(err)
				}
				c.exec(`UPDATE bindings SET ended_at = ended_at - interval '1 hour'`)
			}, listed: []string{"s"}, orphans: []sandbox.ID{"s"},
			want: bindingRow{State: sandbox.Gone, Node: "a", Incarnation: 1, CPUMillis: 500, EndedBy: "deleted"},
		},
		"what a roster ended a moment ago stays gone": {
			given: func(c *cell) { c.mustRecord(on("a", "s")); c.exec(older); c.mustReconcile("a") }, listed: []string{"s"},
			want: bindingRow{State: sandbox.Gone, Node: "a", Incarnation: 1, CPUMillis: 500, EndedBy: "roster"},
		},
		"what a roster ended long ago comes back": {
			given: func(c *cell) {
				c.mustRecord(on("a", "s"))
				c.exec(older)
				c.mustReconcile("a")
				c.exec(`UPDATE bindings SET ended_at = ended_at - interval '31 seconds'`)
			}, listed: []string{"s"}, fed: true,
			want: bindingRow{State: sandbox.Bound, Node: "a", Incarnation: 1, CPUMillis: 500},
		},
		"what it does not list is spared while it is young, and its hold with it": {
			given: func(c *cell) { c.mustRecord(on("a", "s")) }, holds: 1,
			want: bindingRow{State: sandbox.Bound, Node: "a", Incarnation: 1, CPUMillis: 500},
		},
		"what it does not list ends when it is old enough, and its hold with it": {
			given: func(c *cell) { c.mustRecord(on("a", "s")); c.exec(older) }, fed: true,
			want: bindingRow{State: sandbox.Gone, Node: "a", Incarnation: 1, CPUMillis: 500, EndedBy: "roster"},
		},
		"what it does not list is another node's to say": {
			given: func(c *cell) { c.mustRecord(on("b", "s")); c.exec(older) },
			want:  bindingRow{State: sandbox.Bound, Node: "b", Incarnation: 1, CPUMillis: 500},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			c.listNode("a", time.Hour)
			c.listNode("b", time.Hour)
			tt.given(c)
			var before int64
			if value[int64](c, `SELECT count(*) FROM bindings`) > 0 {
				before = c.row("s").Revision
			}
			feed := c.feed()

			out := c.mustReconcile("a", tt.listed...)

			got := c.row("s")
			if diff := cmp.Diff(tt.want, got, cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".Revision" }, cmp.Ignore())); diff != "" {
				t.Errorf("binding (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.orphans, out.Orphans); diff != "" {
				t.Errorf("orphans (-want +got):\n%s", diff)
			}
			wrote := c.feed() - feed
			if out.Fed != tt.fed || (wrote == 1) != tt.fed || wrote > 1 {
				t.Errorf("fed = %t with %d rows, want %t", out.Fed, wrote, tt.fed)
			}
			if grew := got.Revision > before; grew != tt.fed {
				t.Errorf("revision went from %d to %d, want it to grow only with a feed row", before, got.Revision)
			}
			if holds := c.holds("a"); holds != tt.holds {
				t.Errorf("holds on a = %d, want %d", holds, tt.holds)
			}
		})
	}
}

// park1 parks what is bound to n, as Unregister does.
func (c *cell) park1(n node.ID) {
	c.t.Helper()
	err := c.db.Tx(c.t.Context(), func(tx pgx.Tx) error {
		_, err := ParkNode(c.t.Context(), tx, n)
		return err
	})
	if err != nil {
		c.t.Fatalf("ParkNode(%s): %v", n, err)
	}
	c.exec(`DELETE FROM reservations WHERE node_id = $1`, n) // Unregister's part
}

// The grace is what saves a sandbox from a roster that was made before it: without it, it is lost.
func TestWithoutAGraceALateRosterEndsWhatWasJustRecorded(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		grace time.Duration
		want  sandbox.State
	}{
		"with the grace it stays":       {15 * time.Second, sandbox.Bound},
		"without the grace it is ended": {0, sandbox.Gone},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := DefaultConfig()
			cfg.Grace = tt.grace
			c := newCellWith(t, cfg)
			c.listNode("a", time.Hour)
			c.mustRecord(on("a", "s"))
			out := c.mustReconcile("a")
			if got := c.row("s").State; got != tt.want {
				t.Errorf("state = %s, want %s", got, tt.want)
			}
			if spared := out.RecheckIn > 0 && out.RecheckIn <= tt.grace; spared != (tt.want == sandbox.Bound) {
				t.Errorf("RecheckIn = %v, want the rest of the grace where it was spared", out.RecheckIn)
			}
		})
	}
}

// A holder's lease that is being renewed counts as live, though it looks expired to whoever reads it.
func TestASandboxStaysWithANodeThatIsJustComingBack(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.listNode("b", time.Hour)
	c.mustRecord(on("b", "s"))
	c.exec(`UPDATE node_leases SET expires_at = clock_timestamp() - interval '1 second' WHERE node_id = 'b'`)

	ctx := context.WithoutCancel(t.Context())
	renewing, err := c.owner.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = renewing.Rollback(ctx) }()
	if _, err := renewing.Exec(ctx, `UPDATE node_leases SET expires_at = clock_timestamp() + interval '1 hour' WHERE node_id = 'b'`); err != nil {
		t.Fatal(err)
	}
	out := c.mustReconcile("a", "s")
	if got := c.row("s").Node; got != "b" || out.Fed {
		t.Errorf("the sandbox is on %s (fed %t), want it left on b", got, out.Fed)
	}
	if out.RecheckIn == 0 {
		t.Error("RecheckIn = 0, want it judged again soon")
	}
	if err := renewing.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	c.mustReconcile("a", "s")
	if got := c.row("s").Node; got != "a" {
		t.Errorf("the renewal was undone, yet the sandbox is on %s, want a", got)
	}
}

func TestAPartialReportTouchesOnlyItsDelta(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.mustReconcile("a", "s1", "s2", "s3")
	c.exec(`UPDATE bindings SET bound_at = bound_at - interval '1 hour'`)
	roster, _ := node.NewRoster([]string{"s3", "s4"}, nil) // s2 went too, but nobody says so
	err := c.db.Tx(t.Context(), func(tx pgx.Tx) error {
		_, err := c.Reconcile(t.Context(), tx, Report{Node: "a", Roster: roster, Partial: true, Delta: []sandbox.ID{"s1", "s4"}})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	got := map[sandbox.ID]sandbox.State{}
	for _, id := range []sandbox.ID{"s1", "s2", "s3", "s4"} {
		got[id] = c.row(id).State
	}
	want := map[sandbox.ID]sandbox.State{"s1": sandbox.Gone, "s2": sandbox.Bound, "s3": sandbox.Bound, "s4": sandbox.Bound}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("states (-want +got):\n%s", diff)
	}
}

func TestAnIDThatWasForgottenReturnsWithAHigherRevision(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.mustReconcile("a", "s")
	ended, err := c.Release(t.Context(), "s", 0)
	if err != nil {
		t.Fatal(err)
	}
	c.exec(`UPDATE bindings SET ended_at = ended_at - interval '1 hour'`)
	if err := c.forgetGone(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := value[int64](c, `SELECT count(*) FROM bindings`); got != 0 {
		t.Fatalf("%d bindings, want the row forgotten", got)
	}
	c.mustReconcile("a", "s")
	if got := c.row("s").Revision; got <= int64(ended) {
		t.Errorf("revision = %d, want it above %d", got, ended)
	}
}

func TestSettleCountsWhatARosterChanged(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	out := c.mustReconcile("a", "s1", "s2")
	c.Settle(t.Context(), "a", out)
	if got := testutil.ToFloat64(c.metrics.changes.WithLabelValues("adopted")); got != 2 {
		t.Errorf("adopted = %v, want 2", got)
	}
	select {
	case <-c.bell.flag:
	default:
		t.Error("the bell was not asked to ring")
	}
	c.Settle(t.Context(), "a", c.mustReconcile("a", "s1", "s2"))
	select {
	case <-c.bell.flag:
		t.Error("the bell was asked to ring for a roster that changed nothing")
	default:
	}
}
