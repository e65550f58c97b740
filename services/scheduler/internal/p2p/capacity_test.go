package p2p

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
)

// small is an index for capacity keys in which every use counts.
func small(capacity int) Config { return Config{Capacity: capacity} }

func TestTheLeastRecentlyUsedGoAboveTheCapacity(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.peer("n1", "n2")
	x := c.replica(small(3))
	for _, key := range []string{"a", "b", "c"} {
		record(t, x, key, "n1")
	}
	if err := x.trim(t.Context()); err != nil {
		t.Fatalf("trim = %v", err)
	}
	if diff := cmp.Diff([]string{"a", "b", "c"}, c.keys()); diff != "" {
		t.Errorf("at the capacity nothing goes (-want +got):\n%s", diff)
	}
	lookup(t, x, "a")            // a use
	record(t, x, "b", "n2")      // a use
	record(t, x, "d", "n1")      // c is the least recent now
	record(t, x, "e", "n1")      // and a the next
	lookup(t, x, "never stored") // no use of anything
	if err := x.trim(t.Context()); err != nil {
		t.Fatalf("trim = %v", err)
	}
	if diff := cmp.Diff([]string{"b", "d", "e"}, c.keys()); diff != "" {
		t.Errorf("the most recent three stay (-want +got):\n%s", diff)
	}
	if got := value[int64](c, `SELECT count(*) FROM p2p_holders`); got != 4 {
		t.Errorf("%d holders are left, want the four of b, d and e", got)
	}
	if left, gone := testutil.ToFloat64(x.metrics.artifacts), testutil.ToFloat64(x.metrics.trimmed); left != 3 || gone != 2 {
		t.Errorf("the metrics say %v left and %v gone, want 3 and 2", left, gone)
	}
}

func TestAPassGoesOnUntilTheCapacityIsReached(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.exec(`INSERT INTO p2p_artifacts (cluster_id, backend, key, used_at) SELECT 'c', 'b', lpad(n::text, 5, '0'), now() + n * interval '1 s' FROM generate_series(1, $1::int) AS n`, 2*passBatch+57)
	x := c.replica(small(7))
	if err := x.trim(t.Context()); err != nil {
		t.Fatalf("trim = %v", err)
	}
	var want []string
	for n := 2*passBatch + 51; n <= 2*passBatch+57; n++ {
		want = append(want, fmt.Sprintf("%05d", n))
	}
	if diff := cmp.Diff(want, c.keys()); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
}

func TestTwoPassesAtOnceDoNotGoBelowTheCapacity(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.exec(`INSERT INTO p2p_artifacts (cluster_id, backend, key) SELECT 'c', 'b', n::text FROM generate_series(1, 3000) AS n`)
	replicas := []*Index{c.replica(small(100)), c.replica(small(100)), c.replica(small(100))}
	var passes sync.WaitGroup
	for _, x := range replicas {
		passes.Go(func() {
			if err := x.trim(t.Context()); err != nil {
				t.Errorf("trim = %v", err)
			}
		})
	}
	passes.Wait()
	if err := replicas[0].trim(t.Context()); err != nil { // those who met another's lock left the rest to it
		t.Errorf("trim = %v", err)
	}
	if got := len(c.keys()); got != 100 {
		t.Errorf("%d keys are left, want exactly the capacity, 100", got)
	}
}

func TestAPassIsLeftToWhoeverHasItsLock(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.peer("n1")
	x := c.replica(small(1))
	record(t, x, "a", "n1")
	record(t, x, "b", "n1")
	err := c.Tx(t.Context(), func(tx pgx.Tx) error {
		if err := pgdb.Lock(t.Context(), tx, advisory.Loop(loopCapacity)); err != nil {
			return err
		}
		return x.trim(t.Context())
	})
	if err != nil {
		t.Fatalf("trim = %v", err)
	}
	if diff := cmp.Diff([]string{"a", "b"}, c.keys()); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
}

