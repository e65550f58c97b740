package scheduler

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"berth/migrations"
	"berth/pkg/pgtest"
	schedulerv1 "berth/rpc/scheduler/v1"
)

// post calls a Twirp method with an empty request.
func post(t *testing.T, url string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader("{}"))
	if err != nil {
		t.Fatalf("POST %s: %v", url, err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := bearer{gatewayToken}.Do(request)
	if err != nil {
		t.Fatalf("POST %s: %v", url, err)
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatalf("POST %s: %v", url, err)
	}
	return response.StatusCode, string(body)
}

func TestAQueryOnlyReplicaLooksUpAndDoesNothingElse(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	for _, sql := range []string{
		`INSERT INTO nodes (node_id, endpoint, source, cluster_id) VALUES ('n1', 'http://10.0.0.1:8000', 'static', 'c1')`,
		`INSERT INTO bindings (sandbox_id, state, node_id, origin) VALUES ('s1', 'bound', 'n1', 'recorded')`,
	} {
		if _, err := db.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	alone := config(t, schedulerURL(t, db))
	alone.Register, alone.Query.On = false, true
	alone.Strategy, alone.DiscoveryMode, alone.Nodes = "nonsense", "nonsense", "nonsense" // none of it is read
	beside := alone
	beside.GRPCListen, beside.TwirpListen, beside.OpsListen, beside.AdminListen = freeAddr(t), freeAddr(t), freeAddr(t), freeAddr(t)
	beside.Query.DatabaseURL = beside.DatabaseURL // a server that is its own standby is always in step
	for name, cfg := range map[string]Config{"on the primary": alone, "beside a standby": beside} {
		t.Run(name, func(t *testing.T) {
			start(t, cfg)
			conn := dial(t, cfg.GRPCListen, gatewayToken)
			found, err := schedulerv1.NewSchedulerClient(conn).LookupNode(t.Context(), &schedulerv1.LookupNodeRequest{SandboxId: "s1"})
			if err != nil || found.GetNode().GetEndpoint() != "http://10.0.0.1:8000" || found.GetRevision() == 0 {
				t.Errorf("LookupNode = %v, %v, want n1", found, err)
			}
			_, err = schedulerv1.NewSchedulerJSONClient("http://"+cfg.TwirpListen, bearer{gatewayToken}).LookupNode(t.Context(), &schedulerv1.LookupNodeRequest{SandboxId: "s2"})
			if err == nil || !strings.Contains(err.Error(), "sandbox assignment not found") {
				t.Errorf("LookupNode of nobody = %v, want not found", err)
			}
			for _, service := range []grpc.ServiceDesc{schedulerv1.Scheduler_ServiceDesc, schedulerv1.Placements_ServiceDesc} {
				for _, method := range service.Methods {
					if method.MethodName != "LookupNode" {
						refusesMethod(t, cfg, conn, service.ServiceName+"/"+method.MethodName)
					}
				}
			}
			if code, _ := post(t, "http://"+cfg.TwirpListen+"/twirp/admin.v1.Placements/ListPlacements"); code != http.StatusNotFound {
				t.Errorf("admin.v1 answers %d, want 404", code)
			}
		})
	}
	var known int
	if err := db.QueryRow(t.Context(), `SELECT count(*) FROM nodes`).Scan(&known); err != nil || known != 1 {
		t.Errorf("%d nodes, %v, want the one there was: a query-only replica writes none", known, err)
	}
}

// refusesMethod: both transports say that method is not there, with the contract's text. An empty message
// is empty whatever its type.
func refusesMethod(t *testing.T, cfg Config, conn *grpc.ClientConn, method string) {
	t.Helper()
	want := "method " + method[strings.LastIndexByte(method, '/')+1:] + " not implemented"
	err := conn.Invoke(t.Context(), "/"+method, &schedulerv1.LookupNodeRequest{}, &schedulerv1.LookupNodeResponse{})
	if status.Code(err) != codes.Unimplemented || status.Convert(err).Message() != want {
		t.Errorf("gRPC %s = %v, want Unimplemented: %s", method, err, want)
	}
	code, body := post(t, "http://"+cfg.TwirpListen+"/twirp/"+method)
	if code != http.StatusNotImplemented || !strings.Contains(body, `"unimplemented"`) || !strings.Contains(body, want) {
		t.Errorf("Twirp %s = %d %s, want unimplemented: %s", method, code, body, want)
	}
}

func TestAQueryOnlyReplicaStatesItsBound(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	cfg := config(t, schedulerURL(t, db))
	cfg.Query = QueryOnly{On: true, DatabaseURL: cfg.DatabaseURL, MaxStaleness: 2 * time.Second}
	start(t, cfg)
	_, metrics := get(t, "http://"+cfg.OpsListen+"/metrics")
	for _, want := range []string{
		"berth_scheduler_query_staleness_bound_seconds 2\n", "berth_scheduler_query_staleness_seconds ",
		`berth_scheduler_query_lookups_total{answered="standby"}`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("metrics lack %q", want)
		}
	}
}

func TestASettingOfQueryOnlyReplicasThatCannotBeKeptIsRefused(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		change func(*Config)
		want   string
	}{
		"a standby for a replica that writes": {func(c *Config) { c.Query.DatabaseURL = "postgres://standby/berth" }, "is for --query-only"},
		"a standby's URL that is none": {func(c *Config) {
			c.Query.On, c.Query.DatabaseURL = true, "postgres://a:secret@[::1/berth"
		}, "--query-database-url: the database URL cannot be read"},
		"a bound shorter than a round trip":    {func(c *Config) { c.Query.On, c.Query.MaxStaleness = true, time.Millisecond }, "--query-max-staleness"},
		"a bound that is none":                 {func(c *Config) { c.Query.On, c.Query.MaxStaleness = true, time.Hour }, "--query-max-staleness"},
		"a strategy, where creates are placed": {func(c *Config) { c.Strategy = "nonsense" }, "--strategy"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := DefaultConfig()
			cfg.DatabaseURL = "postgres://primary/berth"
			tt.change(&cfg)
			if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Validate = %v, want it to name %s", err, tt.want)
			} else if strings.Contains(err.Error(), "secret") {
				t.Errorf("Validate = %v, which tells the password", err)
			}
		})
	}
}
