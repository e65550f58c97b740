package nodes

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// identity is who a node is, as its row says.
type identity struct {
	Instance string
	Place    string
	Epoch    int64
	Retired  string
	Live     bool
}

func (c *cell) identity(id node.ID) identity {
	c.t.Helper()
	var i identity
	err := c.QueryRow(c.t.Context(), `SELECT service_instance_id, place, epoch, array_to_string(retired, ' '),
	        ended_at IS NULL AND expires_at > clock_timestamp() FROM node_leases WHERE node_id = $1`, id).
		Scan(&i.Instance, &i.Place, &i.Epoch, &i.Retired, &i.Live)
	if err != nil {
		c.t.Fatal(err)
	}
	return i
}

// Each row of who may have a node's lease, with what becomes of the lease and of the bindings.
func TestWhoMayHaveANodesLease(t *testing.T) {
	t.Parallel()
	const (
		expired = `UPDATE node_leases SET expires_at = clock_timestamp() - interval '1 second'`
		ended   = `UPDATE node_leases SET expires_at = clock_timestamp(), ended_at = clock_timestamp()`
	)
	tests := map[string]struct {
		given string // of a lease of i2 at A, which i1 had before
		beat  Beat
		err   error
		want  identity
		lists bool // s1 and s2 stay where the beat lists s1 alone
	}{
		"expired, the same":           {expired, beatOf("a", "i2", endpointA, "s1"), nil, identity{"i2", endpointA, 2, "i1", true}, true},
		"expired, another elsewhere":  {expired, beatOf("a", "i3", endpointB, "s1"), nil, identity{"i3", endpointB, 3, "i1 i2", true}, true},
		"expired, a retired one":      {expired, beatOf("a", "i1", endpointA, "s1"), nil, identity{"i1", endpointA, 3, "i2", true}, true},
		"ended, the same":             {ended, beatOf("a", "i2", endpointA, "s1"), nil, identity{"i2", endpointA, 2, "i1", true}, true},
		"ended, another elsewhere":    {ended, beatOf("a", "i3", endpointB, "s1"), nil, identity{"i3", endpointB, 3, "i1 i2", true}, true},
		"live, the same":              {"", beatOf("a", "i2", endpointA, "s1"), nil, identity{"i2", endpointA, 2, "i1", true}, true},
		"live, the same elsewhere":    {"", beatOf("a", "i2", endpointB, "s1"), node.ErrIDInUse, identity{"i2", endpointA, 2, "i1", true}, false},
		"live, a retired one":         {"", beatOf("a", "i1", endpointA, "s1"), node.ErrSuperseded, identity{"i2", endpointA, 2, "i1", true}, false},
		"live, another, same place":   {"", beatOf("a", "i3", endpointA, "s1"), nil, identity{"i3", endpointA, 3, "i1 i2", true}, true},
		"live, another elsewhere":     {"", beatOf("a", "i3", endpointB, "s1"), node.ErrIDInUse, identity{"i2", endpointA, 2, "i1", true}, false},
		"live, a retired one, moving": {"", beatOf("a", "i1", endpointB, "s1"), node.ErrSuperseded, identity{"i2", endpointA, 2, "i1", true}, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			r, other := c.replica(), c.replica()
			r.must(t, beatOf("a", "i1", endpointA, "s1", "s2"))
			r.must(t, beatOf("a", "i2", endpointA, "s1", "s2"))
			c.exec(`UPDATE bindings SET bound_at = bound_at - interval '1 hour'`) // a roster without s2 would end it
			if tt.given != "" {
				c.exec(tt.given)
			}
			before := c.bindings()
			if _, err := other.Heartbeat(t.Context(), tt.beat); !errors.Is(err, tt.err) {
				t.Fatalf("Heartbeat = %v, want %v", err, tt.err)
			}
			if diff := cmp.Diff(tt.want, c.identity("a")); diff != "" {
				t.Errorf("the lease (-want +got):\n%s", diff)
			}
			if tt.lists {
				gone := before["s2"]
				gone.State, gone.EndedBy = sandbox.Gone, "roster"
				before["s2"] = gone
			}
			if diff := cmp.Diff(before, c.bindings()); diff != "" {
				t.Errorf("bindings (-want +got):\n%s", diff)
			}
		})
	}
}

// Two claimants repeat themselves for a while, to both replicas: that is one event, each of its minutes.
func TestAConflictIsOneEventAMinuteWhoeverHearsIt(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	replicas := []*replica{c.replica(), c.replica()}
	replicas[0].must(t, beatOf("a", "i1", endpointA))
	conflict := func() {
		t.Helper()
		for i := range 6 {
			if _, err := replicas[i%2].Heartbeat(t.Context(), beatOf("a", "i2", endpointB)); !errors.Is(err, node.ErrIDInUse) {
				t.Fatalf("Heartbeat = %v, want %v", err, node.ErrIDInUse)
			}
		}
	}
	events := func() int64 {
		return value[int64](c, `SELECT count(*) FROM sandbox_events WHERE kind = 'node_conflict' AND node_id = 'a'`)
	}
	conflict()
	if got := events(); got != 1 {
		t.Errorf("%d events of six refused heartbeats, want one", got)
	}
	// A minute later, for the database and for both processes.
	c.exec(`ALTER TABLE sandbox_events DISABLE TRIGGER USER`)
	c.exec(`UPDATE sandbox_events SET at = at - interval '61 seconds'`)
	for _, r := range replicas {
		r.conflicts = newSeldom()
	}
	conflict()
	if got := events(); got != 2 {
		t.Errorf("%d events after another minute, want two", got)
	}
	got := testutil.ToFloat64(replicas[0].metrics.conflicts) + testutil.ToFloat64(replicas[1].metrics.conflicts)
	if got != 12 {
		t.Errorf("node_conflicts_total = %v in both, want each of the twelve", got)
	}
}

