package bindings

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// serve runs the loops of records and lookups until the test ends.
func (c *cell) serve(replicas ...*Bindings) {
	c.t.Helper()
	ctx, stop := context.WithCancel(context.WithoutCancel(c.t.Context()))
	var loops sync.WaitGroup
	for _, b := range replicas {
		for _, loop := range []func(context.Context) error{b.RecordLoop, b.LookupLoop} {
			loops.Go(func() {
				if err := loop(ctx); err != nil {
					c.t.Errorf("a loop ends with %v", err)
				}
			})
		}
		b.records.await(c.t, func() bool { return b.records.servers > 0 })
		b.lookups.await(c.t, func() bool { return b.lookups.servers > 0 })
	}
	c.t.Cleanup(func() {
		stop()
		loops.Wait()
	})
}

// answered is what one record of several heard.
type answered struct {
	Assigned []Assigned
	Err      error
}

// recordAtOnce records all in one batch, as far as they can be in one.
func (c *cell) recordAtOnce(all ...Assignment) []answered {
	c.t.Helper()
	heard := make([]answered, len(all))
	calls := make([]func(), len(all))
	for i, a := range all {
		calls[i] = func() { heard[i].Assigned, heard[i].Err = c.Record(c.t.Context(), a) }
	}
	c.records.together(c.t, c.RecordLoop, calls...)
	return heard
}

// commits returns how many transactions wrote the bindings of ids.
func (c *cell) commits(ids ...sandbox.ID) int64 {
	c.t.Helper()
	return value[int64](c, `SELECT count(DISTINCT xmin::text) FROM bindings WHERE sandbox_id = ANY ($1::text[])`, ids)
}

// hold makes an open reservation on n, as Schedule does.
func (c *cell) hold(n node.ID, named bool, memory int64) Assignment {
	c.t.Helper()
	a := on(n)
	a.ReservationID = value[string](c, `
		WITH placed AS (
		INSERT INTO placements (tenant_id, outcome, node_id, reservation_id, cpu_millis, memory_bytes, strategy)
		VALUES ('t1', 'reserved', $1, gen_random_uuid(), 7, $3, 'random') RETURNING *)
		INSERT INTO reservations (reservation_id, n, placement_id, node_id, tenant_id, cpu_millis, memory_bytes, named, expires_at)
		SELECT reservation_id, 1, placement_id, node_id, tenant_id, cpu_millis, memory_bytes, $2, clock_timestamp() + interval '1 hour' FROM placed
		RETURNING reservation_id::text`, n, named, memory)
	a.PlacementID = value[int64](c, `SELECT placement_id FROM placements WHERE reservation_id = $1::uuid`, a.ReservationID)
	return a
}

func of(a Assignment, ids ...sandbox.ID) Assignment {
	a.Sandboxes = ids
	return a
}

