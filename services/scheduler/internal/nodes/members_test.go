package nodes

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
)

func TestUnregister(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		given    string
		node     node.ID
		instance string
		want     error
		parked   bool
	}{
		"the instance that has the lease":       {"", "a", "i1", nil, true},
		"the instance that has it, expired":     {`UPDATE node_leases SET expires_at = now() - interval '1 hour'`, "a", "i1", nil, true},
		"another instance, while it lives":      {"", "a", "i2", node.ErrInstanceMismatch, false},
		"another instance, though it expired":   {`UPDATE node_leases SET expires_at = now() - interval '1 hour'`, "a", "i2", node.ErrInstanceMismatch, false},
		"any instance, when it has ended":       {`UPDATE node_leases SET expires_at = now(), ended_at = now()`, "a", "i2", nil, false},
		"any instance, where there is no lease": {`DELETE FROM node_leases`, "a", "i2", nil, true},
		"a node nobody knows":                   {"", "x", "i1", nil, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			r := c.replica()
			b := beatOf("a", "i1", endpointA, "s")
			b.Peer = &Peer{Backend: "b", Address: "x:1"}
			r.must(t, b)
			_, err := r.routes.Record(t.Context(), bindings.Assignment{Sandboxes: []sandbox.ID{"young"}, Node: "a", Endpoint: endpointA})
			if err != nil {
				t.Fatal(err)
			}
			c.holder("a")
			if tt.given != "" {
				c.exec(tt.given)
			}
			for range 2 { // it may repeat
				if err := r.Unregister(t.Context(), tt.node, tt.instance); !errors.Is(err, tt.want) {
					t.Errorf("Unregister = %v, want %v", err, tt.want)
				}
			}
			for _, id := range []sandbox.ID{"s", "young"} {
				if got := c.bindings()[id]; (got.State == sandbox.Parked && got.EndedBy == "unregistered") != tt.parked {
					t.Errorf("binding = %+v, want it parked: %t", got, tt.parked)
				}
			}
			_, err = r.routes.Lookup(t.Context(), "s")
			if gone := errors.Is(err, sandbox.ErrNotFound); gone != tt.parked {
				t.Errorf("Lookup = %v, want not found: %t", err, tt.parked)
			}
			left := value[int64](c, `SELECT (SELECT count(*) FROM reservations) + (SELECT count(*) FROM peer_endpoints) + (SELECT count(*) FROM p2p_holders)`)
			if (left == 0) != tt.parked {
				t.Errorf("%d holds, peers and holders of artifacts are left, want none: %t", left, tt.parked)
			}
		})
	}
}

func TestSandboxesComeBackWithTheNextRosterAlsoUnderANewNodeID(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA, "s1", "s2"))
	if err := r.Unregister(t.Context(), "a", "i1"); err != nil {
		t.Fatal(err)
	}
	if observed, err := r.ListObserved(t.Context(), ""); err != nil || len(observed) != 0 {
		t.Errorf("ListObserved = %+v, %v, want nobody", observed, err)
	}
	r.must(t, beatOf("b", "i1", endpointB, "s1"))
	r.must(t, beatOf("a", "i2", endpointA, "s2"))
	want := map[sandbox.ID]bindingRow{
		"s1": {ID: "s1", State: sandbox.Bound, Node: "b", Incarnation: 2},
		"s2": {ID: "s2", State: sandbox.Bound, Node: "a", Incarnation: 1},
	}
	if diff := cmp.Diff(want, c.bindings()); diff != "" {
		t.Errorf("bindings (-want +got):\n%s", diff)
	}
}

// An equal roster after a clean stop is not the roster that was compared: its bindings were parked.
func TestTheSameInstanceComesBackWithTheSameRoster(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA, "s"))
	if err := r.Unregister(t.Context(), "a", "i1"); err != nil {
		t.Fatal(err)
	}
	r.must(t, beatOf("a", "i1", endpointA, "s"))
	if got := c.bindings()["s"].State; got != sandbox.Bound {
		t.Errorf("state = %s, want bound", got)
	}
}

