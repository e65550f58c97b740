package bindings

import (
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/node"
)

// Each replica has its own view of the nodes; the log has one event for each change.
func TestOneEventForANodeThatBecameUnhealthyOrWell(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	replicas := []*Bindings{c.Bindings, c.replica(), c.replica()}
	seen := []map[node.ID]bool{{}, {}, {}}
	c.listNode("a", time.Hour)
	c.listNode("b", time.Hour)
	pass := func() {
		t.Helper()
		var wg sync.WaitGroup
		for i, r := range replicas {
			wg.Go(func() {
				if err := r.noteHealth(t.Context(), seen[i]); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	var want []string
	for _, step := range []struct {
		what, sql string
		event     string
	}{
		{"both are well from the start", ``, ""},
		{"nothing changed", ``, ""},
		{"a is silent", `UPDATE node_leases SET expires_at = now() - interval '1 second' WHERE node_id = 'a'`, "node_unhealthy  "},
		{"a is still silent", ``, ""},
		{"a speaks", `UPDATE node_leases SET expires_at = now() + interval '1 hour'`, "node_well  "},
		{"a is silent again", `UPDATE node_leases SET expires_at = now() - interval '1 second' WHERE node_id = 'a'`, "node_unhealthy  "},
	} {
		if step.sql != "" {
			c.exec(step.sql)
		}
		pass()
		if step.event != "" {
			want = append(want, step.event)
		}
		if diff := cmp.Diff(want, c.kinds("a")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.what, diff)
		}
	}
	// A replica that starts knows nothing, and asks the log.
	replicas, seen = append(replicas, c.replica()), append(seen, map[node.ID]bool{})
	pass()
	if diff := cmp.Diff(want, c.kinds("a")); diff != "" {
		t.Errorf("a replica that starts (-want +got):\n%s", diff)
	}
	// What was missed while no scheduler was there is noted by the first that comes.
	c.exec(`UPDATE node_leases SET expires_at = now() + interval '1 hour'`)
	late := c.replica()
	if err := late.noteHealth(t.Context(), map[node.ID]bool{}); err != nil {
		t.Fatal(err)
	}
	pass()
	if diff := cmp.Diff(append(want, "node_well  "), c.kinds("a")); diff != "" {
		t.Errorf("after an outage (-want +got):\n%s", diff)
	}
	if got := c.kinds("b"); got != nil {
		t.Errorf("events of b %v, want none: it was well all the time", got)
	}
}

func TestAPassNotesHealthOnlyWhileHeartbeatsFlow(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", -time.Hour)
	c.listNode("b", time.Hour)
	c.exec(`UPDATE node_leases SET last_seen_at = now() - interval '1 minute'`) // nobody speaks: the database was away
	f := flow{since: time.Now().Add(-time.Hour)}
	if err := c.park(t.Context(), &f); err != nil {
		t.Fatal(err)
	}
	if got := c.kinds("a"); got != nil {
		t.Errorf("events %v while no heartbeats flow, want none", got)
	}
	c.exec(`UPDATE node_leases SET last_seen_at = now() WHERE node_id = 'b'`)
	f = flow{since: time.Now().Add(-time.Hour)}
	if err := c.park(t.Context(), &f); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"node_unhealthy  "}, c.kinds("a")); diff != "" {
		t.Errorf("once they flow (-want +got):\n%s", diff)
	}
}

func TestAConflictIsNotedOnceAMinuteByAllReplicasTogether(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	replicas := []*Bindings{c.Bindings, c.replica()}
	tell := func() {
		t.Helper()
		var wg sync.WaitGroup
		for i := range 6 {
			wg.Go(func() {
				if err := replicas[i%2].NoteSeldom(t.Context(), Event{Kind: KindConflict, Node: "a"}, time.Minute); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	tell()
	tell()
	if diff := cmp.Diff([]string{"node_conflict  "}, c.kinds("a")); diff != "" {
		t.Errorf("the log (-want +got):\n%s", diff)
	}
	if err := c.NoteSeldom(t.Context(), Event{Kind: KindConflict, Node: "b"}, time.Minute); err != nil {
		t.Fatal(err)
	}
	if got := c.kinds("b"); len(got) != 1 {
		t.Errorf("events of another node %v, want one", got)
	}
	if err := c.NoteSeldom(t.Context(), Event{Kind: KindConflict, Node: "a"}, 0); err != nil { // the minute is over
		t.Fatal(err)
	}
	if got := len(c.kinds("a")); got != 2 {
		t.Errorf("%d events a minute later, want 2", got)
	}
}
