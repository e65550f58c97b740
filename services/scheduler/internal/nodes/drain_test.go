package nodes

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
)

func TestWhatBecomesOfADrain(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		state   DrainState
		mode    DrainMode
		left    bindings.Left
		overdue bool
		want    DrainState
		parks   bool
	}{
		"closing waits for a hold":                         {Closing, Wait, bindings.Left{Bound: 1, Holds: 1}, false, Closing, false},
		"closing ends with the last hold":                  {Closing, Wait, bindings.Left{Bound: 1}, false, Draining, false},
		"closing ends on a node with nothing":              {Closing, Park, bindings.Left{}, true, Draining, false},
		"draining waits for a sandbox":                     {Draining, Wait, bindings.Left{Bound: 1}, false, Draining, false},
		"draining ends with the last sandbox":              {Draining, Move, bindings.Left{}, false, Done, false},
		"nothing is left at the deadline":                  {Draining, Wait, bindings.Left{}, true, Done, false},
		"a hold that came late is waited for":              {Draining, Wait, bindings.Left{Holds: 1}, false, Draining, false},
		"waiting expires at the deadline":                  {Draining, Wait, bindings.Left{Bound: 1}, true, Expired, false},
		"moving expires at the deadline":                   {Draining, Move, bindings.Left{Bound: 1}, true, Expired, false},
		"waiting expires while it closes":                  {Closing, Wait, bindings.Left{Holds: 1}, true, Expired, false},
		"parking parks at the deadline":                    {Draining, Park, bindings.Left{Bound: 1}, true, Done, true},
		"parking parks at the deadline while it closes":    {Closing, Park, bindings.Left{Bound: 1, Holds: 1}, true, Done, true},
		"parking waits for the deadline like any other":    {Draining, Park, bindings.Left{Bound: 1}, false, Draining, false},
		"parking without anything left is done without it": {Draining, Park, bindings.Left{}, true, Done, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, parks := tt.state.next(tt.mode, tt.left, tt.overdue)
			if got != tt.want || parks != tt.parks {
				t.Errorf("%s.next(%s, %+v, %t) = %s, %t, want %s, %t", tt.state, tt.mode, tt.left, tt.overdue, got, parks, tt.want, tt.parks)
			}
		})
	}
}

// hold promises room on a node to a create whose id is drawn, and returns its reservation.
func (c *cell) hold(n, drawn string) string {
	c.t.Helper()
	return value[string](c, `
WITH placed AS (
     INSERT INTO placements (tenant_id, outcome, node_id, reservation_id, sandbox_ids, cpu_millis, memory_bytes, strategy)
     VALUES ('t1', 'reserved', $1, gen_random_uuid(), ARRAY[$2], 500, 64, 'best_of_k') RETURNING placement_id, reservation_id)
INSERT INTO reservations (reservation_id, n, placement_id, node_id, tenant_id, cpu_millis, memory_bytes, named, expires_at)
SELECT reservation_id, 1, placement_id, $1, 't1', 500, 64, true, now() + interval '1 hour' FROM placed RETURNING reservation_id::text`, n, drawn)
}

// start starts a drain that must start.
func (r *replica) start(t *testing.T, o DrainOrder) Drain {
	t.Helper()
	o.Reason, o.RequestedBy = "kernel", "ann@ops"
	if o.Mode == "" {
		o.Mode = Wait
	}
	d, err := r.StartDrain(t.Context(), o)
	if err != nil {
		t.Fatalf("StartDrain(%+v) = %v", o, err)
	}
	return d
}

// pass runs one pass of the loop, which must come out at want.
func (r *replica) pass(t *testing.T, id int64, want DrainState) Drain {
	t.Helper()
	if err := r.advanceDrains(t.Context()); err != nil {
		t.Fatalf("a pass over the drains: %v", err)
	}
	d, err := r.Drain(t.Context(), id, "")
	if err != nil || d.State != want {
		t.Fatalf("drain %d after a pass is %s with %+v left (%v), want %s", id, d.State, d.Left, err, want)
	}
	return d
}

func (r *replica) knownNode(t *testing.T, id node.ID) Known {
	t.Helper()
	k, err := r.GetKnown(t.Context(), id)
	if err != nil {
		t.Fatalf("GetKnown(%s) = %v", id, err)
	}
	return k
}