func TestStaticNodesAreExactlyThoseListed(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("reg", "i1", "http://127.0.0.1:9000"))
	r.must(t, beatOf("b", "i1", "http://127.0.0.1:9001"))
	apply := func(listed ...StaticNode) {
		t.Helper()
		if err := r.ApplyStatic(t.Context(), listed); err != nil {
			t.Fatal(err)
		}
	}
	nodes := func() string {
		return value[string](c, `SELECT string_agg(concat_ws(' ', node_id, endpoint, source, trusted, present), ', ' ORDER BY node_id) FROM nodes`)
	}
	apply(StaticNode{"a", "http://203.0.113.9:1/"}, StaticNode{"b", "http://127.0.0.1:9001"})
	want := "a http://203.0.113.9:1 static t t, b http://127.0.0.1:9001 static t t, reg http://127.0.0.1:9000 registered f t"
	if got := nodes(); got != want {
		t.Errorf("nodes = %s, want %s", got, want)
	}
	feed, versions := c.feed(), c.versions()
	apply(StaticNode{"a", "http://203.0.113.9:1"}, StaticNode{"b", "http://127.0.0.1:9001"})
	if diff := cmp.Diff(versions, c.versions()); diff != "" {
		t.Errorf("applied again, the same list changed rows (-before +after):\n%s", diff)
	}
	apply(StaticNode{"b", "http://127.0.0.1:9002"})
	want = "a http://203.0.113.9:1 static t f, b http://127.0.0.1:9002 static t t, reg http://127.0.0.1:9000 registered f t"
	if got := nodes(); got != want {
		t.Errorf("nodes = %s, want %s", got, want)
	}
	if got := c.feed() - feed; got != 1 {
		t.Errorf("feed rows = %d, want 1 of the endpoint that changed", got)
	}

	members, err := r.ListPresent(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Member{{"b", "http://127.0.0.1:9002"}, {"reg", "http://127.0.0.1:9000"}}, members); diff != "" {
		t.Errorf("ListPresent (-want +got):\n%s", diff)
	}
	if _, err := r.Heartbeat(t.Context(), beatOf("b", "i1", "http://127.0.0.1:9001")); !errors.Is(err, node.ErrBadEndpoint) {
		t.Errorf("a live node with the endpoint that was listed before: %v, want %v", err, node.ErrBadEndpoint)
	}
	if _, err := r.Heartbeat(t.Context(), Beat{Node: "a", Instance: "i1"}); !errors.Is(err, node.ErrNotListed) {
		t.Errorf("a node that is no longer listed: %v, want %v", err, node.ErrNotListed)
	}
	r.must(t, Beat{Node: "b", Instance: "i1", Caller: "127.0.0.1"}) // as AgentENV's nodes do: no endpoint
}

// A node whose lease lives is absent at once, not when its roster is due.
func TestAnAbsentNodesNextHeartbeatIsRefused(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	if err := r.ApplyStatic(t.Context(), []StaticNode{{"a", endpointA}}); err != nil {
		t.Fatal(err)
	}
	b := Beat{Node: "a", Instance: "i1", Caller: "127.0.0.1", Roster: roster("s")}
	r.must(t, b)
	r.must(t, b)
	if err := r.ApplyStatic(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Heartbeat(t.Context(), b); !errors.Is(err, node.ErrNotListed) {
		t.Errorf("Heartbeat = %v, want %v", err, node.ErrNotListed)
	}
	if got := c.bindings()["s"].State; got != sandbox.Bound {
		t.Errorf("state = %s, want bound: what vanished from a list keeps its sandboxes", got)
	}
}

func TestAStaticListWithMistakesIsNotAppliedAtAll(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	err := r.ApplyStatic(t.Context(), []StaticNode{
		{"good", endpointA}, {"bad id", endpointA}, {"form", "127.0.0.1:8000"}, {"twice", endpointA}, {"twice", endpointB},
	})
	if err == nil {
		t.Fatal("ApplyStatic = nil, want its mistakes")
	}
	if !errors.Is(err, node.ErrBadID) || !errors.Is(err, route.ErrNotAllowed) {
		t.Errorf("ApplyStatic = %v, want it to be both mistakes", err)
	}
	for _, name := range []string{`"bad id"`, `"form"`, `"twice"`} {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("ApplyStatic = %v, want %s named", err, name)
		}
	}
	if got := value[int64](c, `SELECT count(*) FROM nodes`); got != 0 {
		t.Errorf("%d nodes were written, want none", got)
	}
}

