package discovery

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
	"k8s.io/client-go/rest"

	"berth/migrations"
	"berth/pkg/pgtest"
	"berth/services/internal/route"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/nodes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// waitLimit is far above what anything here takes: reaching it is a failure.
const waitLimit = time.Minute

// cluster is an API server, a database, and any number of replicas over both.
type cluster struct {
	*apiServer
	t  *testing.T
	db *pgtest.Database
}

func newCluster(t *testing.T, streams bool) *cluster {
	t.Helper()
	return &cluster{apiServer: newAPIServer(streams), t: t, db: pgtest.New(t, migrations.FS)}
}

// replica is one scheduler's follower.
type replica struct {
	*Kubernetes
	door *door
	logs *logs
	stop func() // lets it end cleanly, once
}

// logs is what was logged.
type logs struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logs) count(message string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), message)
}

// selecting is the configuration with both selectors.
func selecting(s *Settings) {
	s.IgnorePodSelector, s.NoSchedulePodSelector = "role=other", "drain in (yes)"
}

func quickPace() pace {
	return pace{
		syncLimit: 2 * time.Second, retryMin: 10 * time.Millisecond, retryMax: 100 * time.Millisecond, deafLimit: 100 * time.Millisecond, doubtLimit: 100 * time.Millisecond,
		renewEvery: 50 * time.Millisecond, burstGap: 5 * time.Millisecond, burstLimit: 50 * time.Millisecond,
	}
}

// replica runs a follower with a door of its own until the test ends.
func (c *cluster) replica() *replica {
	c.t.Helper()
	return c.replicaAt(c.door(c.t), func(*pace) {})
}

func (c *cluster) replicaAt(d *door, change func(*pace)) *replica {
	c.t.Helper()
	guard, err := route.NewGuard(route.GuardConfig{CIDRs: route.DefaultCIDRs, Schemes: route.DefaultSchemes})
	if err != nil {
		c.t.Fatal(err)
	}
	db := c.db.As(c.t, "berth_scheduler")
	quiet := slog.New(slog.DiscardHandler)
	routes := bindings.New(db, bindings.DefaultConfig(), quiet, prometheus.NewRegistry())
	known := nodes.New(db, routes, nodes.DefaultConfig(), guard, quiet, prometheus.NewRegistry())
	r := &replica{door: d, logs: &logs{}}
	r.Kubernetes = newKubernetes(config(c.t, selecting), known, slog.New(slog.NewTextHandler(r.logs, nil)), NewMetrics(prometheus.NewRegistry(), 0))
	r.rest, r.pace = r.door.config, quickPace()
	change(&r.pace)
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			c.t.Errorf("Run = %v, want nil", err)
		}
	})
	c.t.Cleanup(r.stop)
	return r
}

// row is a present node.
type row struct {
	ID        string
	Endpoint  string
	Lingering bool
}

func (c *cluster) rows() []row {
	c.t.Helper()
	found, err := c.db.Query(c.t.Context(), `SELECT node_id, endpoint, lingering FROM nodes WHERE present ORDER BY node_id`)
	if err != nil {
		c.t.Fatal(err)
	}
	list, err := pgx.CollectRows(found, pgx.RowToStructByPos[row])
	if err != nil {
		c.t.Fatal(err)
	}
	return list
}

// await returns once ok says so.
func (c *cluster) await(what string, ok func() bool) {
	c.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.NewTimer(waitLimit)
	defer late.Stop()
	for !ok() {
		select {
		case <-late.C:
			c.t.Fatalf("%s: not within %v", what, waitLimit)
		case <-tick.C:
		}
	}
}

// awaitRows returns once the present nodes are want.
func (c *cluster) awaitRows(when string, want ...row) {
	c.t.Helper()
	diff := ""
	defer func() {
		if c.t.Failed() {
			c.t.Logf("nodes %s (-want +got):\n%s", when, diff)
		}
	}()
	c.await("nodes "+when, func() bool {
		got := c.rows()
		diff = cmp.Diff(want, got)
		return slices.Equal(want, got)
	})
}

