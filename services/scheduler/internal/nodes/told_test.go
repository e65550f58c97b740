package nodes

import (
	"context"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
)

// told is one event of a sandbox that has a size.
func told(kind bindings.Kind, id sandbox.ID) bindings.Told {
	return bindings.Told{Kind: kind, Sandbox: id, Size: sandbox.Size{CPUMillis: 2000, MemoryBytes: 1 << 30}}
}

func tellingOf(n node.ID, instance string, events ...bindings.Told) Telling {
	return Telling{Node: n, Instance: instance, Events: events}
}

func (r *replica) mustTell(t *testing.T, telling Telling) {
	t.Helper()
	if err := r.Tell(t.Context(), telling); err != nil {
		t.Fatalf("Tell(%+v) = %v, want none", telling, err)
	}
}

// effects returns what the log says of a sandbox, as kind and effect, in order.
func (c *cell) effects(id sandbox.ID) []string {
	c.t.Helper()
	return all[string](c, `SELECT kind || ' ' || effect FROM sandbox_events WHERE sandbox_id = $1 ORDER BY event_id`, id)
}

// all reads the values of one column.
func all[T any](c *cell, sql string, args ...any) []T {
	c.t.Helper()
	rows, err := c.Query(c.t.Context(), sql, args...)
	if err != nil {
		c.t.Fatalf("%s: %v", sql, err)
	}
	defer rows.Close()
	var values []T
	for rows.Next() {
		var v T
		if err := rows.Scan(&v); err != nil {
			c.t.Fatalf("%s: %v", sql, err)
		}
		values = append(values, v)
	}
	if err := rows.Err(); err != nil {
		c.t.Fatalf("%s: %v", sql, err)
	}
	return values
}