func TestADrainClosesWaitsForWhatWasPromisedAndThenForWhatIsThere(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r, other := c.replica(), c.replica() // each pass is another replica's: the row says where it was
	r.must(t, beatOf("a", "i1", endpointA, "s1"))
	reservation := c.hold("a", "drawn")

	d := r.start(t, DrainOrder{Node: "a"})
	if d.State != Closing || d.Total != 2 || d.Left != (bindings.Left{Bound: 1, Holds: 1}) || d.DeadlineAt != nil || d.RequestedBy != "ann@ops" {
		t.Errorf("StartDrain = %+v", d)
	}
	if answer := r.must(t, beatOf("a", "i1", endpointA, "s1")); !answer.Cordoned || !answer.Draining {
		t.Errorf("the node is told %+v, want that it is cordoned and drained", answer)
	}
	if k := r.knownNode(t, "a"); k.Standing != "lingering" || !k.Cordoned || k.CordonReason != "kernel" || k.DrainID != d.ID {
		t.Errorf("the node is %+v, want it lingering", k)
	}
	var names []string
	for _, b := range r.pass(t, d.ID, Closing).Blockers {
		names = append(names, fmt.Sprintf("%s %t %q %t", b.SandboxID, b.Hold, b.TenantID, b.Since.IsZero()))
	}
	if diff := cmp.Diff([]string{`drawn true "t1" false`, `s1 false "" false`}, names); diff != "" {
		t.Errorf("blockers (-want +got):\n%s", diff)
	}

	// What was promised room may come, and becomes a blocker of the other sort.
	_, err := r.routes.Record(t.Context(), bindings.Assignment{
		Sandboxes: []sandbox.ID{"drawn"}, Node: "a", Endpoint: endpointA, ReservationID: reservation, Tenant: "t1",
	})
	if err != nil {
		t.Fatalf("Record of a create that was under way: %v", err)
	}
	if d := other.pass(t, d.ID, Draining); d.Left != (bindings.Left{Bound: 2}) || d.Total != 2 {
		t.Errorf("draining with %+v of %d left, want 2 sandboxes", d.Left, d.Total)
	}
	if found, err := r.routes.Lookup(t.Context(), "s1"); err != nil || found.Node != "a" || found.Status != node.Lingering {
		t.Errorf("Lookup during the drain = %+v, %v, want the route as before", found, err)
	}
	for i, id := range []sandbox.ID{"s1", "drawn"} {
		if d := other.pass(t, d.ID, Draining); d.Left.Bound != 2-i {
			t.Errorf("%d left, want %d", d.Left.Bound, 2-i)
		}
		if _, err := r.routes.Release(t.Context(), id, 0); err != nil {
			t.Fatal(err)
		}
	}
	if d := r.pass(t, d.ID, Done); d.EndedAt == nil || d.Left.All() != 0 || d.Total != 2 || len(d.Blockers) != 0 {
		t.Errorf("the end = %+v", d)
	}
	if answer := r.must(t, beatOf("a", "i1", endpointA)); !answer.Cordoned || answer.Draining {
		t.Errorf("the drained node is told %+v, want that it is cordoned only", answer)
	}
	if err := r.Uncordon(t.Context(), "a"); err != nil {
		t.Errorf("Uncordon = %v", err)
	}
	if k := r.knownNode(t, "a"); k.Standing != "ready" || k.CordonReason != "" {
		t.Errorf("the node is %+v, want it ready", k)
	}
	if _, err := r.CancelDrain(t.Context(), d.ID, ""); !errors.Is(err, node.ErrDrainEnded) {
		t.Errorf("CancelDrain of a drain that is done = %v, want %v", err, node.ErrDrainEnded)
	}
	const told = `SELECT string_agg(kind || ' ' || effect, ', ' ORDER BY event_id) FROM sandbox_events WHERE node_id = 'a' AND kind ~ 'drain|cordon'`
	if got, want := value[string](c, told), "node_drain closing, node_drain draining, node_drain done, node_uncordoned "; got != want {
		t.Errorf("events = %q, want %q", got, want)
	}
	if err := r.showDrains(t.Context()); err != nil || testutil.ToFloat64(r.metrics.drains.WithLabelValues("done")) != 1 {
		t.Errorf("drains{state=done} = %v, %v, want 1", testutil.ToFloat64(r.metrics.drains.WithLabelValues("done")), err)
	}
}