func (c *cluster) holder() (holder string) {
	c.t.Helper()
	const liveSQL = `SELECT COALESCE((SELECT holder FROM discovery_writer WHERE expires_at > clock_timestamp()), '')`
	if err := c.db.QueryRow(c.t.Context(), liveSQL).Scan(&holder); err != nil {
		c.t.Fatal(err)
	}
	return holder
}

var (
	rowA = row{ID: "a", Endpoint: "http://10.0.0.1:8000"}
	rowB = row{ID: "b", Endpoint: "http://10.0.0.2:8000"}
	rowC = row{ID: "c", Endpoint: "http://10.0.0.3:8000"}
)

func (r row) lingers() row {
	r.Lingering = true
	return r
}

// both runs test against a server that streams lists and one that is too old for that.
func both(t *testing.T, test func(t *testing.T, c *cluster)) {
	t.Helper()
	for name, streams := range map[string]bool{"lists by watch": true, "lists only": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, newCluster(t, streams))
		})
	}
}

func TestRowsFollowSlicesAndPods(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *cluster) {
		c.putSlice("s-1", slice(serving("a", "10.0.0.1"), serving("b", "10.0.0.2")))
		other := slice(serving("x", "10.0.0.9"))
		other.Name, other.Labels = "t-1", map[string]string{"kubernetes.io/service-name": "t"}
		c.put("endpointslices", sliceObject{other})
		c.putPod("b", "ub", map[string]string{"role": "other"})
		r := c.replica()
		c.awaitRows("at first", rowA)
		c.putSlice("s-2", slice(serving("c", "10.0.0.3", terminating)))
		c.awaitRows("after another slice", rowA, rowC.lingers())
		c.putPod("b", "ub", map[string]string{"role": "node"})
		c.awaitRows("after a Pod is ignored no more", rowA, rowB, rowC.lingers())
		c.putPod("a", "ua", map[string]string{"drain": "yes"})
		c.awaitRows("after a Pod takes no creates", rowA.lingers(), rowB, rowC.lingers())
		c.remove("pods", "a")
		c.bookmark()
		c.putSlice("s-1", slice(serving("a", "10.0.0.1")))
		c.awaitRows("after an endpoint left, and a Pod", rowA, rowC.lingers())
		c.remove("endpointslices", "s-2")
		c.awaitRows("after a slice left", rowA)
		c.remove("endpointslices", "s-1")
		c.awaitRows("after the last left")
		if got := r.logs.count("level=WARN"); got != 0 {
			t.Errorf("%d warnings were logged, want none:\n%s", got, &r.logs.text)
		}
		if lists := c.questions("endpointslices", "list"); c.streams && lists > 0 {
			t.Errorf("%d lists were asked beside those by watch", lists)
		}
	})
}

func TestNothingIsAppliedBeforeEverythingIsListed(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *cluster) {
		c.putSlice("s-1", slice(serving("a", "10.0.0.1"), serving("b", "10.0.0.2")))
		c.putPod("b", "ub", map[string]string{"role": "other"})
		d := c.door(t)
		d.refuse(http.StatusForbidden, "pods")
		r := c.replicaAt(d, func(p *pace) { p.syncLimit = 100 * time.Millisecond })
		c.await("three tries", func() bool { return r.logs.count("nodes cannot be listed") >= 3 })
		if got := c.rows(); len(got) > 0 || c.holder() != "" {
			t.Errorf("rows %v and writer %q after a list without Pods, want none", got, c.holder())
		}
		if got := testutil.ToFloat64(r.metrics.failing.WithLabelValues(sourceKubernetes)); got != 1 {
			t.Errorf("failing = %v, want 1", got)
		}
		d.refuse(0, "pods")
		c.awaitRows("after Pods could be listed", rowA)
		c.await("the gauge", func() bool { return testutil.ToFloat64(r.metrics.failing.WithLabelValues(sourceKubernetes)) == 0 })
	})
}

