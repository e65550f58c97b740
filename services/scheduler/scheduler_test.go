package scheduler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"berth/migrations"
	"berth/pkg/flagenv"
	"berth/pkg/migrate"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
	"berth/pkg/telemetry"
	adminv1 "berth/rpc/admin/v1"
	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/rpcerr"
	"berth/services/internal/sandbox"
)

const (
	nodeToken     = "node-token"
	gatewayToken  = "gateway-token"
	operatorToken = "operator-token"
)

// freeAddr is a loopback address that nobody listens on.
func freeAddr(t *testing.T) string {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("listen: %v", err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

// schedulerURL is db as a login of its own in role berth_scheduler, with that role's timeouts.
func schedulerURL(t *testing.T, db *pgtest.Database) string {
	t.Helper()
	const login = "berth_scheduler_test"
	if err := migrate.EnsureLogin(t.Context(), db.URL, login, "secret", "berth_scheduler"); err != nil {
		t.Fatalf("make a login: %v", err)
	}
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatalf("parse %s: %v", db.URL, err)
	}
	u.User = url.UserPassword(login, "secret")
	return u.String()
}

func config(t *testing.T, databaseURL string) Config {
	t.Helper()
	cfg := DefaultConfig()
	cfg.DatabaseURL, cfg.Pool = databaseURL, 8
	cfg.GRPCListen, cfg.TwirpListen, cfg.OpsListen, cfg.AdminListen = freeAddr(t), freeAddr(t), freeAddr(t), freeAddr(t)
	cfg.Register, cfg.Guard.Loopback, cfg.DrainDelay = true, true, 0
	cfg.Tokens.Node, cfg.Tokens.Gateway, cfg.Tokens.Operator = []string{"old", nodeToken}, []string{gatewayToken}, []string{operatorToken}
	return cfg
}

func newTelemetry(t *testing.T) *telemetry.Telemetry {
	t.Helper()
	tel, err := telemetry.New(t.Context(), telemetry.Config{Service: "scheduler", LogLevel: "error", Output: io.Discard})
	if err != nil {
		t.Fatalf("telemetry: %v", err)
	}
	return tel
}

// start runs a replica until t ends and returns once it is ready.
func start(t *testing.T, cfg Config) {
	t.Helper()
	if err := cfg.Validate(); err != nil {
		t.Fatalf("Validate = %v", err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, cfg, newTelemetry(t), "test") }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v, want nil after a clean stop", err)
		}
	})
	awaitReady(t, "http://"+cfg.OpsListen+"/readyz", ended)
}

func awaitReady(t *testing.T, url string, ended chan error) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if status, _ := get(t, url); status == http.StatusOK {
			return
		}
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("Run ended before it was ready: %v", err)
		case <-t.Context().Done():
			t.Fatal("not ready in time")
		case <-tick.C:
		}
	}
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatalf("GET %s: %v", url, err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, ""
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatalf("GET %s: %v", url, err)
	}
	return response.StatusCode, string(body)
}

// bearer sends a token with every call.
type bearer struct{ token string }

func (b bearer) Do(r *http.Request) (*http.Response, error) {
	if b.token != "" {
		r.Header.Set("Authorization", "Bearer "+b.token)
	}
	return http.DefaultClient.Do(r)
}

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.token}, nil
}
func (bearer) RequireTransportSecurity() bool { return false }

