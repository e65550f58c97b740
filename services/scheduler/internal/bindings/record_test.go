package bindings

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

func isRaced(err error) bool { return errors.Is(err, ErrRaced) }

func TestRecordBindsInOneCommitWithItsFeedRowAndItsHold(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	first := c.mustRecord(on("a", "s1"))
	want := bindingRow{State: sandbox.Bound, Node: "a", Revision: int64(first.Revision), Incarnation: 1, CPUMillis: 500}
	if got := c.row("s1"); got != want {
		t.Errorf("binding = %+v, want %+v", got, want)
	}
	if got := c.holds("a"); got != 1 {
		t.Errorf("holds = %d, want one: the report does not count the sandbox yet", got)
	}
	feed := value[string](c, `SELECT kind || ' ' || key || ' ' || state || ' ' || node_id || ' ' || cluster_id FROM route_feed WHERE revision = $1`, first.Revision)
	if feed != "binding s1 bound a c1" {
		t.Errorf("feed row = %q", feed)
	}

	again := c.mustRecord(on("a", "s1"))
	if again != first {
		t.Errorf("the repeated call = %+v, want the first answer %+v", again, first)
	}
	if got := c.feed(); got != 1 {
		t.Errorf("feed rows after the repeated call = %d, want 1", got)
	}
	if got := c.holds("a"); got != 1 {
		t.Errorf("holds after the repeated call = %d, want 1", got)
	}
}

func TestRecordAnswersInTheOrderOfItsSandboxes(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.mustRecord(on("a", "m"))
	assigned, err := c.Record(t.Context(), on("a", "z", "m", "b"))
	if err != nil {
		t.Fatal(err)
	}
	var ids []sandbox.ID
	for _, a := range assigned {
		ids = append(ids, a.Sandbox)
		if int64(a.Revision) != c.row(a.Sandbox).Revision {
			t.Errorf("%s: revision %d, want the row's %d", a.Sandbox, a.Revision, c.row(a.Sandbox).Revision)
		}
	}
	if diff := cmp.Diff([]sandbox.ID{"z", "m", "b"}, ids); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

func TestRecordRefuses(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		given func(c *cell)
		asked func(c *cell) Assignment
		want  error
	}{
		"an unknown node": {
			asked: func(*cell) Assignment { return on("x", "s1") }, want: node.ErrNotListed,
		},
		"an endpoint that is not the node's": {
			asked: func(*cell) Assignment {
				a := on("a", "s1")
				a.Endpoint += "/"
				return a
			}, want: node.ErrNotListed,
		},
		"an absent node": {
			given: func(c *cell) { c.exec(`UPDATE nodes SET present = false, gone_at = now()`) },
			asked: func(*cell) Assignment { return on("a", "s1") }, want: node.ErrNotListed,
		},
		"a binding that has changed": {
			given: func(c *cell) { c.mustRecord(on("a", "s1")) },
			asked: func(c *cell) Assignment {
				a := on("b", "s1")
				a.ExpectedRevision = sandbox.Revision(c.row("s1").Revision - 1)
				return a
			}, want: sandbox.ErrChanged,
		},
		"another tenant's sandbox on the same node": {
			given: func(c *cell) { c.mustRecord(ofTenant("t1", on("a", "s1"))) },
			asked: func(*cell) Assignment { return ofTenant("t2", on("a", "s1")) }, want: sandbox.ErrInUse,
		},
		"another tenant's sandbox on another node": {
			given: func(c *cell) { c.mustRecord(ofTenant("t1", on("a", "s1"))) },
			asked: func(*cell) Assignment { return ofTenant("t2", on("b", "s1")) }, want: sandbox.ErrInUse,
		},
		"all, when one of several is another tenant's": {
			given: func(c *cell) { c.mustRecord(ofTenant("t1", on("a", "s1"))) },
			asked: func(*cell) Assignment { return ofTenant("t2", on("b", "s0", "s1")) }, want: sandbox.ErrInUse,
		},
		"a reservation that never was, on a full node": {
			given: func(c *cell) { c.exec(`UPDATE nodes SET cap_sandboxes = 1`); c.mustRecord(on("a", "s0")) },
			asked: func(*cell) Assignment {
				a := on("a", "s1")
				a.ReservationID = "0192f0c1-2d3e-7000-8000-000000000000"
				return a
			}, want: node.ErrReservationOver,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			c.listNode("a", time.Hour)
			c.listNode("b", time.Hour)
			if tt.given != nil {
				tt.given(c)
			}
			bindings, feed, holds := value[int64](c, `SELECT count(*) FROM bindings`), c.feed(), c.holds("b")
			_, err := c.Record(t.Context(), tt.asked(c))
			if !errors.Is(err, tt.want) {
				t.Errorf("Record = %v, want %v", err, tt.want)
			}
			if got := value[int64](c, `SELECT count(*) FROM bindings`); got != bindings || c.feed() != feed || c.holds("b") != holds {
				t.Errorf("a refused record left something behind: %d bindings, %d feed rows, %d holds", got, c.feed(), c.holds("b"))
			}
		})
	}
}

