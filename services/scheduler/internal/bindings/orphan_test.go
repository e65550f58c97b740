package bindings

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// orphansOf returns the rows of a node as sandbox, reason and holder.
func (c *cell) orphansOf(n node.ID) []string {
	c.t.Helper()
	list, err := c.ListOrphans(c.t.Context(), OrphanPage{Node: n, Limit: 100})
	if err != nil {
		c.t.Fatal(err)
	}
	var rows []string
	for _, o := range list {
		row := string(o.SandboxID) + " " + string(o.Reason)
		if o.HolderNodeID != nil {
			row += " " + string(*o.HolderNodeID)
		}
		rows = append(rows, row)
	}
	return rows
}

// kinds returns the log's events of a node as kind, effect and sandbox, in order.
func (c *cell) kinds(n node.ID) []string {
	c.t.Helper()
	rows, err := c.owner.Query(c.t.Context(), `SELECT kind || ' ' || effect || ' ' || sandbox_id FROM sandbox_events WHERE node_id = $1 ORDER BY event_id`, n)
	if err != nil {
		c.t.Fatal(err)
	}
	words, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		c.t.Fatal(err)
	}
	if len(words) == 0 {
		return nil
	}
	return words
}

func TestOrphansAreShownAndToldOnce(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.listNode("b", time.Hour)
	c.mustRecord(on("a", "held"))
	c.mustRecord(on("b", "deleted"))
	if _, err := c.Release(t.Context(), "deleted", 0); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		out := c.mustReconcile("b", "held", "deleted")
		if diff := cmp.Diff([]sandbox.ID{"deleted"}, out.Orphans); diff != "" {
			t.Errorf("what the node must end (-want +got):\n%s", diff)
		}
		c.Settle(t.Context(), "b", out)
	}
	if diff := cmp.Diff([]string{"deleted deleted", "held held_elsewhere a"}, c.orphansOf("b")); diff != "" {
		t.Errorf("orphans (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"gone deleted deleted", "orphan deleted deleted", "orphan held_elsewhere held"}, c.kinds("b")); diff != "" {
		t.Errorf("the log (-want +got):\n%s", diff)
	}
	if got := testutil.ToFloat64(c.metrics.events.WithLabelValues("orphan", "held_elsewhere")); got != 1 {
		t.Errorf("events_total{orphan,held_elsewhere} = %v, want 1", got)
	}
	if err := c.showOrphanCounts(t.Context()); err != nil {
		t.Fatal(err)
	}
	for reason, want := range map[OrphanReason]float64{OrphanDeleted: 1, OrphanHeld: 1, OrphanSuperseded: 0} {
		if got := testutil.ToFloat64(c.metrics.orphans.WithLabelValues(string(reason))); got != want {
			t.Errorf("orphans{reason=%s} = %v, want %v", reason, got, want)
		}
	}

	// Nobody writes a row again for its time alone, within a minute. After that it is touched.
	before := value[string](c, `SELECT string_agg(xmin::text, ' ' ORDER BY sandbox_id) FROM orphans`)
	c.mustReconcile("b", "held", "deleted")
	if got := value[string](c, `SELECT string_agg(xmin::text, ' ' ORDER BY sandbox_id) FROM orphans`); got != before {
		t.Error("an orphan that was seen a moment ago was written again")
	}
	c.exec(`UPDATE orphans SET first_seen_at = now() - interval '1 hour', last_seen_at = now() - interval '2 minutes'`)
	c.mustReconcile("b", "held")
	if got := value[string](c, `SELECT string_agg(sandbox_id, ' ') FROM orphans WHERE last_seen_at > now() - interval '1 minute' AND first_seen_at < now() - interval '59 minutes'`); got != "held" {
		t.Errorf("%q was touched, want held, which the roster lists", got)
	}

	// The holder's lease ends: the sandbox is here, and no orphan.
	c.exec(`UPDATE node_leases SET expires_at = now() - interval '1 second' WHERE node_id = 'a'`)
	c.mustReconcile("b", "held")
	if diff := cmp.Diff([]string{"deleted deleted"}, c.orphansOf("b")); diff != "" {
		t.Errorf("orphans after the move (-want +got):\n%s", diff)
	}

	// What no roster lists any more is shown for ten minutes.
	if err := c.forgetOrphans(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := len(c.orphansOf("b")); got != 1 {
		t.Errorf("%d orphans two minutes later, want 1", got)
	}
	c.exec(`UPDATE orphans SET last_seen_at = now() - interval '11 minutes'`)
	if err := c.forgetOrphans(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := len(c.orphansOf("b")); got != 0 {
		t.Errorf("%d orphans eleven minutes later, want none", got)
	}
}

func TestListsGoOnFromTheirLastRow(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.listNode("b", time.Hour)
	const each = 7
	c.exec(`INSERT INTO orphans (node_id, sandbox_id, reason) SELECT n, 's' || i, 'deleted' FROM unnest('{b,a}'::text[]) AS n, generate_series(1, $1::int) AS i`, each)
	var listed []string
	page := OrphanPage{Limit: 4}
	for {
		list, err := c.ListOrphans(t.Context(), page)
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range list {
			listed = append(listed, string(o.NodeID)+string(o.SandboxID))
			page.AfterNode, page.AfterSandbox = o.NodeID, o.SandboxID
		}
		if len(list) < page.Limit {
			break
		}
	}
	var want []string
	for _, n := range []string{"a", "b"} {
		for i := range each {
			want = append(want, fmt.Sprintf("%ss%d", n, i+1))
		}
	}
	if diff := cmp.Diff(want, listed); diff != "" {
		t.Errorf("orphans by pages (-want +got):\n%s", diff)
	}
	if list, err := c.ListOrphans(t.Context(), OrphanPage{Node: "a", Reason: OrphanHeld, Limit: 4}); err != nil || len(list) != 0 {
		t.Errorf("orphans of a that are held = %v, %v, want none", list, err)
	}

	// All events of one moment: only their numbers tell them apart.
	c.exec(`INSERT INTO sandbox_events (at, source, kind, node_id, sandbox_id, detail)
	        SELECT '2026-01-01 00:00:00.123456+00', 'node', CASE WHEN i % 2 = 0 THEN 'create' ELSE 'delete' END, 'a', 's' || i, '{"i": 1}' FROM generate_series(1, 9) AS i`)
	var got []string
	events := EventPage{Node: "a", Limit: 2}
	for {
		list, err := c.ListEvents(t.Context(), events)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range list {
			got = append(got, string(e.SandboxID))
			again, err := ParseEventCursor(e.Cursor().String())
			if err != nil || again.ID != e.EventID || !again.At.Equal(e.At) {
				t.Errorf("cursor %q is %+v, %v, want the event's place", e.Cursor(), again, err)
			}
			events.Before = again
		}
		if len(list) < events.Limit {
			break
		}
	}
	if diff := cmp.Diff([]string{"s9", "s8", "s7", "s6", "s5", "s4", "s3", "s2", "s1"}, got); diff != "" {
		t.Errorf("events by pages (-want +got):\n%s", diff)
	}
	for name, narrow := range map[string]struct {
		page EventPage
		want int
	}{
		"a kind": {EventPage{Kind: KindDelete, Limit: 99}, 5}, "a sandbox": {EventPage{Sandbox: "s3", Limit: 99}, 1},
		"a node": {EventPage{Node: "b", Limit: 99}, 0}, "all": {EventPage{Limit: 99}, 9},
	} {
		if list, err := c.ListEvents(t.Context(), narrow.page); err != nil || len(list) != narrow.want {
			t.Errorf("%s: %d events, %v, want %d", name, len(list), err, narrow.want)
		}
	}
}

func FuzzParseEventCursor(f *testing.F) {
	for _, s := range []string{"", "1-2", "1767225600000000-7", "-", "-1-2", "1-", "253402300799999999-9223372036854775807", "9223372036854775807-1", "1-2-3", " 1-2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		cursor, err := ParseEventCursor(s)
		if err != nil {
			if !errors.Is(err, ErrBadCursor) || cursor != (EventCursor{}) {
				t.Errorf("ParseEventCursor(%q) = %+v, %v, want the zero cursor and ErrBadCursor", s, cursor, err)
			}
			return
		}
		again, err := ParseEventCursor(cursor.String())
		if err != nil || !again.At.Equal(cursor.At) || again.ID != cursor.ID {
			t.Errorf("ParseEventCursor(%q) = %+v, which comes back as %+v, %v", s, cursor, again, err)
		}
	})
}