func dial(t *testing.T, addr, token string) *grpc.ClientConn {
	t.Helper()
	options := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	if token != "" {
		options = append(options, grpc.WithPerRPCCredentials(bearer{token}))
	}
	conn, err := grpc.NewClient(addr, options...)
	if err != nil {
		t.Fatalf("dial %s: %v", addr, err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// TestTheMainJobThroughTwoReplicas registers a node by gRPC with one replica, places and records by Twirp
// with the other, and looks up with the first.
func TestTheMainJobThroughTwoReplicas(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	databaseURL := schedulerURL(t, db)
	first, second := config(t, databaseURL), config(t, databaseURL)
	start(t, first)
	start(t, second)
	ctx := t.Context()

	node := schedulerv1.NewSchedulerClient(dial(t, first.GRPCListen, nodeToken))
	beat := &schedulerv1.HeartbeatRequest{
		NodeId: "node-1", ServiceInstanceId: "instance-1", ClusterId: "c", Endpoint: "http://127.0.0.1:8000",
		Capabilities: []string{"create_key", "route_revision"}, Capacity: &schedulerv1.Capacity{Sandboxes: 2},
		Snapshot: &schedulerv1.NodeSnapshot{Status: schedulerv1.NodeStatus_NODE_STATUS_READY, CpuCount: 4, MemoryTotalBytes: 8 << 30},
	}
	if answer, err := node.Heartbeat(ctx, beat); err != nil || answer.GetLeaseTtlMs() != 30_000 {
		t.Fatalf("Heartbeat = %v, %v, want a lease of 30 s", answer, err)
	}

	gateway := schedulerv1.NewSchedulerJSONClient("http://"+second.TwirpListen, bearer{gatewayToken})
	placements := schedulerv1.NewPlacementsJSONClient("http://"+second.TwirpListen, bearer{gatewayToken})
	request := &schedulerv1.ScheduleRequest{TenantId: "default", RequestId: "r1", Resources: &schedulerv1.Resources{CpuMillis: 500, MemoryBytes: 1 << 20}}
	placed, err := gateway.Schedule(ctx, request)
	if err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	if placed.GetNode().GetNodeId() != "node-1" || placed.GetHoldMs() != 90_000 || placed.GetPlacementId() == 0 || len(placed.GetNodeCapabilities()) != 2 {
		t.Errorf("Schedule = %v, want node-1 held for 90 s, with its capabilities", placed)
	}
	box := placed.GetSandboxId()
	if _, err := sandbox.ParseID(box); err != nil {
		t.Errorf("the sandbox id drawn is %q: %v", box, err)
	}
	recorded, err := gateway.RecordAssignment(ctx, &schedulerv1.RecordAssignmentRequest{
		SandboxId: box, Node: placed.GetNode(), ReservationId: placed.GetReservationId(), PlacementId: placed.GetPlacementId(), TenantId: "default",
	})
	if err != nil || len(recorded.GetAssigned()) != 1 || recorded.GetAssigned()[0].GetRevision() == 0 {
		t.Fatalf("RecordAssignment = %v, %v, want one revision", recorded, err)
	}
	found, err := node.LookupNode(ctx, &schedulerv1.LookupNodeRequest{SandboxId: box})
	if err != nil || found.GetNode().GetEndpoint() != "http://127.0.0.1:8000" || found.GetNodeStatus() != schedulerv1.NodeStatus_NODE_STATUS_READY {
		t.Errorf("LookupNode = %v, %v, want node-1's endpoint", found, err)
	}
	observed, err := node.GetNode(ctx, &schedulerv1.GetNodeRequest{NodeId: "node-1"})
	if err != nil || observed.GetNode().GetHeldSandboxes() != 1 || observed.GetNode().GetHeldCpuMillis() != 500 {
		t.Errorf("GetNode = %v, %v, want one held sandbox of 500 millis", observed, err)
	}

	// The second of two slots, then none; and the explanation of why.
	if _, err := gateway.Schedule(ctx, &schedulerv1.ScheduleRequest{TenantId: "default", Count: 1}); err != nil {
		t.Errorf("Schedule for the last slot = %v", err)
	}
	_, err = gateway.Schedule(ctx, &schedulerv1.ScheduleRequest{TenantId: "default", RequestId: "r2"})
	if got := rpcerr.Twirp(err); got == nil || got.Msg() != "no node has room" || got.Meta("reason") != "capacity" || got.Meta("retry_after_ms") == "" {
		t.Errorf("Schedule without room = %v, want no node has room with reason and hint", err)
	}
	admin := adminv1.NewPlacementsJSONClient("http://"+first.TwirpListen, bearer{operatorToken})
	explained, err := admin.ExplainPlacement(ctx, &adminv1.ExplainPlacementRequest{TenantId: "default", RequestId: "r2"})
	if err != nil {
		t.Fatalf("ExplainPlacement = %v", err)
	}
	why := explained.GetPlacement()
	if why.GetOutcome() != "refused" || why.GetRefusal() != "capacity" || why.GetReasons()["declared_sandboxes"] != 1 ||
		len(why.GetCandidates()) != 1 || why.GetCandidates()[0].GetValue() != 3 || why.GetCandidates()[0].GetLimit() != 2 {
		t.Errorf("ExplainPlacement = %v, want node-1 refused by declared_sandboxes at 3 of 2", why)
	}
	if ended, err := placements.ReleaseSandbox(ctx, &schedulerv1.ReleaseSandboxRequest{SandboxId: box}); err != nil || ended.GetRevision() == 0 {
		t.Errorf("ReleaseSandbox = %v, %v", ended, err)
	}
	if _, err := node.LookupNode(ctx, &schedulerv1.LookupNodeRequest{SandboxId: box}); err == nil {
		t.Error("LookupNode finds a released sandbox")
	}

	health := healthv1.NewHealthClient(dial(t, first.GRPCListen, ""))
	for _, service := range []string{"", "scheduler.v1.Scheduler", "berth.ready"} {
		watch, err := health.Watch(ctx, &healthv1.HealthCheckRequest{Service: service})
		if err != nil {
			t.Fatalf("watch the health of %q: %v", service, err)
		}
		for {
			got, err := watch.Recv() // the first answer is at once, further ones are changes
			if err != nil {
				t.Fatalf("health of %q: %v", service, err)
			}
			if got.GetStatus() == healthv1.HealthCheckResponse_SERVING {
				break
			}
		}
	}
	if _, metrics := get(t, "http://"+second.OpsListen+"/anything"); !strings.Contains(metrics, `agentenv_scheduler_rpc_duration_seconds_count{rpc="Schedule",status="ok"} 2`) {
		t.Error("the metric of calls does not count two schedules that went well")
	}
}

func TestWhatCannotRunSaysWhatToDo(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	old := pgtest.Empty(t)
	if err := migrate.EnsureRoles(t.Context(), old.URL); err != nil {
		t.Fatalf("make roles: %v", err)
	}
	var config2 net.ListenConfig
	taken, err := config2.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("listen: %v", err)
	}
	t.Cleanup(func() { _ = taken.Close() })

	tests := map[string]struct {
		url    string
		change func(*Config)
		want   []string
		is     error
	}{
		"a database that is not there": {
			url: "postgres://someone:hunter2@127.0.0.1:1/berth", change: func(*Config) {},
			want: []string{"127.0.0.1:1/berth", "nothing listens there"},
		},
		"a schema without migrations": {
			url: schedulerURL(t, old), change: func(*Config) {}, is: pgdb.ErrOldSchema, want: []string{"berth migrate up", "00009"},
		},
		"a role without timeouts": {url: db.URL, change: func(*Config) {}, is: pgdb.ErrTimeouts, want: []string{"statement_timeout"}},
		"an occupied port": {
			url: schedulerURL(t, db), change: func(c *Config) { c.TwirpListen = taken.Addr().String() },
			want: []string{"twirp", taken.Addr().String(), "choose another address"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := config(t, tt.url)
			tt.change(&cfg)
			if err := cfg.Validate(); err != nil {
				t.Fatalf("Validate = %v", err)
			}
			err := Run(t.Context(), cfg, newTelemetry(t), "test")
			if err == nil {
				t.Fatal("Run = nil, want an error")
			}
			if tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("Run = %v, want %v", err, tt.is)
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("Run = %q, want it to say %q", err, want)
				}
			}
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("Run = %q, which tells the password", err)
			}
		})
	}
}