func TestRecordsThatWaitShareACommit(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.listNode("b", time.Hour)
	named, unnamed := c.hold("a", true, 1), c.hold("b", false, 2)
	sealed := of(named, "s1", "s2")
	sealed.SealedAnswer = []byte("sealed")
	unnamed.ReservationID, unnamed.PlacementID = "", 0
	all := []Assignment{sealed, of(unnamed, "s3"), of(unnamed, "s4"), on("a", "s5"), on("b", "s6", "s7")}
	var ids []sandbox.ID
	for i, got := range c.recordAtOnce(all...) {
		if got.Err != nil || len(got.Assigned) != len(all[i].Sandboxes) {
			t.Fatalf("Record(%v) = %+v, %v, want one for each", all[i].Sandboxes, got.Assigned, got.Err)
		}
		for n, id := range all[i].Sandboxes {
			row := c.row(id)
			if want := (Assigned{id, sandbox.Revision(row.Revision), 1}); got.Assigned[n] != want || row.Node != all[i].Node {
				t.Errorf("Record(%v) answers %+v, want %+v, bound to %s", all[i].Sandboxes, got.Assigned[n], want, all[i].Node)
			}
		}
		ids = append(ids, all[i].Sandboxes...)
	}
	if got := c.commits(ids...); got != 1 {
		t.Errorf("%d transactions, want one", got)
	}
	if got := c.feed(); got != int64(len(ids)) {
		t.Errorf("%d feed rows, want one for each of %d", got, len(ids))
	}
	want := "s1 t1 7 1, s2 t1 7 1, s3 t1 7 2, s4  500 1048576, s5  500 1048576, s6  500 1048576, s7  500 1048576"
	for _, table := range []string{"bindings", "reservations"} {
		// Which of two gets the one unnamed hold does not matter.
		got := value[string](c, `SELECT string_agg(concat_ws(' ', sandbox_id, tenant_id, cpu_millis, memory_bytes), ', ' ORDER BY sandbox_id) FROM `+table)
		swapped := strings.NewReplacer("s3  500 1048576", "s3 t1 7 2", "s4 t1 7 2", "s4  500 1048576").Replace(got)
		if got != want && swapped != want {
			t.Errorf("%s = %s, want %s", table, got, want)
		}
	}
	if got := value[string](c, `SELECT string_agg(concat_ws(' ', outcome, sandbox_ids, sealed_answer), ', ' ORDER BY memory_bytes) FROM placements`); got != `confirmed {s1,s2} \x7365616c6564, confirmed {s3}` && got != `confirmed {s1,s2} \x7365616c6564, confirmed {s4}` {
		t.Errorf("placements = %s, want both confirmed with their sandboxes", got)
	}
	before := value[string](c, `SELECT string_agg(b::text, ',' ORDER BY sandbox_id) FROM bindings AS b`)
	again := c.recordAtOnce(all...)
	if got := value[string](c, `SELECT string_agg(b::text, ',' ORDER BY sandbox_id) FROM bindings AS b`); got != before {
		t.Errorf("recorded again = %s, want what was there: %s", got, before)
	}
	for i, got := range again {
		if got.Err != nil || len(got.Assigned) != len(all[i].Sandboxes) {
			t.Errorf("Record(%v), repeated = %+v, %v, want the same answer", all[i].Sandboxes, got.Assigned, got.Err)
		}
	}
	if got := value[int64](c, `SELECT count(*) FROM reservations`); got != int64(len(ids)) || c.feed() != int64(len(ids)) {
		t.Errorf("repeated: %d holds and %d feed rows for %d sandboxes, want no more", got, c.feed(), len(ids))
	}
}

func TestOneFailureOfABatchIsItsOwn(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.listNode("full", time.Hour)
	c.mustRecord(ofTenant("t1", on("a", "owned")))
	moved := c.mustRecord(on("full", "moved"))
	c.exec(`UPDATE nodes SET cap_sandboxes = 1 WHERE node_id = 'full'`)

	elsewhere := on("a", "s1")
	elsewhere.Endpoint += "/"
	changed := on("a", "moved")
	changed.ExpectedRevision = moved.Revision + 1
	ended := on("a", "late")
	ended.ReservationID = "0192f0c1-2d3e-7000-8000-000000000001"
	tooLate := on("full", "later")
	tooLate.ReservationID = "0192f0c1-2d3e-7000-8000-000000000002"
	tests := []struct {
		name string
		a    Assignment
		want error
	}{
		{"the first good one", on("a", "good1"), nil},
		{"an endpoint that is not the node's", elsewhere, node.ErrNotListed},
		{"another tenant's sandbox", ofTenant("t2", on("a", "owned")), sandbox.ErrInUse},
		{"a binding that has changed", changed, sandbox.ErrChanged},
		{"an ended reservation, and room", ended, nil},
		{"an ended reservation, and no room", tooLate, node.ErrReservationOver},
		{"a good one of two", on("a", "good2", "good3"), nil},
	}
	all := make([]Assignment, len(tests))
	for i := range tests {
		all[i] = tests[i].a
	}
	for i, got := range c.recordAtOnce(all...) {
		if !errors.Is(got.Err, tests[i].want) || (got.Err == nil) != (tests[i].want == nil) {
			t.Errorf("%s = %v, want %v", tests[i].name, got.Err, tests[i].want)
		}
	}
	if got := c.commits("good1", "good2", "good3"); got != 1 {
		t.Errorf("the good ones took %d transactions, want one", got)
	}
	if got := c.commits("good1", "late"); got != 2 {
		t.Errorf("the ended reservation was confirmed in %d transactions with a good one, want one of its own", got-1)
	}
	if got := value[string](c, `SELECT string_agg(sandbox_id, ' ' ORDER BY sandbox_id) FROM bindings`); got != "good1 good2 good3 late moved owned" {
		t.Errorf("bindings = %s", got)
	}
	if got := value[string](c, `SELECT string_agg(sandbox_id, ' ' ORDER BY sandbox_id) FROM reservations`); got != "good1 good2 good3 late moved owned" {
		t.Errorf("holds = %s", got)
	}
}

