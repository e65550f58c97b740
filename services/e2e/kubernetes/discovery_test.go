//go:build kubernetes

package kubernetes

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"berth/migrations"
	"berth/pkg/migrate"
	"berth/pkg/pgtest"
)

const (
	namespace = "berth-nodes" // as the deployment has it
	service   = "berth-node"
	rights    = "../../../deployments/k8s/base/rbac.yaml"

	slicesPath = "/apis/discovery.k8s.io/v1/namespaces/" + namespace + "/endpointslices"
	podsPath   = "/api/v1/namespaces/" + namespace + "/pods"
)

// cluster is an API server, a database, and schedulers over both.
type cluster struct {
	*apiServer
	db         *pgtest.Database
	wire       *wire // from schedulers to the API server
	kubeconfig string
	token      string // of the schedulers' service account
	url        string
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{apiServer: startAPIServer(t), db: pgtest.New(t, migrations.FS)}
	for _, name := range []string{"berth", namespace} {
		c.must(http.MethodPost, "/api/v1/namespaces", object("v1", "Namespace", meta{Name: name}, nil))
	}
	c.must(http.MethodPost, "/api/v1/namespaces/berth/serviceaccounts", object("v1", "ServiceAccount", meta{Name: "berth-scheduler"}, nil))
	const rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/" + namespace
	c.apply(rights, map[string]string{"Role": rbac + "/roles", "RoleBinding": rbac + "/rolebindings"})
	var issued struct {
		Status struct {
			Token string `json:"token"`
		} `json:"status"`
	}
	answer := c.must(http.MethodPost, "/api/v1/namespaces/berth/serviceaccounts/berth-scheduler/token",
		object("authentication.k8s.io/v1", "TokenRequest", meta{}, map[string]any{"expirationSeconds": 3600}))
	if err := json.Unmarshal(answer, &issued); err != nil || issued.Status.Token == "" {
		t.Fatalf("no token in %s: %v", answer, err)
	}
	c.token, c.wire = issued.Status.Token, newWire(t, c.addr)
	c.write("kubeconfig", fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: test
contexts: [{name: test, context: {cluster: test, user: test}}]
clusters: [{name: test, cluster: {server: "https://%s", certificate-authority: %q}}]
users: [{name: test, user: {token: %q}}]
`, c.wire.addr(), c.certificate(), c.token))
	c.kubeconfig = c.path("kubeconfig")

	const login = "berth_scheduler_kubernetes"
	if err := migrate.EnsureLogin(t.Context(), c.db.URL, login, "secret", "berth_scheduler"); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(c.db.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(login, "secret")
	c.url = u.String()
	return c
}

// scheduler starts a scheduler process and returns once it is ready and has listed everything.
func (c *cluster) scheduler() *process {
	c.t.Helper()
	ops := freeAddr(c.t)
	p := run(c.t, program, "scheduler", "serve", "--database-url="+c.url, "--pool=4", "--log-level=debug", "--log-format=json",
		"--grpc-listen="+freeAddr(c.t), "--twirp-listen="+freeAddr(c.t), "--ops-listen="+ops, "--admin-listen=", "--drain-delay=0s",
		"--discovery-mode=kubernetes", "--discovery-kubernetes-namespace="+namespace, "--discovery-kubernetes-service-name="+service,
		"--discovery-kubernetes-port=http", "--discovery-kubernetes-kubeconfig="+c.kubeconfig,
		"--discovery-kubernetes-ignore-pod-selector=role=other", "--discovery-kubernetes-no-schedule-pod-selector=drain in (yes)")
	await(c.t, "a scheduler that has listed everything", func() bool {
		select {
		case <-p.ended:
			c.t.Fatalf("the scheduler ended:\n%s", p.last())
		default:
		}
		return p.said("everything is listed")
	})
	return p
}

type meta struct {
	Name   string            `json:"name,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
}

func object(version, kind string, m meta, spec any) map[string]any {
	o := map[string]any{"apiVersion": version, "kind": kind, "metadata": m}
	if spec != nil {
		o["spec"] = spec
	}
	return o
}

// pod creates a Pod; nobody starts it.
func (c *cluster) pod(name string, labels map[string]string) {
	c.t.Helper()
	c.must(http.MethodPost, podsPath, object("v1", "Pod", meta{name, labels}, map[string]any{
		"containers": []any{map[string]string{"name": "node", "image": "node"}},
	}))
}

func (c *cluster) label(pod, key string, value any) {
	c.t.Helper()
	c.must(http.MethodPatch, podsPath+"/"+pod, map[string]any{"metadata": map[string]any{"labels": map[string]any{key: value}}})
}

// endpoint is an endpoint of a Pod, as the controller would write it.
func endpoint(pod, address string, terminating bool) map[string]any {
	return map[string]any{
		"addresses":  []string{address},
		"conditions": map[string]bool{"ready": !terminating, "serving": true, "terminating": terminating},
		"targetRef":  map[string]string{"kind": "Pod", "namespace": namespace, "name": pod},
	}
}

// slice writes an EndpointSlice, whether it is there or not.
func (c *cluster) slice(name, family string, endpoints ...any) {
	c.t.Helper()
	if endpoints == nil {
		endpoints = []any{}
	}
	o := object("discovery.k8s.io/v1", "EndpointSlice", meta{name, map[string]string{"kubernetes.io/service-name": service}}, nil)
	o["addressType"], o["endpoints"] = family, endpoints
	o["ports"] = []any{map[string]any{"name": "http", "port": 8000, "protocol": "TCP"}}
	if status, _ := c.ask(http.MethodGet, slicesPath+"/"+name, adminToken, nil); status == http.StatusOK {
		c.must(http.MethodPut, slicesPath+"/"+name, o)
		return
	}
	c.must(http.MethodPost, slicesPath, o)
}

type row struct {
	ID        string
	Endpoint  string
	Lingering bool
}

var (
	nodeA = row{"node-a", "http://10.0.0.1:8000", false}
	nodeB = row{"node-b", "http://10.0.0.2:8000", false}
	nodeC = row{"node-c", "http://[fd00::3]:8000", false}
)

func (r row) lingers() row {
	r.Lingering = true
	return r
}

// awaitRows returns once the present nodes are want.
func (c *cluster) awaitRows(t *testing.T, want ...row) {
	t.Helper()
	diff := ""
	defer func() {
		if t.Failed() {
			t.Logf("nodes (-want +got):\n%s", diff)
		}
	}()
	await(t, "the nodes that are wanted", func() bool {
		got := c.rows()
		diff = cmp.Diff(want, got)
		return slices.Equal(want, got)
	})
}

func (c *cluster) rows() []row {
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

// writer is who may write, and under which fence.
type writer struct {
	Fence   int64
	Expires string
	Lives   bool
}

func (c *cluster) writer() (w writer) {
	const selectSQL = `SELECT fence, expires_at::text, expires_at > clock_timestamp() FROM discovery_writer`
	if err := c.db.QueryRow(c.t.Context(), selectSQL).Scan(&w.Fence, &w.Expires, &w.Lives); err != nil {
		c.t.Fatal(err)
	}
	return w
}

// writes reports whether p is the writer: it said so for the fence of now.
func (c *cluster) writes(p *process) bool {
	return p.said(`"fence":` + strconv.FormatInt(c.writer().Fence, 10))
}

func TestDiscoveryOnARealAPIServer(t *testing.T) {
	c := newCluster(t)
	t.Run("the deployment's rights are enough for discovery, and for nothing else", c.checkRights)

	c.slice("one", "IPv4", endpoint("node-a", "10.0.0.1", false), endpoint("node-b", "10.0.0.2", false))
	c.pod("node-b", map[string]string{"role": "other"})
	one, two := c.scheduler(), c.scheduler()
	t.Run("rows follow slices and Pods", c.checkRows)
	t.Run("watches that are cut go on", c.checkCuts)
	t.Run("an API server that is killed comes back", c.checkRestart)
	t.Run("a log that was compacted is listed again", c.checkCompaction)
	t.Run("the writer is killed and another takes over", func(t *testing.T) { one, two = c.checkKill(t, one, two) })
	t.Run("a writer that was paused changes nothing", func(t *testing.T) { c.checkPause(t, one, two) })
}

func (c *cluster) checkRights(t *testing.T) {
	tests := map[string]struct {
		method, path string
		body         any
		want         int
	}{
		"list slices":           {method: http.MethodGet, path: slicesPath, want: http.StatusOK},
		"get a Pod":             {method: http.MethodGet, path: podsPath + "/none", want: http.StatusNotFound},
		"list Pods elsewhere":   {method: http.MethodGet, path: "/api/v1/namespaces/berth/pods", want: http.StatusForbidden},
		"list all Pods":         {method: http.MethodGet, path: "/api/v1/pods", want: http.StatusForbidden},
		"list secrets":          {method: http.MethodGet, path: "/api/v1/namespaces/" + namespace + "/secrets", want: http.StatusForbidden},
		"list services":         {method: http.MethodGet, path: "/api/v1/namespaces/" + namespace + "/services", want: http.StatusForbidden},
		"write a slice":         {method: http.MethodPost, path: slicesPath, body: map[string]any{}, want: http.StatusForbidden},
		"delete a Pod":          {method: http.MethodDelete, path: podsPath + "/none", want: http.StatusForbidden},
		"read what a Pod says":  {method: http.MethodGet, path: podsPath + "/none/log", want: http.StatusForbidden},
		"work inside of a Pod ": {method: http.MethodPost, path: podsPath + "/none/exec?command=id", want: http.StatusForbidden},
	}
	for name, tt := range tests {
		body, err := json.Marshal(tt.body)
		if err != nil {
			t.Fatal(err)
		}
		if status, answer := c.ask(tt.method, tt.path, c.token, body); status != tt.want {
			t.Errorf("%s: %d %s, want %d", name, status, answer, tt.want)
		}
	}
}

func (c *cluster) checkRows(t *testing.T) {
	c.awaitRows(t, nodeA)
	c.slice("two", "IPv6", endpoint("node-a", "fd00::1", false), endpoint("node-c", "fd00::3", true))
	c.awaitRows(t, nodeA, nodeC.lingers())
	c.label("node-b", "role", nil)
	c.awaitRows(t, nodeA, nodeB, nodeC.lingers())
	c.label("node-b", "drain", "yes")
	c.awaitRows(t, nodeA, nodeB.lingers(), nodeC.lingers())
	c.must(http.MethodDelete, podsPath+"/node-b?gracePeriodSeconds=0", nil)
	c.awaitRows(t, nodeA, nodeB, nodeC.lingers())
	c.slice("two", "IPv6", endpoint("node-c", "fd00::3", false))
	c.awaitRows(t, nodeA, nodeB, nodeC)
	c.must(http.MethodDelete, slicesPath+"/two", nil)
	c.awaitRows(t, nodeA, nodeB)
}

func (c *cluster) checkCuts(t *testing.T) {
	for _, with := range []bool{true, false} {
		c.wire.cut()
		if with {
			c.slice("two", "IPv6", endpoint("node-c", "fd00::3", false))
			c.wire.mend()
			c.awaitRows(t, nodeA, nodeB, nodeC)
			continue
		}
		c.must(http.MethodDelete, slicesPath+"/two", nil)
		c.wire.mend()
		c.awaitRows(t, nodeA, nodeB)
	}
}

func (c *cluster) checkRestart(t *testing.T) {
	c.process.kill()
	before := c.rows()
	c.start()
	if got := c.rows(); !slices.Equal(got, before) {
		t.Errorf("rows %v while the API server was away, want %v", got, before)
	}
	c.slice("two", "IPv6", endpoint("node-c", "fd00::3", false))
	c.awaitRows(t, nodeA, nodeB, nodeC)
}

// checkCompaction lets schedulers hear nothing while objects change, their history is compacted, and the
// API server starts anew, which knows only what is there now.
func (c *cluster) checkCompaction(t *testing.T) {
	c.wire.cut()
	c.must(http.MethodDelete, slicesPath+"/two", nil)
	for i := range 5 {
		c.slice("one", "IPv4", endpoint("node-a", "10.0.0.1", i%2 == 0), endpoint("node-b", "10.0.0.2", false))
	}
	c.process.kill()
	c.compact()
	c.start()
	c.slice("one", "IPv4", endpoint("node-a", "10.0.0.1", false))
	c.wire.mend()
	c.awaitRows(t, nodeA)
}

// checkKill returns the scheduler that took over, and a new one.
func (c *cluster) checkKill(t *testing.T, one, two *process) (taker, other *process) {
	if !c.writes(one) {
		one, two = two, one
	}
	if !c.writes(one) || c.writes(two) {
		t.Fatalf("not exactly one scheduler writes under fence %d", c.writer().Fence)
	}
	before := c.writer()
	one.kill()
	c.slice("one", "IPv4", endpoint("node-a", "10.0.0.1", false), endpoint("node-b", "10.0.0.2", false))
	c.awaitRows(t, nodeA, nodeB)
	after := c.writer()
	if after.Fence != before.Fence+1 || !c.writes(two) {
		t.Errorf("fence %d after %d, want the other scheduler to have taken over once", after.Fence, before.Fence)
	}
	return two, c.scheduler()
}

func (c *cluster) checkPause(t *testing.T, paused, taker *process) {
	before := c.writer()
	paused.signal(syscall.SIGSTOP)
	c.slice("one", "IPv4", endpoint("node-b", "10.0.0.2", false))
	c.awaitRows(t, nodeB)
	after := c.writer()
	if after.Fence != before.Fence+1 || !c.writes(taker) {
		t.Errorf("fence %d after %d, want the other scheduler to have taken over once", after.Fence, before.Fence)
	}
	paused.signal(syscall.SIGCONT)
	await(t, "the paused one to learn that it does not write", func() bool { return paused.said("another replica writes what Kubernetes lists now") })
	for range 2 {
		last := c.writer()
		await(t, "a renewal", func() bool { return c.writer().Expires != last.Expires })
	}
	if got := c.writer(); got.Fence != after.Fence || !got.Lives {
		t.Errorf("writer %+v, want still fence %d", got, after.Fence)
	}
	if got := c.rows(); !slices.Equal(got, []row{nodeB}) {
		t.Errorf("rows %v, want b alone", got)
	}
}

func TestOutsideAClusterASchedulerServesWithoutNodes(t *testing.T) {
	db := pgtest.New(t, migrations.FS)
	const login = "berth_scheduler_outside"
	if err := migrate.EnsureLogin(t.Context(), db.URL, login, "secret", "berth_scheduler"); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(login, "secret")
	file := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(file, []byte(`{"scheduler": {"discovery": {"mode": "kubernetes", "kubernetes": {"namespace": "n", "service_name": "s", "port": 8000}}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	ops := freeAddr(t)
	p := run(t, program, "scheduler", "serve", "-config", file, "--database-url="+u.String(), "--pool=4",
		"--grpc-listen="+freeAddr(t), "--twirp-listen="+freeAddr(t), "--ops-listen="+ops, "--admin-listen=", "--drain-delay=0s")
	await(t, "it to be ready and to say so", func() bool {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+ops+"/readyz", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return false
		}
		_ = response.Body.Close()
		return response.StatusCode == http.StatusOK && p.said("outside a cluster")
	})
	if got := strings.Count(p.last(), "outside a cluster"); got != 1 {
		t.Errorf("it is said %d times, want once", got)
	}
}