func TestWatchesThatAreCutGoOn(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *cluster) {
		c.putSlice("s-1", slice(serving("a", "10.0.0.1")))
		r := c.replica()
		c.awaitRows("at first", rowA)
		for i, after := range []struct {
			address string
			row     row
		}{{"10.0.0.2", rowB}, {"10.0.0.3", rowC}} {
			r.door.drop()
			c.putSlice("s-2", slice(serving(after.row.ID, after.address)))
			r.door.drop()
			c.awaitRows("after a cut", rowA, after.row)
			if i == 0 {
				c.bookmark()
			}
		}
	})
}

func TestAnExpiredWatchListsAgain(t *testing.T) {
	t.Parallel()
	for name, inStream := range map[string]bool{"told in the stream": true, "told when it begins again": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			both(t, func(t *testing.T, c *cluster) {
				c.putSlice("s-1", slice(serving("a", "10.0.0.1")))
				c.putSlice("s-2", slice(serving("b", "10.0.0.2")))
				r := c.replica()
				c.awaitRows("at first", rowA, rowB)
				before := c.questions("endpointslices", "list") + c.questions("endpointslices", "initial")
				// While it hears nothing one slice goes and one comes, and the log of that is gone.
				r.door.refuse(http.StatusInternalServerError, "endpointslices", "pods")
				r.door.drop()
				c.remove("endpointslices", "s-1")
				c.putSlice("s-3", slice(serving("c", "10.0.0.3")))
				c.compact(inStream)
				r.door.refuse(0, "endpointslices", "pods")
				c.awaitRows("after the log was compacted", rowB, rowC)
				after := c.questions("endpointslices", "list") + c.questions("endpointslices", "initial")
				if after == before {
					t.Error("the slices were not listed again")
				}
			})
		})
	}
}

func TestWhatIsKnownStaysWhileTheAPIServerIsAway(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *cluster) {
		c.putSlice("s-1", slice(serving("a", "10.0.0.1")))
		r := c.replica()
		c.awaitRows("at first", rowA)
		failing := r.metrics.failing.WithLabelValues(sourceKubernetes)
		failures := r.metrics.failures.WithLabelValues(sourceKubernetes)
		r.door.refuse(http.StatusInternalServerError, "endpointslices", "pods")
		r.door.drop()
		c.putSlice("s-1", slice())
		before := testutil.ToFloat64(failures)
		c.await("ten failures", func() bool { return testutil.ToFloat64(failures) >= before+10 })
		if got := c.rows(); !slices.Equal(got, []row{rowA}) {
			t.Errorf("rows = %v while nothing is heard, want a to stay", got)
		}
		if testutil.ToFloat64(failing) != 1 {
			t.Error("the gauge does not show that the source fails")
		}
		r.door.refuse(0, "endpointslices", "pods")
		c.awaitRows("after it came back")
		c.await("the gauge", func() bool { return testutil.ToFloat64(failing) == 0 })
		if told := r.logs.count("does not answer"); told > 3 {
			t.Errorf("%d lines tell of one outage, want one for each kind of object:\n%s", told, &r.logs.text)
		}
	})
}