// What no column takes is refused by the database, which ends the transaction of all.
func TestAPoisonedRecordFailsAlone(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	heard := c.recordAtOnce(on("a", "good1"), ofTenant(strings.Repeat("t", 129), on("a", "poison")), on("a", "good2"))
	if heard[0].Err != nil || heard[2].Err != nil {
		t.Errorf("the others = %v and %v, want them recorded", heard[0].Err, heard[2].Err)
	}
	if pgdb.Constraint(heard[1].Err) == "" {
		t.Errorf("the poisoned one = %v, want a constraint's error", heard[1].Err)
	}
	if got := value[string](c, `SELECT string_agg(sandbox_id, ' ' ORDER BY sandbox_id) FROM bindings`); got != "good1 good2" {
		t.Errorf("bindings = %s, want the good ones", got)
	}
}

func TestTheSameSandboxTwiceInABatchIsBoundOnce(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	reserved := of(c.hold("a", true, 1), "s1")
	heard := c.recordAtOnce(reserved, reserved, reserved)
	for i, got := range heard {
		if got.Err != nil {
			t.Fatalf("record %d = %v, want it recorded", i, got.Err)
		}
		if diff := cmp.Diff(heard[0].Assigned, got.Assigned); diff != "" {
			t.Errorf("record %d hears otherwise than the first (-want +got):\n%s", i, diff)
		}
	}
	if got := c.holds("a"); got != 1 || c.feed() != 1 {
		t.Errorf("%d holds and %d feed rows, want one each", got, c.feed())
	}
}

func TestACallerThatLeftIsNotRecorded(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	hold := c.hold("a", true, 1)
	all := []*recording{
		{a: of(hold, "gone"), left: func() error { return context.Canceled }}, // after it was taken
		{a: on("a", "stays"), left: func() error { return nil }},
	}
	if err := c.recordOnce(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(all[0].err, context.Canceled) || all[1].err != nil {
		t.Errorf("they hear %v and %v, want the first canceled and the second recorded", all[0].err, all[1].err)
	}
	if got := value[string](c, `SELECT string_agg(sandbox_id, ' ') FROM bindings`); got != "stays" {
		t.Errorf("bindings = %s, want only the one that stays", got)
	}
	if got := value[int64](c, `SELECT count(*) FROM reservations WHERE sandbox_id IS NULL`); got != 1 {
		t.Errorf("%d open holds, want the one of the caller that left", got)
	}

	ctx, leave := context.WithCancel(t.Context())
	leave()
	c.serve(c.Bindings)
	if _, err := c.Record(ctx, of(hold, "gone")); !errors.Is(err, context.Canceled) {
		t.Errorf("Record of a caller that left = %v, want its context's error", err)
	}
	c.mustRecord(on("a", "next")) // the line has moved on
	if got := value[string](c, `SELECT string_agg(sandbox_id, ' ' ORDER BY sandbox_id) FROM bindings`); got != "next stays" {
		t.Errorf("bindings = %s", got)
	}
}

// Somebody holds what one of a batch needs, for as long as the test likes. The other is answered meanwhile.
func TestOneThatMustWaitHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	key := advisory.Sandbox("busy")
	for name, tt := range map[string]struct {
		sql  string
		args []any
	}{
		"for the lock of its sandbox": {`SELECT pg_advisory_xact_lock(lock_key($1::int, $2))`, []any{int32(key.Class), key.ID}},
		"for its row":                 {`SELECT FROM bindings WHERE sandbox_id = 'busy' FOR UPDATE`, nil},
		"for its reservation":         {`SELECT FROM reservations WHERE sandbox_id IS NULL FOR UPDATE`, nil},
		"for who inserts its row":     {`INSERT INTO bindings (sandbox_id, state, node_id, origin) VALUES ('busy2', 'bound', 'b', 'adopted')`, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			c.listNode("a", time.Hour)
			c.listNode("b", time.Hour)
			c.mustRecord(on("b", "busy"))
			hold := c.hold("a", true, 1)
			other, err := c.owner.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = other.Rollback(context.WithoutCancel(t.Context())) }() // after a commit it has nothing to do
			if _, err := other.Exec(t.Context(), tt.sql, tt.args...); err != nil {
				t.Fatal(err)
			}
			c.serve(c.Bindings)
			busy := make(chan error, 1)
			go func() {
				_, err := c.Record(t.Context(), of(hold, "busy", "busy2"))
				busy <- err
			}()
			for i := range 3 {
				c.mustRecord(on("a", sandbox.ID(fmt.Sprintf("free%d", i))))
			}
			select {
			case err := <-busy:
				// After a second and its repetitions it may have given up, which is an answer too, but not a record.
				if !pgdb.Unavailable(err) {
					t.Errorf("the one that must wait = %v while the other transaction is open", err)
				}
				busy <- err
			default:
			}
			if err := other.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-busy; err != nil && !pgdb.Unavailable(err) {
				t.Errorf("the one that waited = %v, want it recorded", err)
			}
			c.mustRecord(of(hold, "busy", "busy2"))
			if got := value[string](c, `SELECT string_agg(node_id, ' ') FROM bindings WHERE sandbox_id IN ('busy', 'busy2')`); got != "a a" {
				t.Errorf("they are on %s, want a", got)
			}
		})
	}
}