// The node's clock may say what it likes.
func TestAClockThatJumpsChangesNothingButTheSkew(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	now := time.Now().UnixMilli()
	for _, reported := range []int64{now, now - 3_600_000, now + 86_400_000, 1, -1, 0, math.MinInt64, math.MaxInt64, now} {
		b := beatOf("a", "i1", endpointA)
		b.Snapshot.ReportedAtUnixMS = reported
		for _, path := range []string{"slow", "fast"} {
			if path == "slow" {
				c.exec(`UPDATE node_leases SET reconcile_due = '-infinity'`)
			}
			r.must(t, b)
			o, err := r.Get(t.Context(), "a", "")
			if err != nil {
				t.Fatal(err)
			}
			if o.Snapshot.Status != node.Ready || o.LeaseLeft <= 0 || o.LeaseLeft > r.cfg.LeaseTTL {
				t.Errorf("reported at %d, %s path: %v with %v left, want it ready for at most %v", reported, path, o.Snapshot.Status, o.LeaseLeft, r.cfg.LeaseTTL)
			}
			if null := value[bool](c, `SELECT skew_ms IS NULL FROM node_leases`); null != (reported == 0) {
				t.Errorf("reported at %d, %s path: skew is null: %t", reported, path, null)
			}
		}
	}
	b := beatOf("b", "i1", endpointB)
	b.Snapshot.ReportedAtUnixMS = now - 7_200_000
	r.must(t, b)
	if err := r.showStatus(t.Context(), map[node.ID]node.Status{}); err != nil {
		t.Fatal(err)
	}
	if got := testutil.ToFloat64(r.metrics.skew); got < 7_000 || got > 9_000 {
		t.Errorf("node_skew_seconds = %v, want the two hours of the worst", got)
	}
	// Silence is judged by the database: not even a clock a day ahead keeps a node well.
	c.exec(`UPDATE node_leases SET reported_at_unix_ms = 1 + extract(epoch FROM clock_timestamp() + interval '1 day')::bigint * 1000,
	        expires_at = clock_timestamp() - interval '1 millisecond' WHERE node_id = 'b'`)
	if o, err := r.Get(t.Context(), "b", ""); err != nil || o.Snapshot.Status != node.Unhealthy {
		t.Errorf("a silent node with its clock ahead is %v (%v), want it unhealthy", o.Snapshot.Status, err)
	}
	if err := r.showStatus(t.Context(), map[node.ID]node.Status{}); err != nil {
		t.Fatal(err)
	}
	if got := testutil.ToFloat64(r.metrics.skew); got > 60 {
		t.Errorf("node_skew_seconds = %v, want that of live nodes", got)
	}
}

// A name is resolved when it is registered.
func TestANameIsRegisteredWhereItsAddressesAreAllowed(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	if _, err := r.Heartbeat(t.Context(), beatOf("a", "i1", "http://nowhere.invalid:8001")); err == nil {
		t.Error("a name that does not resolve was registered")
	}
	r.must(t, beatOf("a", "i1", "HTTP://localhost:8001/"))
	if got := value[string](c, `SELECT endpoint FROM nodes`); got != "http://localhost:8001" {
		t.Errorf("endpoint = %q, want its one spelling", got)
	}
	r.must(t, beatOf("a", "i1", "http://localhost:8001"))
	if got := testutil.ToFloat64(r.metrics.heartbeats.WithLabelValues(pathLease)); got != 1 {
		t.Errorf("%v heartbeats were plain, want that with the other spelling", got)
	}
}

// What one heartbeat writes into the log that replicas and backups read, in batches of 20, less the commit.
func TestAPlainHeartbeatIsASmallRecord(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	const batch, most = 20, 260 // bytes of a heartbeat
	beats := make([]*prepared, batch)
	for i := range beats {
		id, endpoint := nodeAt(i)
		b := beatOf(id, "i1", endpoint, fmt.Sprintf("s%d", i))
		b.Snapshot.MemoryUsedBytes, b.Snapshot.CPUPercent, b.Snapshot.SandboxCount = 5<<30, 37, 1
		r.must(t, b)
		var err error
		if beats[i], err = r.prepare(b); err != nil {
			t.Fatal(err)
		}
	}
	type wal struct {
		Plan struct {
			Rows    float64 `json:"Actual Rows"`
			Records int     `json:"WAL Records"`
			Images  int     `json:"WAL FPI"`
			Bytes   int     `json:"WAL Bytes"`
		}
	}
	var last []wal
	for range 20 { // another test's checkpoint makes the next change of a page a full image
		rows, err := r.db.Query(t.Context(), "EXPLAIN (ANALYZE, WAL, TIMING OFF, FORMAT JSON) "+renewLeasesSQL, withTTL(columns(beats)))
		if err != nil {
			t.Fatal(err)
		}
		rows.Next()
		if err := rows.Scan(&last); err != nil {
			t.Fatal(err)
		}
		rows.Close()
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
		if p := last[0].Plan; p.Rows == batch && p.Images == 0 && p.Bytes > 0 {
			if each := p.Bytes / batch; each > most {
				t.Errorf("%d bytes of WAL for each of %d plain heartbeats, want at most %d", each, batch, most)
			}
			return
		}
	}
	t.Errorf("no batch without full images was seen: %+v", last)
}