// kubernetesArgs is that mode with all it needs, and more.
func kubernetesArgs(more ...string) []string {
	return append([]string{
		"--discovery-mode=kubernetes", "--discovery-kubernetes-namespace=n", "--discovery-kubernetes-service-name=s", "--discovery-kubernetes-port=http",
	}, more...)
}

func TestAMistakeInTheConfigurationNamesItself(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		args []string
		file string
		want []string
	}{
		"a misspelled strategy":             {args: []string{"--strategy=best_of_n"}, want: []string{"strategy", `"best_of_n"`, "best_of_k, round_robin or random"}},
		"a misspelled strategy in the file": {file: `{"scheduler": {"strategy": "bestofk"}}`, want: []string{`"bestofk"`}},
		"an unknown key":                    {file: `{"scheduler": {"strategies": "random"}}`, want: []string{`"scheduler.strategies"`, "scheduler.strategy"}},
		"a duration without a unit":         {file: `{"scheduler": {"report_ttl": 30}}`, want: []string{"scheduler.report_ttl", "30"}},
		"a limit that is no number":         {file: `{"scheduler": {"node_resource_limit": {"max_sandbox_count": "many"}}}`, want: []string{"max_sandbox_count", "many"}},
		"a lease of nothing":                {args: []string{"--report-ttl=0s"}, want: []string{"--report-ttl", `"0s"`, "30s"}},
		"an address without a port":         {args: []string{"--grpc-listen=localhost"}, want: []string{"--grpc-listen", `"localhost"`, "host:port"}},
		"a static node without an endpoint": {args: []string{`--nodes=[{"id": "a"}]`}, want: []string{"--nodes", "entry 1", "http://host:port"}},
		"a static node with a bad id":       {args: []string{`--nodes=[{"id": "a b", "endpoint": "http://10.0.0.1:80"}]`}, want: []string{"entry 1", `"a b"`}},
		"a static node twice":               {args: []string{`--nodes=[{"id": "a", "endpoint": "http://10.0.0.1:80"}, {"id": "a", "endpoint": "http://10.0.0.2:80"}]`}, want: []string{`"a" twice`}},
		"a second static list":              {args: []string{`--nodes=[{"id": "a", "endpoint": "http://10.0.0.1:80"}] [{"id": "b", "endpoint": "http://10.0.0.2:80"}]`}, want: []string{"--nodes", "something follows it"}},
		"a static node with another field":  {args: []string{`--nodes=[{"id": "a", "endpoint": "http://10.0.0.1:80", "x": 1}]`}, want: []string{`unknown field "x"`}},
		"a mode that is none":               {args: []string{"--discovery-mode=consul"}, want: []string{`"consul"`, "static, kubernetes or register"}},
		"Kubernetes without a Service":      {args: []string{"--discovery-mode=kubernetes"}, want: []string{"--discovery-kubernetes-namespace", "--discovery-kubernetes-service-name", "--discovery-kubernetes-port", "1 to 65535"}},
		"a selector that is none":           {args: kubernetesArgs("--discovery-kubernetes-ignore-pod-selector=a in b"), want: []string{"--discovery-kubernetes-ignore-pod-selector", `"a in b"`, "label selector"}},
		"a selector of every Pod":           {args: kubernetesArgs("--discovery-kubernetes-no-schedule-pod-selector= "), want: []string{"no-schedule-pod-selector", "leave it out"}},
		"a selector that is none in a file": {file: `{"scheduler": {"discovery": {"mode": "kubernetes", "kubernetes": {"namespace": "n", "service_name": "s", "port": 8000, "ignore_pod_selector": "=x"}}}}`, want: []string{"scheduler.discovery.kubernetes.ignore_pod_selector", `"=x"`}},
		"a port that is none in a file":     {file: `{"scheduler": {"discovery": {"mode": "kubernetes", "kubernetes": {"namespace": "n", "service_name": "s", "port": 65536}}}}`, want: []string{"scheduler.discovery.kubernetes.port", `"65536"`}},
		"a scheme that is not spoken":       {args: kubernetesArgs("--discovery-kubernetes-scheme=ftp"), want: []string{`"ftp"`, "http or https"}},
		"a file that ends too early":        {file: "{\"scheduler\":\n{\"strategy\":\n", want: []string{"line 3", "JSON object"}},
		"a network that is none":            {args: []string{"--endpoint-cidrs=10.0.0.0"}, want: []string{"--endpoint-cidrs", "10.0.0.0"}},
		"a certificate without a key":       {args: []string{"--tls-cert=a.pem"}, want: []string{"--tls-cert", "--tls-key"}},
		"no database":                       {args: []string{"--database-url="}, want: []string{"--database-url", "BERTH_DATABASE_URL"}},
		"an index for nothing":              {args: []string{"--artifact-store-capacity=0"}, want: []string{"--artifact-store-capacity", `"0"`, "from 1"}},
		"an index for less in the file":     {file: `{"scheduler": {"artifact_store_capacity": -1}}`, want: []string{"--artifact-store-capacity", `"-1"`}},
		"an index of text in the file":      {file: `{"scheduler": {"artifact_store_capacity": "many"}}`, want: []string{"scheduler.artifact_store_capacity", "many"}},
		"a lookup limit that is no number":  {file: `{"scheduler": {"artifact_lookup_node_limit": "few"}}`, want: []string{"scheduler.artifact_lookup_node_limit", "few"}},
		"recency of before":                 {args: []string{"--artifact-touch=-1s"}, want: []string{"--artifact-touch", `"-1s"`, "1m"}},
		"required tokens that nobody has":   {args: []string{"--require-tokens"}, want: []string{"--require-tokens", "--node-tokens"}},
		"two mistakes at once":              {args: []string{"--pool=0", "--strategy=x"}, want: []string{"--pool", `"x"`}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := append([]string{"--database-url=postgres://u@h/d"}, tt.args...)
			if tt.file != "" {
				path := filepath.Join(t.TempDir(), "scheduler.json")
				if err := os.WriteFile(path, []byte(tt.file), 0o600); err != nil {
					t.Fatal(err)
				}
				args = append(args, "--config="+path)
			}
			cfg, err := parse(args, nil)
			if err == nil {
				err = cfg.Validate()
			}
			if err == nil {
				t.Fatalf("%v is accepted", args)
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v: %q, want it to say %q", args, err, want)
				}
			}
		})
	}
}