func TestARecordOfABatchThatRacesGoesAloneAndTheOthersAtOnce(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	// A roster binds "raced" just before this transaction inserts it: a trigger has its part.
	c.exec(`CREATE FUNCTION roster() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
	        IF NEW.sandbox_id = 'raced' AND NEW.origin = 'recorded' AND NOT EXISTS (SELECT 1 FROM bindings WHERE sandbox_id = 'raced')
	        THEN RETURN NULL; END IF;
	        RETURN NEW; END $$`)
	c.exec(`CREATE TRIGGER roster BEFORE INSERT ON bindings FOR EACH ROW EXECUTE FUNCTION roster()`)
	all := []*recording{{a: on("a", "raced")}, {a: on("a", "good")}}
	err := c.recordOnce(t.Context(), all)
	if !errors.Is(err, ErrRaced) || !all[0].raced || all[1].raced {
		t.Fatalf("recordOnce = %v with raced %t and %t, want the first raced", err, all[0].raced, all[1].raced)
	}
	if got := value[int64](c, `SELECT count(*) FROM bindings`) + c.holds("a"); got != 0 {
		t.Errorf("%d rows are left of a batch that raced, want none", got)
	}
	heard := c.recordAtOnce(on("a", "raced"), on("a", "good"))
	if !errors.Is(heard[0].Err, ErrRaced) || heard[1].Err != nil {
		t.Errorf("they hear %v and %v, want the good one recorded; the trigger lets the other race for ever", heard[0].Err, heard[1].Err)
	}
	c.exec(`DROP TRIGGER roster ON bindings`)
	if heard := c.recordAtOnce(on("a", "raced"), on("a", "good")); heard[0].Err != nil || heard[1].Err != nil {
		t.Errorf("without the race they hear %v and %v", heard[0].Err, heard[1].Err)
	}
}

func TestRecordsWithoutAStoreAreUnavailable(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.serve(c.Bindings)
	c.mustRecord(on("a", "s1"))
	c.db.Close()
	if _, err := c.Record(t.Context(), on("a", "s2")); !pgdb.Unavailable(err) {
		t.Errorf("Record without a store = %v, want it unavailable", err)
	}
	if _, err := c.Lookup(t.Context(), "s1"); !pgdb.Unavailable(err) {
		t.Errorf("Lookup without a store = %v, want it unavailable", err)
	}
}
