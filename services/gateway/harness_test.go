package gateway_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"berth/migrations"
	"berth/pkg/pgtest"
	"berth/pkg/telemetry"
	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/gateway"
	"berth/services/gateway/internal/gatewaytest"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*Server).Serve"))
}

const (
	apiKey        = "berth_test_key-0123456789-0123456789"
	clusterSecret = "cluster-secret-0123456789-0123456789"
	domain        = "sbx.test"
)

// stand is everything around a gateway: a database, a scheduler that writes bindings there, nodes.
type stand struct {
	t         *testing.T
	db        *pgtest.Database
	scheduler *gatewaytest.Scheduler
	nodes     []*gatewaytest.Node
}

func newStand(t *testing.T, nodes ...*gatewaytest.Node) *stand {
	t.Helper()
	s := &stand{t: t, db: pgtest.New(t, migrations.FS), scheduler: gatewaytest.NewScheduler(nodes...), nodes: nodes}
	for _, n := range nodes {
		s.addNode(n)
	}
	s.scheduler.OnRecord, s.scheduler.OnEnd = s.record, s.end
	return s
}

// berthNode is a node with today's capabilities.
func berthNode(t *testing.T, id string) *gatewaytest.Node {
	t.Helper()
	return gatewaytest.NewNode(t, node.ID(id), gatewaytest.BerthCapabilities()...)
}

const insertNodeSQL = `
WITH n AS (
        INSERT INTO nodes (node_id, endpoint, source, capabilities, version, machine_info, disks)
        VALUES ($1, $2, 'registered', coalesce($3, '{}'::text[]), 'v1', '{"cpu_architecture": "amd64"}', '[{"mount_point": "/", "used_bytes": 1, "total_bytes": 2}]')
        RETURNING node_id, endpoint, endpoint_revision),
     l AS (
        INSERT INTO node_leases (node_id, service_instance_id, place, expires_at, last_seen_at, reported_at_unix_ms,
               facts_digest, roster_digest, reported_status, has_snapshot, cpu_count, memory_total_bytes)
        SELECT node_id, 'i-' || node_id, '', clock_timestamp() + interval '1 hour', clock_timestamp(), 0, '', '', 1, true, 8, 16000000000 FROM n)
INSERT  INTO route_feed (kind, key, revision, endpoint)
SELECT  'node', node_id, endpoint_revision, endpoint FROM n`

func (s *stand) addNode(n *gatewaytest.Node) {
	s.t.Helper()
	s.exec(insertNodeSQL, n.ID, n.URL, n.Capabilities)
}

func (s *stand) exec(sql string, args ...any) {
	s.t.Helper()
	if _, err := s.db.Exec(s.t.Context(), sql, args...); err != nil {
		s.t.Fatalf("%v\n%s", err, sql)
	}
}

const bindSQL = `
WITH b AS (
        INSERT INTO bindings AS b (sandbox_id, state, node_id, origin, tenant_id)
        VALUES ($1, 'bound', $2, 'recorded', $3)
        ON CONFLICT (sandbox_id) DO UPDATE
        SET    state = 'bound', node_id = $2, ended_at = NULL, ended_by = NULL,
               revision = GREATEST(b.revision + 1, nextval('revisions')), incarnation = b.incarnation + 1
        RETURNING sandbox_id, state, node_id, revision, incarnation, tenant_id)
INSERT  INTO route_feed (kind, key, revision, state, node_id, incarnation, tenant_id)
SELECT  'binding', sandbox_id, revision, state, node_id, incarnation, tenant_id FROM b
RETURNING revision`

// bind writes what the scheduler's RecordAssignment commits.
func (s *stand) bind(ctx context.Context, id, node, tenant string) (revision int64, err error) {
	err = s.db.QueryRow(ctx, bindSQL, id, node, tenant).Scan(&revision)
	return revision, err
}

func (s *stand) record(ctx context.Context, r *schedulerv1.RecordAssignmentRequest) (int64, error) {
	return s.bind(ctx, r.GetSandboxId(), r.GetNode().GetNodeId(), r.GetTenantId())
}

const endSQL = `
WITH b AS (
        UPDATE bindings
        SET    state = 'gone', revision = GREATEST(revision + 1, nextval('revisions')), ended_at = clock_timestamp(), ended_by = 'deleted'
        WHERE  sandbox_id = $1 AND state = 'bound' AND ($2::bigint = 0 OR revision = $2)
        RETURNING sandbox_id, state, node_id, revision, incarnation, tenant_id)
INSERT  INTO route_feed (kind, key, revision, state, node_id, incarnation, tenant_id)
SELECT  'binding', sandbox_id, revision, state, node_id, incarnation, tenant_id FROM b
RETURNING revision`

func (s *stand) end(ctx context.Context, r *schedulerv1.ReleaseSandboxRequest) (revision int64, err error) {
	if err := s.db.QueryRow(ctx, endSQL, r.GetSandboxId(), r.GetRevision()).Scan(&revision); err != nil {
		return 0, fmt.Errorf("%w: %w", sandbox.ErrChanged, err)
	}
	return revision, nil
}

