package p2p

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"berth/migrations"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
	"berth/services/internal/node"
)

func TestHoldersAreRecordedAndForgottenOnceEach(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.peer("n1", "n2")
	one, other := c.replica(DefaultConfig()), c.replica(DefaultConfig())
	record(t, one, "k", "n1", "n2", "n1") // it may repeat
	record(t, other, "l", "n2")
	if diff := cmp.Diff([]node.ID{"n1", "n2"}, lookup(t, other, "k")); diff != "" {
		t.Errorf("Lookup(k) (-want +got):\n%s", diff)
	}
	if got := lookup(t, one, "never recorded"); len(got) != 0 {
		t.Errorf("an unknown key has %v", got)
	}
	if got, err := one.Lookup(t.Context(), named("k"), "n1"); err != nil || len(got) != 1 || got[0] != (Peer{"n2", "b", "n2:9"}) {
		t.Errorf("Lookup without n1 = %v, %v, want n2", got, err)
	}
	for name, a := range map[string]Artifact{
		"another cluster": {"C", "b", "k"}, "another backend": {"c", "B", "k"}, "another key": {"c", "b", "K"},
	} {
		if got, err := one.Lookup(t.Context(), a, ""); err != nil || len(got) != 0 {
			t.Errorf("%s: Lookup(%+v) = %v, %v, want none", name, a, got, err)
		}
	}

	for range 2 { // it may repeat
		if err := other.Forget(t.Context(), named("k"), "n1"); err != nil {
			t.Fatalf("Forget = %v", err)
		}
	}
	if err := other.Forget(t.Context(), named("l"), "n1"); err != nil {
		t.Errorf("Forget of what n1 never held = %v", err)
	}
	if diff := cmp.Diff([]node.ID{"n2"}, lookup(t, one, "k")); diff != "" {
		t.Errorf("after n1's Forget (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"k", "l"}, c.keys()); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
	if err := one.Forget(t.Context(), named("k"), "n2"); err != nil {
		t.Fatalf("Forget = %v", err)
	}
	if diff := cmp.Diff([]string{"l"}, c.keys()); diff != "" {
		t.Errorf("a key without holders still counts (-want +got):\n%s", diff)
	}
}

func TestOnlyPresentNodesBecomeHolders(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.peer("n1", "silent")
	c.exec(`UPDATE nodes SET present = false, gone_at = now() WHERE node_id = 'n1'`)
	c.exec(`DELETE FROM node_leases WHERE node_id = 'silent'`)
	x := c.replica(DefaultConfig())
	for id, want := range map[node.ID]error{"n1": node.ErrNotListed, "nobody": node.ErrNotListed, "silent": nil} {
		if err := x.Record(t.Context(), named("of-"+string(id)), id); !errors.Is(err, want) {
			t.Errorf("Record of %s = %v, want %v", id, err, want)
		}
	}
	if diff := cmp.Diff([]string{"of-silent"}, c.keys()); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
}

// TestALimitCutsOffReadyHoldersOnly has one ready holder among many that are not: whatever is drawn, it is
// the answer.
func TestALimitCutsOffReadyHoldersOnly(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	cfg := DefaultConfig()
	cfg.LookupLimit = 1
	x := c.replica(cfg)
	for i := range 20 {
		id := node.ID(fmt.Sprintf("n%02d", i))
		c.peer(id)
		record(t, x, "k", id)
	}
	c.exec(`UPDATE nodes SET cordoned = true WHERE node_id NOT IN ('n07', 'n13')`)
	drawn := map[node.ID]bool{}
	for range 100 {
		got, err := x.Lookup(t.Context(), named("k"), "n13")
		if err != nil || len(got) != 1 || got[0].Node != "n07" {
			t.Fatalf("Lookup = %v, %v, want n07: it is ready and not excluded", got, err)
		}
		for _, id := range lookup(t, x, "k") {
			drawn[id] = true
		}
	}
	if !drawn["n07"] || !drawn["n13"] || len(drawn) != 2 {
		t.Errorf("a hundred draws gave %v, want both that are ready", drawn)
	}
}

// TestRecencyIsWrittenOnceInAWhile compares the version of the row, which every write changes.
func TestRecencyIsWrittenOnceInAWhile(t *testing.T) {
	t.Parallel()
	const versionSQL = `SELECT concat_ws(' ', ctid, used_at) FROM p2p_artifacts WHERE key = 'k'`
	for name, tt := range map[string]struct {
		touch time.Duration
		aged  time.Duration
		use   func(t *testing.T, x *Index)
		wrote bool
	}{
		"a lookup at once":           {time.Minute, 0, func(t *testing.T, x *Index) { lookup(t, x, "k") }, false},
		"a record at once":           {time.Minute, 0, func(t *testing.T, x *Index) { record(t, x, "k", "n1") }, false},
		"a new holder at once":       {time.Minute, 0, func(t *testing.T, x *Index) { record(t, x, "k", "n2") }, false},
		"a lookup within the minute": {time.Minute, 50 * time.Second, func(t *testing.T, x *Index) { lookup(t, x, "k") }, false},
		"a lookup after the minute":  {time.Minute, 61 * time.Second, func(t *testing.T, x *Index) { lookup(t, x, "k") }, true},
		"a record after the minute":  {time.Minute, 61 * time.Second, func(t *testing.T, x *Index) { record(t, x, "k", "n1") }, true},
		"each lookup, where touch 0": {0, 0, func(t *testing.T, x *Index) { lookup(t, x, "k") }, true},
		"each record, where touch 0": {0, 0, func(t *testing.T, x *Index) { record(t, x, "k", "n1") }, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			c.peer("n1", "n2")
			cfg := DefaultConfig()
			cfg.Touch = tt.touch
			x := c.replica(cfg)
			record(t, x, "k", "n1")
			c.exec(`UPDATE p2p_artifacts SET used_at = used_at - $1::interval`, tt.aged)
			before := value[string](c, versionSQL)
			tt.use(t, x)
			if wrote := value[string](c, versionSQL) != before; wrote != tt.wrote {
				t.Errorf("the row was written: %t, want %t", wrote, tt.wrote)
			}
			if age := value[time.Duration](c, `SELECT clock_timestamp() - used_at FROM p2p_artifacts`); tt.wrote && age > 30*time.Second {
				t.Errorf("it is %s old after its use", age)
			}
		})
	}
}

// TestTheIndexIsWrittenWithoutWaitingForTheDisk reads the setting in triggers, inside the transactions
// that write.
func TestTheIndexIsWrittenWithoutWaitingForTheDisk(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.peer("n1")
	c.exec(`ALTER ROLE berth_scheduler IN DATABASE ` + pgx.Identifier{value[string](c, `SELECT current_database()::text`)}.Sanitize() + ` SET synchronous_commit = on`)
	c.exec(`CREATE TABLE seen (waits text)`)
	c.exec(`GRANT INSERT ON seen TO PUBLIC`)
	c.exec(`CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$`)
	for _, table := range []string{"p2p_artifacts", "p2p_holders"} {
		c.exec(`CREATE TRIGGER see AFTER INSERT OR UPDATE OR DELETE ON ` + table + ` FOR EACH STATEMENT EXECUTE FUNCTION see()`)
	}
	cfg := DefaultConfig()
	cfg.Touch = 0
	x := c.replica(cfg)
	if _, err := x.db.Exec(t.Context(), `SET synchronous_commit = on`); err != nil {
		t.Fatal(err)
	}
	record(t, x, "k", "n1")
	lookup(t, x, "k")
	if err := x.Forget(t.Context(), named("k"), "n1"); err != nil {
		t.Fatal(err)
	}
	if got := value[string](c, `SELECT string_agg(DISTINCT waits, ' ') FROM seen`); got != "off" {
		t.Errorf("synchronous_commit was %s, want off", got)
	}
}

func TestANodeThatLeavesTakesItsHoldingsAlong(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.peer("n1", "n2", "n3")
	x := c.replica(DefaultConfig())
	record(t, x, "shared", "n1", "n2", "n3")
	record(t, x, "both", "n1", "n2")
	record(t, x, "own", "n1")
	record(t, x, "other", "n3")
	err := x.db.Tx(t.Context(), func(tx pgx.Tx) error { return ForgetNodes(t.Context(), tx, "n1", "n2", "nobody") })
	if err != nil {
		t.Fatalf("ForgetNodes = %v", err)
	}
	if diff := cmp.Diff([]string{"other", "shared"}, c.keys()); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]node.ID{"n3"}, lookup(t, x, "shared")); diff != "" {
		t.Errorf("holders (-want +got):\n%s", diff)
	}
}