func ofTenant(tenant string, a Assignment) Assignment {
	a.Tenant = tenant
	return a
}

func TestALateConfirmationBindsIfThereIsRoom(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.exec(`UPDATE nodes SET cap_sandboxes = 1`)
	a := on("a", "s1")
	a.ReservationID = "0192f0c1-2d3e-7000-8000-000000000000" // as if the sweep had taken it
	c.mustRecord(a)
	if got := c.row("s1"); got.State != sandbox.Bound {
		t.Errorf("binding = %+v, want it bound", got)
	}
	if got := c.holds("a"); got != 1 {
		t.Errorf("holds = %d, want 1", got)
	}
}

func TestRecordElsewhereMoves(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.listNode("b", time.Hour)
	before := c.mustRecord(ofTenant("t1", on("a", "s1")))
	move := on("b", "s1") // an AgentENV caller: the last writer wins
	after := c.mustRecord(move)
	if after.Revision <= before.Revision || after.Incarnation != 2 {
		t.Errorf("moved = %+v after %+v, want a higher revision and incarnation 2", after, before)
	}
	if got := c.row("s1"); got.Node != "b" || got.Tenant != "t1" {
		t.Errorf("binding = %+v, want it on b, its tenant kept", got)
	}
	if a, b := c.holds("a"), c.holds("b"); a != 0 || b != 1 {
		t.Errorf("holds = %d on a, %d on b, want 0 and 1", a, b)
	}

	move = on("a", "s1")
	move.ExpectedRevision = after.Revision
	if back := c.mustRecord(move); back.Incarnation != 3 || back.Revision <= after.Revision {
		t.Errorf("moved back = %+v, want incarnation 3 and a higher revision", back)
	}
	if got := c.feed(); got != 3 {
		t.Errorf("feed rows = %d, want 3", got)
	}
}

func TestRecordFillsInWhatARosterAdopted(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.mustReconcile("a", "s1")
	adopted := c.row("s1")
	if adopted.Tenant != "" || adopted.Incarnation != 1 || c.holds("a") != 0 {
		t.Fatalf("adopted = %+v with %d holds, want no tenant and no hold", adopted, c.holds("a"))
	}
	// Gateways cached a route of nobody's; unless they hear of its tenant, they answer it 404.
	before := c.feed()
	assigned := c.mustRecord(ofTenant("t1", on("a", "s1")))
	want := adopted
	want.Tenant, want.CPUMillis, want.Revision = "t1", 500, int64(assigned.Revision)
	if got := c.row("s1"); got != want || got.Revision <= adopted.Revision {
		t.Errorf("recorded = %+v (answer %+v), want %+v with a higher revision than %d", got, assigned, want, adopted.Revision)
	}
	if got := c.feed() - before; got != 1 {
		t.Errorf("feed rows = %d, want 1: its tenant", got)
	}
	// What was filled in once is the same route for good.
	if again := c.mustRecord(ofTenant("t1", on("a", "s1"))); again != assigned || c.feed()-before != 1 {
		t.Errorf("recorded again = %+v, want %+v and no feed row", again, assigned)
	}
	if got := c.holds("a"); got != 0 {
		t.Errorf("holds = %d, want 0: the report counts the sandbox", got)
	}
}