// login is the database's URL as a service logs in: in a group role, with the timeouts of its logins.
func (s *stand) login(role string) string {
	s.t.Helper()
	u, err := url.Parse(s.db.URL)
	if err != nil {
		s.t.Fatal(err)
	}
	q := u.Query()
	q.Set("options", "-c role="+role+" -c statement_timeout=2000 -c lock_timeout=200 -c idle_in_transaction_session_timeout=2000")
	u.RawQuery = strings.ReplaceAll(q.Encode(), "+", "%20") // libpq knows no plus for a blank
	return u.String()
}

func (s *stand) config(schedulers ...string) gateway.Config {
	s.t.Helper()
	if len(schedulers) == 0 {
		schedulers = []string{s.scheduler.Serve(s.t)}
	}
	cfg := gateway.DefaultConfig()
	cfg.Listen, cfg.OpsListen, cfg.AdminListen = freeAddress(s.t), freeAddress(s.t), ""
	cfg.Domains = domain
	cfg.DatabaseURL, cfg.SessionsDatabaseURL = s.login("berth_gateway"), s.login("berth_sessions")
	cfg.SchedulerURLs = schedulers
	cfg.APIKey, cfg.NodeKeys, cfg.ClusterSecrets = apiKey, []string{gatewaytest.NodeKey}, []string{clusterSecret}
	cfg.Guard.Loopback = true
	cfg.DrainDelay, cfg.StreamGrace = 0, 2*time.Second
	cfg.AccessLog = "all"
	return cfg
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

// replica is one gateway.
type replica struct {
	t      *testing.T
	URL    string
	Ops    string
	Access *lines
	client *http.Client
	stop   func() error
}

// lines is an access log that tests read.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// start runs a gateway until t ends, and waits until it is ready.
func (s *stand) start(cfg gateway.Config) *replica {
	s.t.Helper()
	return s.startWith(cfg, quiet(s.t))
}

func (s *stand) startWith(cfg gateway.Config, tel *telemetry.Telemetry) *replica {
	t := s.t
	t.Helper()
	r := &replica{t: t, URL: "http://" + cfg.Listen, Ops: "http://" + cfg.OpsListen, Access: &lines{}}
	cfg.AccessOutput = r.Access
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- gateway.Run(ctx, cfg, tel, "test") }()
	var once sync.Once
	var result error
	r.stop = func() error {
		once.Do(func() { cancel(); result = <-done })
		return result
	}
	transport := &http.Transport{DisableCompression: true}
	r.client = &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		if err := r.stop(); err != nil {
			t.Errorf("Run = %v", err)
		}
	})
	for {
		select {
		case err := <-done:
			done <- err
			t.Fatalf("Run ended: %v", err)
		case <-t.Context().Done():
			t.Fatal("not ready in time")
		case <-time.After(10 * time.Millisecond):
		}
		resp, err := r.client.Get(r.Ops + "/readyz")
		if err != nil {
			continue
		}
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			return r
		}
	}
}

func quiet(t *testing.T) *telemetry.Telemetry {
	t.Helper()
	out := io.Discard
	if testing.Verbose() {
		out = t.Output()
	}
	tel, err := telemetry.New(t.Context(), telemetry.Config{Service: "gateway", LogFormat: "json", Output: out})
	if err != nil {
		t.Fatal(err)
	}
	return tel
}

// answer is what a client got.
type answer struct {
	Status int
	Header http.Header
	Body   string
}

func (a answer) field(t *testing.T, name string) any {
	t.Helper()
	var fields map[string]any
	if err := json.Unmarshal([]byte(a.Body), &fields); err != nil {
		t.Fatalf("no JSON object: %s", a.Body)
	}
	return fields[name]
}

// ask is one request. Without headers it carries the API key.
type ask struct {
	method, path string
	body         any // string as it is, nil for none, else as JSON
	header       http.Header
	host         string
	chunked      bool
}

func (r *replica) do(a ask) answer {
	r.t.Helper()
	out, err := r.try(a)
	if err != nil {
		r.t.Fatalf("%s %s: %v", a.method, a.path, err)
	}
	return out
}

func (r *replica) try(a ask) (answer, error) {
	var text io.Reader
	switch body := a.body.(type) {
	case nil:
	case string:
		text = strings.NewReader(body)
	default:
		encoded, err := json.Marshal(body)
		if err != nil {
			return answer{}, err
		}
		text = bytes.NewReader(encoded)
	}
	if a.chunked {
		text = io.MultiReader(text) // hides the length
	}
	req, err := http.NewRequestWithContext(r.t.Context(), a.method, r.URL+a.path, text)
	if err != nil {
		return answer{}, err
	}
	if req.Header = a.header; req.Header == nil {
		req.Header = http.Header{"X-Api-Key": {apiKey}}
	}
	if a.host != "" {
		req.Host = a.host
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{}, err
	}
	return answer{resp.StatusCode, resp.Header, string(body)}, nil
}

// create makes a sandbox and returns its id.
func (r *replica) create() string {
	r.t.Helper()
	a := r.do(ask{method: "POST", path: "/v2/sandboxes", body: map[string]any{"templateID": "echo"}})
	if a.Status != http.StatusCreated {
		r.t.Fatalf("create = %d %s", a.Status, a.Body)
	}
	id, ok := a.field(r.t, "sandboxID").(string)
	if !ok || id == "" {
		r.t.Fatalf("create answered %s", a.Body)
	}
	return id
}