func TestEveryReplicaWatchesAndOneWrites(t *testing.T) {
	t.Parallel()
	c := newCluster(t, true)
	c.putSlice("s-1", slice(serving("a", "10.0.0.1")))
	one := c.replica()
	c.awaitRows("at first", rowA)
	two := c.replica()
	c.await("the second to follow", func() bool { return two.logs.count("everything is listed") == 1 })
	fence := func() (fence int64) {
		if err := c.db.QueryRow(t.Context(), `SELECT fence FROM discovery_writer`).Scan(&fence); err != nil {
			t.Fatal(err)
		}
		return fence
	}
	first := fence()
	c.putSlice("s-2", slice(serving("b", "10.0.0.2")))
	c.awaitRows("with two replicas", rowA, rowB)
	if got := c.holder(); got != one.holder || fence() != first {
		t.Errorf("writer %q, fence %d; want still %q, %d", got, fence(), one.holder, first)
	}

	// The writer hears nothing any more: the other one writes.
	one.door.refuse(http.StatusInternalServerError, "endpointslices", "pods")
	one.door.drop()
	c.putSlice("s-2", slice())
	c.awaitRows("after the writer became deaf", rowA)
	if got := c.holder(); got != two.holder {
		t.Errorf("writer %q, want %q", got, two.holder)
	}
	one.door.refuse(0, "endpointslices", "pods")
	c.await("it to hear again", func() bool { return one.logs.count("answers again") >= 1 })

	// The writer ends cleanly: the other one need not wait for the lease.
	two.stop()
	c.putSlice("s-3", slice(serving("c", "10.0.0.3")))
	c.awaitRows("after the writer ended", rowA, rowC)
	if got := c.holder(); got != one.holder || fence() <= first {
		t.Errorf("writer %q, fence %d; want %q with a higher one than %d", got, fence(), one.holder, first)
	}

	// Somebody changes a row: the writer repairs it.
	if _, err := c.db.Exec(t.Context(), `UPDATE nodes SET lingering = true WHERE node_id = 'a'`); err != nil {
		t.Fatal(err)
	}
	c.awaitRows("after a row was changed by hand", rowA, rowC)
}

func TestOfTwoPodsWithOneNameTheCurrentIsAskedFor(t *testing.T) {
	t.Parallel()
	c := newCluster(t, true)
	c.putPod("a", "u2", nil)
	c.putSlice("s-1", slice(serving("a", "10.0.0.9", uid("u9"))))
	c.putSlice("s-2", slice(serving("a", "10.0.0.1", uid("u2"))))
	c.replica()
	c.awaitRows("at first", rowA)
	if c.questions("pods", "get") == 0 {
		t.Error("the Pod was not asked for")
	}
}

func TestAPodThatCannotBeAskedForHoldsNothingUpAndIsAskedForAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t, true)
	c.putPod("a", "u2", nil)
	c.putSlice("s-1", slice(serving("a", "10.0.0.9", uid("u9"))))
	c.putSlice("s-2", slice(serving("a", "10.0.0.1", uid("u2"))))
	d := c.door(t)
	answer := make(chan struct{})
	d.hang = answer
	c.replicaAt(d, func(*pace) {})
	guessed := row{"a", "http://10.0.0.9:8000", false}
	c.awaitRows("while nobody says which Pod is the newer", guessed)
	c.putSlice("s-3", slice(serving("c", "10.0.0.3")))
	c.awaitRows("after another change meanwhile", guessed, rowC)
	close(answer)
	c.awaitRows("once it is known, without a change", rowA, rowC)
}

func TestNodesOutsideTheNetworksAreLeftOutAndSaidOnce(t *testing.T) {
	t.Parallel()
	c := newCluster(t, true)
	c.putSlice("s-1", slice(serving("a", "10.0.0.1"), serving("b", "8.8.8.8")))
	r := c.replica()
	c.awaitRows("at first", rowA)
	c.putSlice("s-2", slice(serving("c", "10.0.0.3")))
	c.awaitRows("later", rowA, rowC)
	if got := r.logs.count("is left out"); got != 1 {
		t.Errorf("%d lines tell of the node that is left out, want one", got)
	}
	if got := testutil.ToFloat64(r.metrics.leftOut.WithLabelValues(sourceKubernetes)); got != 1 {
		t.Errorf("left out = %v, want 1", got)
	}
}

func TestOutsideAClusterThereAreNoNodesAndOneLine(t *testing.T) {
	t.Parallel()
	l := &logs{}
	k := newKubernetes(config(t, nil), nil, slog.New(slog.NewTextHandler(l, nil)), NewMetrics(prometheus.NewRegistry(), 0))
	asked := make(chan struct{}, 1)
	k.rest = func() (*rest.Config, error) {
		asked <- struct{}{}
		return nil, rest.ErrNotInCluster
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx) }()
	<-asked
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	if len(asked) > 0 || l.count("outside a cluster") > 1 {
		t.Errorf("it was tried again, or said more than once:\n%s", &l.text)
	}
}