// TestARecordWaitsForANodeThatBecomesAbsent commits the absence after Record has begun: the holder must
// not appear behind the back of the transaction that forgot the node.
func TestARecordWaitsForANodeThatBecomesAbsent(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.peer("n1")
	x := c.replica(DefaultConfig())
	tx, err := c.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := tx.Exec(t.Context(), `UPDATE nodes SET present = false, gone_at = now() WHERE node_id = 'n1'`); err != nil {
		t.Fatal(err)
	}
	if err := ForgetNodes(t.Context(), tx, "n1"); err != nil {
		t.Fatal(err)
	}
	recorded := make(chan error, 1)
	go func() { recorded <- x.Record(t.Context(), named("k"), "n1") }()
	const waitingSQL = `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`
	for waiting := false; !waiting; {
		waiting = value[bool](c, waitingSQL)
		select {
		case err := <-recorded:
			t.Fatalf("Record = %v before the node's transaction ended", err)
		default:
		}
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-recorded; !errors.Is(err, node.ErrNotListed) {
		t.Errorf("Record = %v, want %v", err, node.ErrNotListed)
	}
	if got := c.keys(); len(got) != 0 {
		t.Errorf("keys = %v, want none", got)
	}
}

// TestWhoeverForgetsWaitsForANewHolder leaves a Record of n2 open while n1, so far the only holder, goes:
// judged by what was read before the lock, the artifact would go with n1 and take n2's holding along.
func TestWhoeverForgetsWaitsForANewHolder(t *testing.T) {
	t.Parallel()
	for name, forget := range map[string]func(x *Index) error{
		"one artifact": func(x *Index) error { return x.Forget(t.Context(), named("k"), "n1") },
		"all of a node": func(x *Index) error {
			return x.db.Tx(t.Context(), func(tx pgx.Tx) error { return ForgetNodes(t.Context(), tx, "n1") })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			c.peer("n1", "n2")
			x := c.replica(DefaultConfig())
			record(t, x, "k", "n1")
			forgotten := make(chan error, 1)
			err := c.Tx(t.Context(), func(tx pgx.Tx) error {
				if _, err := tx.Exec(t.Context(), useArtifactSQL, named("k").args(pgx.StrictNamedArgs{"touch": time.Minute})); err != nil {
					return err
				}
				if _, err := tx.Exec(t.Context(), addHolderSQL, named("k").args(pgx.StrictNamedArgs{"node": "n2"})); err != nil {
					return err
				}
				go func() { forgotten <- forget(x) }()
				const waitingSQL = `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`
				for waiting := false; !waiting; {
					waiting = value[bool](c, waitingSQL)
				}
				return nil
			})
			if err := errors.Join(err, <-forgotten); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]node.ID{"n2"}, lookup(t, x, "k")); diff != "" {
				t.Errorf("holders (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTheIndexOutlivesSchedulersAndPostgreSQL(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, nil)
	c := &cell{Database: server.New(migrations.FS), t: t}
	c.peer("n1")
	x := c.replica(DefaultConfig())
	record(t, x, "k", "n1")
	server.Stop(0)
	server.Start()
	deadline := time.Now().Add(20 * time.Second)
	for name, replica := range map[string]*Index{"the replica that recorded": x, "a new one": c.replica(DefaultConfig())} {
		got, err := replica.Lookup(t.Context(), named("k"), "")
		for pgdb.Unavailable(err) && time.Now().Before(deadline) { // its connections are of before
			got, err = replica.Lookup(t.Context(), named("k"), "")
		}
		if err != nil || !slices.Equal(got, []Peer{{"n1", "b", "n1:9"}}) {
			t.Errorf("%s: Lookup = %v, %v, want n1", name, got, err)
		}
	}
}