func TestRegisteredNodesAreAbsentLongAfterTheirLease(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	if err := r.ApplyStatic(t.Context(), []StaticNode{{"static", "http://127.0.0.1:9000"}}); err != nil {
		t.Fatal(err)
	}
	r.must(t, Beat{Node: "static", Instance: "i1"})
	r.must(t, beatOf("short", "i1", endpointA))
	r.must(t, beatOf("long", "i1", endpointB, "s"))
	c.exec(`UPDATE node_leases SET expires_at = now() - interval '59 minutes' WHERE node_id = 'short'`)
	c.exec(`UPDATE node_leases SET expires_at = now() - interval '61 minutes' WHERE node_id <> 'short'`)
	if err := r.expire(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := value[string](c, `SELECT string_agg(node_id, ' ' ORDER BY node_id) FROM nodes WHERE present`); got != "short static" {
		t.Errorf("present = %s, want short and static", got)
	}
	answer := r.must(t, beatOf("long", "i2", "http://127.0.0.1:8009", "s")) // it comes back, elsewhere
	if answer.Epoch != 2 || c.bindings()["s"].State != sandbox.Bound {
		t.Errorf("back: %+v, binding %+v, want epoch 2 and its sandbox kept", answer, c.bindings()["s"])
	}
}

func TestObservedNodesAreListedWithTheirEffectiveStatus(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	given := map[node.ID]string{
		"ready":          `SELECT`,
		"said-unhealthy": `UPDATE node_leases SET reported_status = 3 WHERE node_id = 'said-unhealthy'`,
		"said-nothing":   `UPDATE node_leases SET reported_status = 0 WHERE node_id = 'said-nothing'`,
		"expired":        `UPDATE node_leases SET expires_at = now() - interval '1 second' WHERE node_id = 'expired'`,
		"absent":         `UPDATE nodes SET present = false, gone_at = now() WHERE node_id = 'absent'`,
		"lingering":      `UPDATE nodes SET lingering = true WHERE node_id = 'lingering'`,
		"cordoned":       `UPDATE nodes SET cordoned = true WHERE node_id = 'cordoned'`,
		"draining":       `UPDATE nodes SET drain_id = 7 WHERE node_id = 'draining'`,
		"unregistered":   `UPDATE node_leases SET expires_at = now(), ended_at = now() WHERE node_id = 'unregistered'`,
	}
	port := 8100
	for id, change := range given {
		port++
		b := beatOf(string(id), "i1", fmt.Sprintf("http://127.0.0.1:%d", port))
		if id == "ready" {
			b.Cluster, b.Labels, b.Capabilities = " c2 ", map[string]string{"zone": "z"}, []string{"b", "a"}
			b.Machine = &Machine{CPUModel: "m", CPUConfig: `{"x":1}`}
			b.Snapshot.Disks = []Disk{{MountPoint: "/", UsedBytes: 1, TotalBytes: 2}}
		}
		r.must(t, b)
		c.exec(change)
	}
	observed, err := r.ListObserved(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, o := range observed {
		got = append(got, string(o.ID)+" "+o.Snapshot.Status.String())
	}
	want := []string{
		"absent connecting", "cordoned lingering", "draining lingering", "expired unhealthy", "lingering lingering",
		"ready ready", "said-nothing connecting", "said-unhealthy unhealthy",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("ListObserved (-want +got):\n%s", diff)
	}

	statuses := map[node.ID]node.Status{"ready": node.Unhealthy, "cordoned": node.Ready, "expired": node.Ready, "forgotten": node.Ready}
	var log strings.Builder
	r.log = slog.New(slog.NewTextHandler(&log, nil))
	if err := r.showStatus(t.Context(), statuses); err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(log.String(), "\n"); got != 2 || !strings.Contains(log.String(), "node=expired") || !strings.Contains(log.String(), "node=ready") {
		t.Errorf("log = %s, want that one became unhealthy and one well", log.String())
	}
	if len(statuses) != len(want) {
		t.Errorf("statuses = %v, want those of now", statuses)
	}
	for status, count := range map[string]float64{"ready": 1, "connecting": 2, "unhealthy": 2, "lingering": 3, "unspecified": 0} {
		if got := testutil.ToFloat64(r.metrics.observed.WithLabelValues(status)); got != count {
			t.Errorf("observed_nodes{status=%s} = %v, want %v", status, got, count)
		}
	}

	one, err := r.Get(t.Context(), "ready", "c2")
	if err != nil {
		t.Fatal(err)
	}
	if time.Since(one.LastSeen) > time.Hour || one.LeaseLeft <= 0 || one.LeaseLeft > r.cfg.LeaseTTL {
		t.Errorf("last seen %v, lease left %v", one.LastSeen, one.LeaseLeft)
	}
	one.LastSeen, one.LeaseLeft, one.Snapshot.ReportedAtUnixMS = time.Time{}, 0, 0
	wantOne := Observed{
		ID: "ready", Endpoint: one.Endpoint, Cluster: "c2", Instance: "i1", Version: "v1", Epoch: 1,
		Machine: &Machine{CPUModel: "m", CPUConfig: `{"x":1}`}, Labels: map[string]string{"zone": "z"}, Capabilities: []string{"a", "b"},
		Snapshot: Snapshot{
			Status: node.Ready, CPUCount: 4, MemoryTotalBytes: 8 << 30, Disks: []Disk{{MountPoint: "/", UsedBytes: 1, TotalBytes: 2}},
		},
	}
	if diff := cmp.Diff(wantOne, one); diff != "" {
		t.Errorf("Get (-want +got):\n%s", diff)
	}
	for _, ask := range []struct {
		id      node.ID
		cluster string
	}{{"ready", "c1"}, {"unregistered", ""}, {"never", ""}} {
		if _, err := r.Get(t.Context(), ask.id, ask.cluster); !errors.Is(err, node.ErrNotObserved) {
			t.Errorf("Get(%s, %q) = %v, want %v", ask.id, ask.cluster, err, node.ErrNotObserved)
		}
	}
	if inC2, err := r.ListObserved(t.Context(), " c2 "); err != nil || len(inC2) != 1 {
		t.Errorf("ListObserved(c2) = %d nodes, %v, want 1", len(inC2), err)
	}
}

func TestAMachineIsKeptWhenItIsNotSentAgain(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	b := beatOf("a", "i1", endpointA)
	b.Machine = &Machine{CPUArchitecture: "x86_64", CPUConfig: `{"x":1}`}
	b.Peer = &Peer{Backend: "b", Address: "x:1"}
	r.must(t, b)
	b.Machine = &Machine{CPUArchitecture: "x86_64"} // as AgentENV's nodes do after the first success
	r.must(t, b)
	b.Machine, b.Peer = nil, &Peer{Backend: "b"} // no address: no peer
	r.must(t, b)
	got, err := r.Get(t.Context(), "a", "")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&Machine{CPUArchitecture: "x86_64", CPUConfig: `{"x":1}`}, got.Machine); diff != "" {
		t.Errorf("machine (-want +got):\n%s", diff)
	}
	if peers := value[int64](c, `SELECT count(*) FROM peer_endpoints`); peers != 0 {
		t.Errorf("%d peers, want none", peers)
	}
	if feed := c.feed(); feed != 1 {
		t.Errorf("feed rows = %d, want that of the registration: facts are no routes", feed)
	}
}

func TestEachDoorForEndpointsIsGuarded(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	w := r.writer(t, "one")
	for name, endpoint := range map[string]string{
		"a public address":         "http://8.8.8.8:80",
		"a link-local address":     "http://169.254.169.254:80",
		"the unspecified address":  "http://0.0.0.0:80",
		"a multicast address":      "http://224.0.0.1:80",
		"a mapped public address":  "http://[::ffff:8.8.8.8]:80",
		"an address in octal":      "http://010.0.0.1:80",
		"an address as one number": "http://167772161:80",
		"a zone":                   "http://[fe80::1%25eth0]:80",
		"userinfo":                 "http://u:p@10.0.0.1:80",
		"a path":                   "http://10.0.0.1:80/x",
		"a query":                  "http://10.0.0.1:80?x",
		"a fragment":               "http://10.0.0.1:80#x",
		"no port":                  "http://10.0.0.1",
		"port 0":                   "http://10.0.0.1:0",
		"a port that is too high":  "http://10.0.0.1:65536",
		"another scheme":           "gopher://10.0.0.1:80",
		"no scheme":                "10.0.0.1:80",
		"a newline":                "http://10.0.0.1:80\n",
		"a name that is a number":  "http://node.1:80",
	} {
		_, err := r.Heartbeat(t.Context(), beatOf("a", "i1", endpoint, "s"))
		if !errors.Is(err, route.ErrNotAllowed) && !errors.Is(err, node.ErrBadTag) {
			t.Errorf("%s: Heartbeat = %v, want it refused", name, err)
		}
		if err := r.Register(t.Context(), Registration{Node: "b", Endpoint: endpoint}); !errors.Is(err, route.ErrNotAllowed) && !errors.Is(err, node.ErrBadTag) {
			t.Errorf("%s: Register = %v, want it refused", name, err)
		}
		unfit, err := r.ApplyDiscovered(t.Context(), w, []DiscoveredNode{{ID: "k", Endpoint: endpoint}})
		if err != nil || len(unfit) != 1 {
			t.Errorf("%s: ApplyDiscovered = %v, %v, want it left out", name, unfit, err)
		}
	}
	if got := value[int64](c, `SELECT (SELECT count(*) FROM nodes) + (SELECT count(*) FROM bindings) + (SELECT count(*) FROM route_feed)`); got != 0 {
		t.Errorf("%d rows were stored, want none", got)
	}
	r.must(t, beatOf("a", "i1", "http://[fc00::1]:80/", "s"))
	if got := value[string](c, `SELECT endpoint FROM nodes`); got != "http://[fc00::1]:80" {
		t.Errorf("endpoint = %s, want it without its slash", got)
	}
}