// The process's clock has no say: the order said an hour, and the database's clock says that it is over.
func TestADeadlineIsJudgedByTheDatabasesClock(t *testing.T) {
	t.Parallel()
	for mode, want := range map[DrainMode]DrainState{Wait: Expired, Move: Expired, Park: Done} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			r := c.replica()
			r.must(t, beatOf("a", "i1", endpointA, "s1"))
			c.hold("a", "drawn")
			d := r.start(t, DrainOrder{Node: "a", Mode: mode, Deadline: time.Hour})
			if left := d.DeadlineAt.Sub(d.AsOf); left <= 0 || left > time.Hour {
				t.Errorf("%v until the deadline, want up to an hour", left)
			}
			r.pass(t, d.ID, Closing)
			feed := c.feed()
			c.exec(`UPDATE drains SET deadline_at = clock_timestamp()`)
			d = r.pass(t, d.ID, want)

			parked := mode == Park
			if got := c.bindings()["s1"]; (got.State == sandbox.Parked && got.EndedBy == "drain") != parked {
				t.Errorf("binding after the deadline = %+v, want it parked: %t", got, parked)
			}
			if holds := value[int64](c, `SELECT count(*) FROM reservations`); (holds == 0) != parked {
				t.Errorf("%d holds after the deadline, want none: %t", holds, parked)
			}
			if got := value[string](c, `SELECT outcome FROM placements`); (got == "released") != parked {
				t.Errorf("the placement is %s, want it released: %t", got, parked)
			}
			if fed := c.feed() - feed; (fed == 1) != parked {
				t.Errorf("%d feed rows at the deadline, want one: %t", fed, parked)
			}
			r.must(t, beatOf("a", "i1", endpointA, "s1", "newer"))
			if again, err := r.Drain(t.Context(), 0, "a"); err != nil || len(again.Blockers) != d.Left.All() || again.Left != d.Left {
				t.Errorf("looked at again: %+v, %v, want what was in the way at the end", again, err)
			}
			if wantLeft := map[bool]int{true: 0, false: 2}[parked]; d.Left.All() != wantLeft {
				t.Errorf("%d left at the end, want %d", d.Left.All(), wantLeft)
			}
			if k := r.knownNode(t, "a"); !k.Cordoned || k.DrainID != 0 {
				t.Errorf("the node is %+v, want it cordoned without a drain", k)
			}
		})
	}
}

func TestACanceledDrainLeavesTheNodeAsItWas(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		before, during bool // who cordons
		want           bool
	}{
		"open before":                {false, false, false},
		"cordoned before":            {true, false, true},
		"cordoned during the drain":  {false, true, true},
		"cordoned before and during": {true, true, true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			r := c.replica()
			r.must(t, beatOf("a", "i1", endpointA, "s1"))
			cordon := func(is bool) {
				if !is {
					return
				}
				if err := r.Cordon(t.Context(), "a", "disk"); err != nil {
					t.Fatal(err)
				}
			}
			cordon(tt.before)
			d := r.start(t, DrainOrder{Node: "a"})
			cordon(tt.during)
			if err := r.Uncordon(t.Context(), "a"); !errors.Is(err, node.ErrDraining) {
				t.Errorf("Uncordon during a drain = %v, want %v", err, node.ErrDraining)
			}
			for range 2 { // it may repeat
				got, err := r.CancelDrain(t.Context(), 0, "a")
				if err != nil || got.ID != d.ID || got.State != Canceled || got.Left.All() != 1 {
					t.Errorf("CancelDrain = %+v, %v", got, err)
				}
			}
			wantReason := map[bool]string{true: "disk"}[tt.want]
			if k := r.knownNode(t, "a"); k.Cordoned != tt.want || k.DrainID != 0 || k.CordonReason != wantReason {
				t.Errorf("the node is %+v, want it cordoned for %q: %t", k, wantReason, tt.want)
			}
			if got := c.bindings()["s1"].State; got != sandbox.Bound {
				t.Errorf("the sandbox is %s, want it bound", got)
			}
			if next := r.start(t, DrainOrder{Node: "a"}); next.ID == d.ID || next.WasCordoned != tt.want {
				t.Errorf("the next drain = %+v, want a new one", next)
			}
		})
	}
}