// TestWhatANodeTells walks the table of scheduler.md 4.7: what becomes of the binding and of its hold.
func TestWhatANodeTells(t *testing.T) {
	t.Parallel()
	// Before an event, s is: …
	given := map[string]string{
		"unknown": ``,
		"bound here": `INSERT INTO bindings (sandbox_id, state, node_id, origin, incarnation, tenant_id) VALUES ('s', 'bound', 'a', 'recorded', 3, 't');
			INSERT INTO reservations (reservation_id, n, node_id, cpu_millis, memory_bytes, named, sandbox_id) VALUES (gen_random_uuid(), 1, 'a', 1, 1, true, 's')`,
		"bound elsewhere": `INSERT INTO bindings (sandbox_id, state, node_id, origin, incarnation, tenant_id) VALUES ('s', 'bound', 'b', 'recorded', 3, 't');
			INSERT INTO reservations (reservation_id, n, node_id, cpu_millis, memory_bytes, named, sandbox_id) VALUES (gen_random_uuid(), 1, 'b', 1, 1, true, 's')`,
		"bound to a dead node": `INSERT INTO bindings (sandbox_id, state, node_id, origin, incarnation, tenant_id) VALUES ('s', 'bound', 'b', 'recorded', 3, 't');
			UPDATE node_leases SET expires_at = now() - interval '1 hour' WHERE node_id = 'b'`,
		"parked":              `INSERT INTO bindings (sandbox_id, state, node_id, origin, incarnation, tenant_id, ended_at, ended_by) VALUES ('s', 'parked', 'b', 'recorded', 3, 't', now(), 'unregistered')`,
		"parked by its drain": `UPDATE nodes SET cordoned = true; INSERT INTO bindings (sandbox_id, state, node_id, origin, incarnation, tenant_id, ended_at, ended_by) VALUES ('s', 'parked', 'a', 'recorded', 3, 't', now(), 'drain')`,
		"gone by its roster":  `INSERT INTO bindings (sandbox_id, state, node_id, origin, incarnation, tenant_id, ended_at, ended_by) VALUES ('s', 'gone', 'a', 'recorded', 3, 't', now(), 'roster')`,
		"deleted":             `INSERT INTO bindings (sandbox_id, state, node_id, origin, incarnation, tenant_id, ended_at, ended_by) VALUES ('s', 'gone', 'a', 'recorded', 3, 't', now(), 'deleted')`,
	}
	const (
		none     = ""
		here     = "bound a 3 t, held on a"
		there    = "bound b 3 t, held on b"
		dead     = "bound b 3 t"
		arrived  = "bound a 1 , held on a"
		moved    = "bound a 4 t, held on a"
		returned = "bound a 3 t, held on a"
		parked   = "parked b 3 t"
		drained  = "parked a 3 t"
		lost     = "gone a 3 t"
	)
	type outcome struct{ effect, after string }
	binds := map[string]outcome{ // what creates, forks and resumes have in common
		"unknown": {"bound", arrived}, "bound elsewhere": {"orphan", there}, "bound to a dead node": {"orphan", dead},
		"parked": {"bound", moved}, "parked by its drain": {"ignored", drained}, "gone by its roster": {"bound", returned}, "deleted": {"deleted", lost},
	}
	with := func(outcomes map[string]outcome, here outcome) map[string]outcome {
		each := map[string]outcome{"bound here": here}
		maps.Copy(each, outcomes)
		return each
	}
	nothing := func(effect string) map[string]outcome {
		return map[string]outcome{
			"unknown": {effect, none}, "bound elsewhere": {effect, there}, "bound to a dead node": {effect, dead}, "parked": {effect, parked},
			"parked by its drain": {effect, drained}, "gone by its roster": {effect, lost}, "deleted": {effect, lost},
		}
	}
	tests := map[string]struct {
		event bindings.Told
		want  map[string]outcome
	}{
		"create":                        {told(bindings.KindCreate, "s"), with(binds, outcome{"already", here})},
		"fork":                          {told(bindings.KindFork, "s"), with(binds, outcome{"already", here})},
		"resume":                        {told(bindings.KindResume, "s"), with(binds, outcome{"noted", here})},
		"pause":                         {told(bindings.KindPause, "s"), with(nothing("ignored"), outcome{"noted", here})},
		"delete":                        {told(bindings.KindDelete, "s"), with(nothing("ignored"), outcome{"ended", lost})},
		"delete of this incarnation":    {bindings.Told{Kind: bindings.KindDelete, Sandbox: "s", Incarnation: 3}, with(nothing("ignored"), outcome{"ended", lost})},
		"delete of another incarnation": {bindings.Told{Kind: bindings.KindDelete, Sandbox: "s", Incarnation: 2}, with(nothing("ignored"), outcome{"ignored", here})},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			r := c.replica()
			r.must(t, beatOf("a", "i1", endpointA))
			r.must(t, beatOf("b", "i1", endpointB))
			for state, sql := range given {
				t.Run(state, func(t *testing.T) {
					c.exec(`DELETE FROM bindings; DELETE FROM reservations; DELETE FROM orphans; UPDATE nodes SET cordoned = false;
						UPDATE node_leases SET expires_at = now() + interval '1 hour'`)
					c.exec(sql)
					fed := value[int64](c, `SELECT count(*) FROM route_feed`)
					r.mustTell(t, tellingOf("a", "i1", tt.event))
					want := tt.want[state]
					const afterSQL = `SELECT COALESCE((SELECT b.state || ' ' || b.node_id || ' ' || b.incarnation || ' ' || b.tenant_id || COALESCE(', held on ' || r.node_id, '')
						FROM bindings AS b LEFT JOIN reservations AS r ON r.sandbox_id = b.sandbox_id), '')`
					if got := value[string](c, afterSQL); got != want.after {
						t.Errorf("s is %q, want %q", got, want.after)
					}
					effect := value[string](c, `SELECT effect FROM sandbox_events WHERE source = 'node' ORDER BY event_id DESC LIMIT 1`)
					if effect != want.effect {
						t.Errorf("effect = %q, want %q", effect, want.effect)
					}
					changed := int64(0)
					if effect == "bound" || effect == "ended" {
						changed = 1
					}
					if got := value[int64](c, `SELECT count(*) FROM route_feed`) - fed; got != changed {
						t.Errorf("%d feed rows, want %d", got, changed)
					}
					orphans := int64(0)
					if effect == "orphan" {
						orphans = 1
					}
					if got := value[int64](c, `SELECT count(*) FROM orphans WHERE node_id = 'a' AND sandbox_id = 's' AND reason = 'held_elsewhere' AND holder_node_id = 'b'`); got != orphans {
						t.Errorf("%d rows of orphans, want %d", got, orphans)
					}
				})
			}
		})
	}
}