// TestWhatIsUsedWhileAPassWaitsIsSpared holds the artifact that the pass will pick, uses it, and lets go:
// picked by what was read before, it would be lost although it is the most recently used.
func TestWhatIsUsedWhileAPassWaitsIsSpared(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.peer("n1")
	x := c.replica(small(1))
	record(t, x, "old", "n1")
	record(t, x, "older", "n1")
	c.exec(`UPDATE p2p_artifacts SET used_at = used_at - interval '1 hour' WHERE key = 'older'`)
	err := x.db.Tx(t.Context(), func(tx pgx.Tx) error {
		var cutoff time.Time
		if err := tx.QueryRow(t.Context(), selectCutoffSQL, pgx.StrictNamedArgs{"spared": 0}).Scan(&cutoff); err != nil {
			return err
		}
		lookup(t, c.replica(small(1)), "older") // commits
		tag, err := tx.Exec(t.Context(), trimArtifactsSQL, pgx.StrictNamedArgs{"cutoff": cutoff, "most": 1})
		if err == nil && tag.RowsAffected() != 0 {
			t.Errorf("%d artifacts were deleted, want none", tag.RowsAffected())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"old", "older"}, c.keys()); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
}

// TestReplicasRecordForgetAndTrimAtOnce lets two replicas do all there is to a few keys, then checks what
// must hold whatever happened: no error, no holder without its artifact, no artifact without a holder, and
// no key above the capacity once it is quiet. Then each node records everything once more, so that a key
// that was lost in between would show.
func TestReplicasRecordForgetAndTrimAtOnce(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	nodes := []node.ID{"n1", "n2", "n3", "n4"}
	c.peer(nodes...)
	replicas := []*Index{c.replica(small(6)), c.replica(small(6))}
	keys := make([]string, 10)
	for i := range keys {
		keys[i] = fmt.Sprintf("k%d", i)
	}
	var rounds atomic.Int64
	var workers sync.WaitGroup
	for w := range 8 {
		x := replicas[w%2]
		workers.Go(func() {
			random := rand.New(rand.NewPCG(uint64(w), 7))
			for range 60 {
				key, id := keys[random.IntN(len(keys))], nodes[random.IntN(len(nodes))]
				var err error
				switch random.IntN(8) {
				case 0, 1, 2:
					err = x.Record(t.Context(), named(key), id)
				case 3, 4:
					err = x.Forget(t.Context(), named(key), id)
				case 5:
					_, err = x.Lookup(t.Context(), named(key), "")
				case 6:
					err = x.trim(t.Context())
				default:
					err = x.db.Tx(t.Context(), func(tx pgx.Tx) error { return ForgetNodes(t.Context(), tx, id, nodes[random.IntN(len(nodes))]) })
				}
				if err != nil {
					t.Errorf("worker %d, %s of %s: %v", w, key, id, err)
					return
				}
				rounds.Add(1)
			}
		})
	}
	workers.Wait()
	const unheldSQL = `SELECT count(*) FROM p2p_artifacts AS a WHERE NOT EXISTS (SELECT FROM p2p_holders AS h WHERE h.artifact_id = a.artifact_id)`
	if got := value[int64](c, unheldSQL); got != 0 {
		t.Errorf("%d artifacts have no holder after %d rounds", got, rounds.Load())
	}
	for _, key := range keys {
		record(t, replicas[0], key, nodes...)
	}
	if diff := cmp.Diff(nodes, lookup(t, replicas[1], keys[9])); diff != "" {
		t.Errorf("holders (-want +got):\n%s", diff)
	}
	if err := replicas[1].trim(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(keys[4:], c.keys()); diff != "" {
		t.Errorf("keys when it is quiet (-want +got):\n%s", diff)
	}
}

// A node that holds very much must be able to leave in one short transaction; the rest of it goes soon.
func TestWhatAGoneNodeHeldInMassesIsSwept(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	x := c.replica(DefaultConfig())
	c.peer("absent", "ended", "here")
	c.exec(`INSERT INTO p2p_artifacts (cluster_id, backend, key) SELECT 'c', 'b', 'k' || i FROM generate_series(1, $1::int) AS i`, 2*forgetAtOnce)
	for _, id := range []string{"absent", "ended"} {
		c.exec(`INSERT INTO p2p_holders SELECT artifact_id, $1 FROM p2p_artifacts`, id)
	}
	c.exec(`INSERT INTO p2p_holders SELECT min(artifact_id), 'here' FROM p2p_artifacts`)
	held := func(id string) int {
		t.Helper()
		return int(value[int64](c, `SELECT count(*) FROM p2p_holders WHERE node_id = $1`, id))
	}

	err := x.db.Tx(t.Context(), func(tx pgx.Tx) error { return ForgetNodes(t.Context(), tx, "absent") })
	if got := held("absent"); err != nil || got != forgetAtOnce {
		t.Fatalf("ForgetNodes = %v, and %d are left, want %d", err, got, forgetAtOnce)
	}
	if err := x.sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := held("absent"); got != forgetAtOnce {
		t.Errorf("%d are left of a node that is not gone, want %d", got, forgetAtOnce)
	}
	c.exec(`UPDATE nodes SET present = false, gone_at = now() WHERE node_id = 'absent'`)
	c.exec(`UPDATE node_leases SET ended_at = now() WHERE node_id = 'ended'`)
	if err := x.sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if absent, ended, here := held("absent"), held("ended"), held("here"); absent+ended != 0 || here != 1 {
		t.Errorf("%d, %d and %d are left, want those of the node that is here", absent, ended, here)
	}
	if got := value[int64](c, `SELECT count(*) FROM p2p_artifacts`); got != 1 {
		t.Errorf("%d artifacts, want the one that is held", got)
	}
}