// parse reads flags and variables as the command does.
func parse(args []string, variables map[string]string) (*Config, error) {
	cfg := DefaultConfig()
	fs := pflag.NewFlagSet("scheduler", pflag.ContinueOnError)
	cfg.Flags(fs)
	if err := fs.Parse(args); err != nil {
		return &cfg, err
	}
	return &cfg, flagenv.Apply(fs, "scheduler", func(name string) (string, bool) { v, ok := variables[name]; return v, ok })
}

func TestFlagsGoBeforeVariablesAndVariablesBeforeTheFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "scheduler.json")
	file, err := json.Marshal(map[string]any{
		"log_level": "debug",
		"scheduler": map[string]any{
			"strategy": "random", "report_ttl": "1m", "grpc_listen_addr": ":1", "metrics_listen_addr": ":2", "redis_addr": "redis:6379",
			"artifact_store_capacity": 5000, "artifact_lookup_node_limit": 4,
			"nodes":               []map[string]string{{"id": "a", "endpoint": "http://10.0.0.1:80/"}},
			"node_resource_limit": map[string]any{"max_sandbox_count": 7, "max_cpu_allocated_percent": 400, "max_cpu_used_percent": nil},
			"discovery":           map[string]any{"mode": "static", "kubernetes": map[string]any{"port": 8000}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := parse([]string{"--grpc-listen=:9", "--config=" + path}, map[string]string{
		"BERTH_DATABASE_URL": "postgres://u@h/d", "SCHEDULER_STRATEGY": "round_robin", "SCHEDULER_GRPC_LISTEN_ADDR": ":8",
		"BERTH_SCHEDULER_NODE_TOKENS": "a,b", "BERTH_ENDPOINT_LOOPBACK": "true", "BERTH_SCHEDULER_WEIGHT_R_CPU": "2",
		"SCHEDULER_ARTIFACT_LOOKUP_NODE_LIMIT": "8", "BERTH_SCHEDULER_ARTIFACT_TOUCH": "0s",
	})
	if err != nil {
		t.Fatalf("parse = %v", err)
	}
	if err := cfg.Validate(); err != nil {
		t.Fatalf("Validate = %v", err)
	}
	got := fmt.Sprint(cfg.Strategy, cfg.GRPCListen, cfg.OpsListen, cfg.ReportTTL, cfg.LogLevel, *cfg.Limits.SandboxCount,
		*cfg.Limits.CPUAllocatedPercent, cfg.Limits.CPUUsedPercent == nil, cfg.Tokens.Node, cfg.Guard.Loopback, cfg.Weights.ResourceCPU, fmt.Sprint(cfg.checked.static),
		cfg.ArtifactStoreCapacity, cfg.ArtifactLookupNodeLimit, cfg.ArtifactTouch)
	want := fmt.Sprint("round_robin", ":9", ":2", time.Minute, "debug", 7, 400, true, []string{"a", "b"}, true, 2.0, "[{a http://10.0.0.1:80}]",
		5000, 8, time.Duration(0))
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestTheStaticListIsNobodysWhereNodesRegisterAlone(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		args []string
		want int
	}{
		"register alone has none":       {[]string{"--register"}, 0},
		"nothing said is AgentENV's":    {nil, 1},
		"register beside a list has it": {[]string{"--register", `--nodes=[{"id": "a", "endpoint": "http://10.0.0.1:80"}, {"id": "b", "endpoint": "http://10.0.0.2:80"}]`}, 2},
	} {
		cfg, err := parse(append(tt.args, "--database-url=postgres://u@h/d"), nil)
		if err != nil {
			t.Fatalf("%s: parse = %v", name, err)
		}
		if err := cfg.Validate(); err != nil {
			t.Fatalf("%s: Validate = %v", name, err)
		}
		if got := len(cfg.checked.static); got != tt.want {
			t.Errorf("%s: %d static nodes, want %d", name, got, tt.want)
		}
	}
}