func TestAnEventActsOnlyForTheInstanceThatHoldsTheLease(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA))
	c.exec(`INSERT INTO nodes (node_id, endpoint, source) VALUES ('mute', 'http://10.0.0.7:1', 'registered')`)
	tests := map[string]struct {
		before string
		tell   Telling
		want   []string
	}{
		"its own":           {"", tellingOf("a", "i1", told(bindings.KindCreate, "own")), []string{"create bound"}},
		"another instance":  {"", tellingOf("a", "i0", told(bindings.KindCreate, "other")), []string{"create stale_instance"}},
		"no instance":       {"", tellingOf("a", "", told(bindings.KindCreate, "nobodys")), []string{"create stale_instance"}},
		"a node never seen": {"", tellingOf("mute", "i1", told(bindings.KindCreate, "early")), []string{"create stale_instance"}},
		"an expired lease":  {`UPDATE node_leases SET expires_at = now() - interval '1 second'`, tellingOf("a", "i1", told(bindings.KindCreate, "late")), []string{"create stale_instance"}},
		"an ended lease": {
			`UPDATE node_leases SET expires_at = now() + interval '1 hour', ended_at = now()`,
			tellingOf("a", "i1", told(bindings.KindDelete, "own")),
			[]string{"create bound", "delete stale_instance"},
		},
		"an unknown node": {"", tellingOf("nobody", "i1", told(bindings.KindCreate, "unknown")), nil},
		"no node at all":  {"", tellingOf("", "i1", told(bindings.KindCreate, "blank")), nil},
	}
	for _, name := range []string{
		"its own", "another instance", "no instance", "a node never seen", "an expired lease", "an ended lease", "an unknown node", "no node at all",
	} {
		tt := tests[name]
		if tt.before != "" {
			c.exec(tt.before)
		}
		r.mustTell(t, tt.tell)
		if diff := cmp.Diff(tt.want, c.effects(tt.tell.Events[0].Sandbox)); diff != "" {
			t.Errorf("%s: the log (-want +got):\n%s", name, diff)
		}
	}
	if got := value[int64](c, `SELECT count(*) FROM bindings`); got != 1 {
		t.Errorf("%d bindings, want the one of the instance that held the lease", got)
	}
}

func TestAnEventWhoseSeqIsNotAboveTheLastDoesNotActAgain(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	replicas := []*replica{c.replica(), c.replica()}
	replicas[0].must(t, beatOf("a", "i1", endpointA))
	numbered := func(kind bindings.Kind, seq int64) bindings.Told {
		e := told(kind, "s")
		e.Seq = seq
		return e
	}
	for i, events := range [][]bindings.Told{
		{numbered(bindings.KindCreate, 5), numbered(bindings.KindDelete, 6)},
		{numbered(bindings.KindCreate, 5), numbered(bindings.KindDelete, 6)}, // the whole batch again, to another replica
		{numbered(bindings.KindCreate, 4)},                                   // backwards
		{numbered(bindings.KindCreate, 8), numbered(bindings.KindDelete, 7)}, // disordered
		{told(bindings.KindPause, "s")},                                      // without a number, as AgentENV's nodes tell
	} {
		replicas[i%2].mustTell(t, tellingOf("a", "i1", events...))
	}
	want := []string{
		"create bound", "delete ended", "create repeated", "delete repeated", "create repeated", "create bound", "delete repeated", "pause noted",
	}
	if diff := cmp.Diff(want, c.effects("s")); diff != "" {
		t.Errorf("the log (-want +got):\n%s", diff)
	}
	if got := value[int64](c, `SELECT event_seq FROM node_leases`); got != 8 {
		t.Errorf("event_seq = %d, want 8", got)
	}
	replicas[0].must(t, beatOf("a", "i1", endpointA, "s")) // a roster keeps it
	if got := value[int64](c, `SELECT event_seq FROM node_leases`); got != 8 {
		t.Errorf("after a heartbeat event_seq = %d, want 8", got)
	}
	replicas[1].must(t, beatOf("a", "i2", endpointA, "s")) // a new process counts anew
	replicas[1].mustTell(t, tellingOf("a", "i2", numbered(bindings.KindDelete, 1)))
	if got := c.bindings()["s"].EndedBy; got != "event" {
		t.Errorf("the first event of a new process: ended by %q, want event", got)
	}
}

func TestEventsOfOneSandboxInOneBatchActInTheirOrder(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA))
	r.mustTell(t, tellingOf("a", "i1",
		told(bindings.KindDelete, "s"), told(bindings.KindCreate, "s"), told(bindings.KindFork, "child"), told(bindings.KindPause, "s"),
		told(bindings.KindDelete, "s"), told(bindings.KindResume, "s"), told(bindings.KindResume, "s"), told(bindings.KindDelete, "child")))
	want := []string{"delete ignored", "create bound", "pause noted", "delete ended", "resume bound", "resume noted"}
	if diff := cmp.Diff(want, c.effects("s")); diff != "" {
		t.Errorf("the log of s (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"fork bound", "delete ended"}, c.effects("child")); diff != "" {
		t.Errorf("the log of child (-want +got):\n%s", diff)
	}
	if got, want := c.bindings()["s"].State, sandbox.Bound; got != want {
		t.Errorf("s is %s, want %s", got, want)
	}
	if got := all[string](c, `SELECT sandbox_id FROM reservations ORDER BY sandbox_id`); !cmp.Equal(got, []string{"s"}) {
		t.Errorf("holds of %v, want s alone", got)
	}
	if got := value[int64](c, `SELECT count(*) FROM route_feed WHERE kind = 'binding'`); got != 5 {
		t.Errorf("%d feed rows of bindings, want one for each change", got)
	}
}