func TestOfManyWhoStartADrainOneDoesAndTheOthersAreToldWhich(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	replicas := []*replica{c.replica(), c.replica()}
	replicas[0].must(t, beatOf("a", "i1", endpointA, "s1"))
	var (
		mu      sync.Mutex
		started []int64
		open    []int64
		callers sync.WaitGroup
	)
	for i := range 8 {
		callers.Go(func() {
			d, err := replicas[i%2].StartDrain(t.Context(), DrainOrder{Node: "a", Mode: Wait, RequestedBy: "o"})
			mu.Lock()
			defer mu.Unlock()
			if other, ok := errors.AsType[*node.DrainOpen](err); ok {
				open = append(open, other.ID)
				return
			}
			if err != nil {
				t.Errorf("StartDrain = %v", err)
			}
			started = append(started, d.ID)
		})
	}
	callers.Wait()
	if len(started) != 1 || len(open) != 7 {
		t.Fatalf("%v started and %v were refused, want one and seven", started, open)
	}
	for _, id := range open {
		if id != started[0] {
			t.Errorf("a refusal names drain %d, want %d", id, started[0])
		}
	}
}

// What a drain parked stays parked while its node is cordoned, whatever the node lists and however long. It
// comes back with another node that lists it, or once its node is open again.
func TestWhatADrainParkedComesBackElsewhereOrWhenTheNodeOpens(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	here := beatOf("a", "i1", endpointA, "s1", "s2")
	r.must(t, here)
	d := r.start(t, DrainOrder{Node: "a", Mode: Park, Deadline: time.Hour})
	c.exec(`UPDATE drains SET deadline_at = clock_timestamp()`)
	r.pass(t, d.ID, Done)

	c.exec(`UPDATE node_leases SET reconcile_due = '-infinity'`) // all is compared, and still:
	r.must(t, here)
	for _, id := range []sandbox.ID{"s1", "s2"} {
		if got := c.bindings()[id]; got.State != sandbox.Parked || got.EndedBy != "drain" {
			t.Errorf("%s while its node is cordoned = %+v, want it parked", id, got)
		}
	}
	r.must(t, beatOf("b", "i1", endpointB, "s1"))
	if got := c.bindings()["s1"]; got.State != sandbox.Bound || got.Node != "b" || got.Incarnation != 2 {
		t.Errorf("s1 on another node = %+v, want it bound there", got)
	}
	c.exec(`UPDATE bindings SET ended_at = now() - interval '1 hour' WHERE state = 'parked'`)
	if err := r.Uncordon(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if young := value[bool](c, `SELECT ended_at > now() - interval '1 minute' FROM bindings WHERE sandbox_id = 's2'`); !young {
		t.Error("what was parked counts as parked long ago, and may be forgotten before its node's next heartbeat")
	}
	r.must(t, here)
	if got := c.bindings()["s2"]; got.State != sandbox.Bound || got.Node != "a" || got.Incarnation != 1 {
		t.Errorf("s2 on its open node = %+v, want it bound there as it was", got)
	}
}

func TestADrainOutlivesItsNodesProcesses(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA, "s1"))
	d := r.start(t, DrainOrder{Node: "a"})
	r.pass(t, d.ID, Draining)

	if answer := r.must(t, beatOf("a", "i2", endpointA, "s1")); answer.Epoch != 2 || !answer.Draining {
		t.Errorf("a restarted node is told %+v, want that it is drained still", answer)
	}
	r.pass(t, d.ID, Draining)
	if err := r.Unregister(t.Context(), "a", "i2"); err != nil {
		t.Fatal(err)
	}
	r.pass(t, d.ID, Done) // nothing is bound to it
	if answer := r.must(t, beatOf("a", "i3", endpointA, "s1")); !answer.Cordoned || answer.Draining {
		t.Errorf("a node that came back is told %+v, want that it is cordoned still", answer)
	}
	if got := c.bindings()["s1"]; got.State != sandbox.Bound || got.Node != "a" {
		t.Errorf("its sandbox = %+v, want it bound again, for only a drain's parking is on purpose", got)
	}
}