func TestRecordBringsBackWhatEnded(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	before := c.mustRecord(on("a", "s1"))
	ended, err := c.Release(t.Context(), "s1", before.Revision)
	if err != nil {
		t.Fatal(err)
	}
	after := c.mustRecord(ofTenant("t2", on("a", "s1")))
	if after.Revision <= ended || after.Incarnation != 2 {
		t.Errorf("recorded after its end = %+v, want a revision above %d and incarnation 2", after, ended)
	}
	if got := c.row("s1"); got.State != sandbox.Bound || got.EndedBy != "" || got.Tenant != "t2" {
		t.Errorf("binding = %+v, want it bound, its new tenant's", got)
	}
}

// Two replicas record, move and adopt the same sandboxes at once: each has one row, one hold at most,
// and its revision never falls.
func TestRecordsAndRostersAtOnceLeaveOneBinding(t *testing.T) {
	t.Parallel()
	cfg := DefaultConfig()
	cfg.Grace = time.Hour
	c := newCellWith(t, cfg)
	nodes := []node.ID{"a", "b", "c"}
	for _, n := range nodes {
		c.listNode(n, time.Hour)
	}
	c.exec(`CREATE TABLE seen (id text, revision bigint, xid xid8 DEFAULT pg_current_xact_id())`)
	c.exec(`CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
	        IF TG_OP = 'UPDATE' AND NEW.revision < OLD.revision THEN RAISE EXCEPTION 'revision fell'; END IF;
	        IF TG_OP = 'UPDATE' AND NEW.revision = OLD.revision AND (NEW.state, NEW.node_id) IS DISTINCT FROM (OLD.state, OLD.node_id)
	        THEN RAISE EXCEPTION 'a change without a revision'; END IF;
	        IF TG_OP = 'INSERT' OR NEW.revision > OLD.revision THEN INSERT INTO seen VALUES (NEW.sandbox_id, NEW.revision); END IF;
	        RETURN NEW; END $$`)
	c.exec(`CREATE TRIGGER see AFTER INSERT OR UPDATE ON bindings FOR EACH ROW EXECUTE FUNCTION see()`)

	const sandboxes = 12
	replicas := []*Bindings{c.Bindings, c.replica(), c.replica()}
	c.serve(replicas[:2]...) // the third goes alone
	var wg sync.WaitGroup
	errs := make(chan error, 1000)
	for worker := range 8 {
		b := replicas[worker%len(replicas)]
		wg.Go(func() {
			for i := range 25 {
				id := sandbox.ID(fmt.Sprintf("s%d", (worker*5+i*7)%sandboxes))
				n := nodes[(worker+i)%len(nodes)]
				if worker%4 == 3 {
					if _, err := (&cell{Bindings: b, t: t, owner: c.owner}).reconcile(t.Context(), n, string(id), string(id)+"x"); err != nil {
						errs <- fmt.Errorf("reconcile: %w", err)
					}
					continue
				}
				if _, err := b.Record(t.Context(), on(n, id)); err != nil {
					errs <- err
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	if got := value[int64](c, `SELECT count(*) FROM (SELECT sandbox_id FROM reservations GROUP BY sandbox_id HAVING count(*) > 1) AS twice`); got != 0 {
		t.Errorf("%d sandboxes are held twice", got)
	}
	if got := value[int64](c, `SELECT count(*) FROM reservations AS r JOIN bindings AS b USING (sandbox_id) WHERE r.node_id <> b.node_id`); got != 0 {
		t.Errorf("%d holds are on another node than their binding", got)
	}
	missing := value[int64](c, `SELECT count(*) FROM seen FULL JOIN route_feed AS f ON f.key = seen.id AND f.revision = seen.revision AND f.xid = seen.xid
		WHERE seen.id IS NULL OR f.key IS NULL`)
	if missing != 0 {
		t.Errorf("%d changes and feed rows do not meet", missing)
	}
	if got := value[int64](c, `SELECT count(*) FROM seen`); got < sandboxes {
		t.Errorf("%d changes were seen, want at least one a sandbox: the test saw nothing", got)
	}
	for _, b := range replicas {
		b.db.Close()
	}
	if got := c.deadlocks(); got != 0 {
		t.Errorf("%d deadlocks, want none: locks are taken in one order", got)
	}
}