func TestAForksChildrenAreRoutableBeforeAnyRecord(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r, other := c.replica(), c.replica()
	r.must(t, beatOf("a", "i1", endpointA, "parent"))
	const children = 450 // more than one transaction takes
	var events []bindings.Told
	for i := range children {
		events = append(events, told(bindings.KindFork, sandbox.ID(fmt.Sprintf("child-%03d", i))))
	}
	r.mustTell(t, tellingOf("a", "i1", events...))
	for _, i := range []int{0, toldBatch - 1, toldBatch, children - 1} {
		found, err := other.routes.Lookup(t.Context(), sandbox.ID(fmt.Sprintf("child-%03d", i)))
		if err != nil || found.Node != "a" || found.Endpoint != endpointA {
			t.Errorf("Lookup of child %d = %+v, %v, want it on a", i, found, err)
		}
	}
	if got := value[int64](c, `SELECT count(*) FROM reservations WHERE node_id = 'a' AND cpu_millis = 2000 AND sandbox_id LIKE 'child-%'`); got != children {
		t.Errorf("%d children are held at their size, want %d", got, children)
	}
	ids := []string{"parent"}
	for _, e := range events {
		ids = append(ids, string(e.Sandbox))
	}
	r.must(t, beatOf("a", "i1", endpointA, ids...))
	if got := value[int64](c, `SELECT count(*) FROM reservations`); got != 0 {
		t.Errorf("%d holds after the roster lists them, want none: the report counts them", got)
	}
}

// An old roster after an event, and events after a roster: the end is what the rosters say.
func TestRostersHaveTheLastWordOverEvents(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	cfg, routeCfg := patient()
	r := c.replicaWith(cfg, routeCfg)
	r.must(t, beatOf("a", "i1", endpointA))
	r.mustTell(t, tellingOf("a", "i1", told(bindings.KindCreate, "phantom"), told(bindings.KindCreate, "real")))
	r.must(t, beatOf("a", "i1", endpointA, "real")) // the roster was made before the event was heard
	if got := c.bindings()["phantom"].State; got != sandbox.Bound {
		t.Errorf("phantom is %s within the grace, want it bound: the roster may be older than the event", got)
	}
	if got := value[int64](c, `SELECT count(*) FROM reservations WHERE sandbox_id = 'phantom'`); got != 1 {
		t.Errorf("%d holds of phantom within the grace, want 1", got)
	}
	c.exec(`UPDATE bindings SET bound_at = bound_at - interval '1 minute'; UPDATE node_leases SET reconcile_due = '-infinity'`)
	r.must(t, beatOf("a", "i1", endpointA, "real"))
	want := map[sandbox.ID]bindingRow{
		"phantom": {"phantom", sandbox.Gone, "a", 1, "roster"},
		"real":    {"real", sandbox.Bound, "a", 1, ""},
	}
	if diff := cmp.Diff(want, c.bindings()); diff != "" {
		t.Errorf("bindings (-want +got):\n%s", diff)
	}
	if got := value[int64](c, `SELECT count(*) FROM reservations`); got != 0 {
		t.Errorf("%d holds are left, want none", got)
	}
	r.mustTell(t, tellingOf("a", "i1", told(bindings.KindDelete, "real")))
	r.must(t, beatOf("a", "i1", endpointA, "real")) // made before the delete
	if got := c.bindings()["real"].State; got != sandbox.Gone {
		t.Errorf("an old roster after an end: real is %s, want it gone", got)
	}
}

// A telling waits for no heartbeat's sake for ever, and its caller may leave.
func TestATellingEndsWithItsCaller(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA))
	for range cap(r.telling) {
		r.telling <- struct{}{}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := r.Tell(ctx, tellingOf("a", "i1", told(bindings.KindCreate, "s"))); err == nil {
		t.Error("Tell = nil while all places are taken, want its caller's end")
	}
	for range cap(r.telling) {
		<-r.telling
	}
	r.mustTell(t, tellingOf("a", "i1", told(bindings.KindCreate, "s")))
}