func TestOrdersAboutNodesThatAreNotThere(t *testing.T) {
	t.Parallel()
	r := newCell(t).replica()
	for name, tt := range map[string]struct {
		do   func() error
		want error
	}{
		"cordon":              {func() error { return r.Cordon(t.Context(), "x", "") }, node.ErrUnknown},
		"uncordon":            {func() error { return r.Uncordon(t.Context(), "x") }, node.ErrUnknown},
		"remove":              {func() error { return r.Remove(t.Context(), "x") }, node.ErrUnknown},
		"drain":               {func() error { _, err := r.StartDrain(t.Context(), DrainOrder{Node: "x", Mode: Wait}); return err }, node.ErrUnknown},
		"look at a drain":     {func() error { _, err := r.Drain(t.Context(), 7, ""); return err }, node.ErrNoDrain},
		"look at its drain":   {func() error { _, err := r.Drain(t.Context(), 0, "x"); return err }, node.ErrNoDrain},
		"cancel its drain":    {func() error { _, err := r.CancelDrain(t.Context(), 0, "x"); return err }, node.ErrNoDrain},
		"look at it":          {func() error { _, err := r.GetKnown(t.Context(), "x"); return err }, node.ErrUnknown},
		"list its drains: ok": {func() error { _, err := r.ListDrains(t.Context(), DrainList{Node: "x", Limit: 1}); return err }, nil},
	} {
		if err := tt.do(); !errors.Is(err, tt.want) {
			t.Errorf("%s = %v, want %v", name, err, tt.want)
		}
	}
}

func TestDrainsAreListedNewestFirstAndForgottenLate(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA, "s1"))
	r.must(t, beatOf("b", "i1", endpointB))
	first := r.start(t, DrainOrder{Node: "a"})
	if _, err := r.CancelDrain(t.Context(), first.ID, ""); err != nil {
		t.Fatal(err)
	}
	r.start(t, DrainOrder{Node: "b"})
	r.start(t, DrainOrder{Node: "a"})
	list := func(l DrainList) string {
		t.Helper()
		l.Limit = max(l.Limit, 10)
		drains, err := r.ListDrains(t.Context(), l)
		if err != nil {
			t.Fatal(err)
		}
		var texts []string
		for _, d := range drains {
			texts = append(texts, fmt.Sprint(d.Node, " ", d.State, " ", d.Left.All(), "/", d.Total))
		}
		return strings.Join(texts, ", ")
	}
	for name, tt := range map[string]struct {
		ask  DrainList
		want string
	}{
		"all":                   {DrainList{}, "a closing 1/1, b closing 0/0, a canceled 1/1"},
		"open ones":             {DrainList{Open: true}, "a closing 1/1, b closing 0/0"},
		"a node's":              {DrainList{Node: "a"}, "a closing 1/1, a canceled 1/1"},
		"those before the last": {DrainList{Before: first.ID + 2}, "b closing 0/0, a canceled 1/1"},
	} {
		if got := list(tt.ask); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
	c.exec(`UPDATE drains SET ended_at = now() - interval '91 days' WHERE ended_at IS NOT NULL`)
	if err := r.forgetDrains(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, want := list(DrainList{}), "a closing 1/1, b closing 0/0"; got != want {
		t.Errorf("after a quarter: %q, want %q", got, want)
	}
}

// A whole cluster may be drained at once: those that began first have their deadlines too.
func TestEveryOpenDrainMovesOnHoweverManyThereAre(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	c.exec(`INSERT INTO nodes (node_id, endpoint, source, cordoned)
	        SELECT 'n' || i, 'http://10.0.0.1:' || i, 'registered', true FROM generate_series(1, $1::int) AS i`, drainsAtOnce+1)
	// All but the first wait for a sandbox, and have no deadline.
	c.exec(`INSERT INTO bindings (sandbox_id, state, node_id, origin)
	        SELECT 's' || i, 'bound', 'n' || i, 'recorded' FROM generate_series(2, $1::int) AS i`, drainsAtOnce+1)
	c.exec(`INSERT INTO drains (node_id, state, mode, reason, requested_by, was_cordoned, total)
	        SELECT 'n' || i, 'draining', 'wait', '', 'op', false, 1 FROM generate_series(1, $1::int) AS i ORDER BY i`, drainsAtOnce+1)
	c.exec(`UPDATE nodes AS n SET drain_id = d.drain_id FROM drains AS d WHERE d.node_id = n.node_id`)
	if err := r.advanceDrains(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := value[string](c, `SELECT state FROM drains WHERE node_id = 'n1'`); got != string(Done) {
		t.Errorf("the oldest drain is %s, want done: nothing is left on its node", got)
	}
	if got := value[int64](c, `SELECT count(*) FROM drains WHERE ended_at IS NULL`); got != drainsAtOnce {
		t.Errorf("%d drains are open, want the %d whose nodes have a sandbox", got, drainsAtOnce)
	}
}
