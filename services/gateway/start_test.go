package gateway_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"berth/migrations"
	"berth/pkg/flagenv"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
	"berth/pkg/waittest"
	"berth/services/gateway"
	"berth/services/gateway/internal/gatewaytest"
)

func valid() gateway.Config {
	cfg := gateway.DefaultConfig()
	cfg.DatabaseURL = "postgres://berth@127.0.0.1:1/berth"
	cfg.SchedulerURLs = []string{"http://127.0.0.1:9091"}
	cfg.APIKey, cfg.ClusterSecrets = apiKey, []string{clusterSecret}
	cfg.Lookup, cfg.SecretFile = func(string) (string, bool) { return "", false }, "/nonexistent"
	return cfg
}

func TestABadSettingStopsTheStartAndNamesItself(t *testing.T) {
	t.Parallel()
	good := valid()
	if err := good.Validate(); err != nil {
		t.Fatalf("a valid configuration: %v", err)
	}
	tests := map[string]struct {
		set  func(*gateway.Config)
		want string
	}{
		"no database":                {func(c *gateway.Config) { c.DatabaseURL = "" }, "BERTH_DATABASE_URL"},
		"no scheduler":               {func(c *gateway.Config) { c.SchedulerURLs = nil }, "BERTH_SCHEDULER_URL"},
		"a scheduler without scheme": {func(c *gateway.Config) { c.SchedulerURLs = []string{"localhost:9091"} }, "localhost:9091"},
		"no secret":                  {func(c *gateway.Config) { c.ClusterSecrets = nil }, "BERTH_CLUSTER_SECRET"},
		"a short secret":             {func(c *gateway.Config) { c.ClusterSecrets = []string{"short-and-secret"} }, "has 16 bytes"},
		"three secrets":              {func(c *gateway.Config) { c.ClusterSecrets = []string{clusterSecret, clusterSecret, clusterSecret} }, "3 secrets"},
		"a short key":                {func(c *gateway.Config) { c.APIKey = "short-and-secret" }, "--api-key: the key has 16 characters"},
		"an empty variable": {func(c *gateway.Config) {
			c.APIKey, c.Lookup = "", func(name string) (string, bool) { return "", name == "BERTH_API_KEY" }
		}, "BERTH_API_KEY: the key has 0 characters"},
		"no node key":              {func(c *gateway.Config) { c.APIKey = "" }, "BERTH_NODE_KEY"},
		"a node key with a blank":  {func(c *gateway.Config) { c.NodeKeys = []string{"short and secret"} }, "--node-key number 1"},
		"no address":               {func(c *gateway.Config) { c.Listen = "" }, "--listen"},
		"a port that is none":      {func(c *gateway.Config) { c.Listen = ":99999" }, ":99999"},
		"profiles for everybody":   {func(c *gateway.Config) { c.AdminListen = ":9112" }, "loopback"},
		"a domain that is none":    {func(c *gateway.Config) { c.Domains = "sbx.test,-x" }, `"-x"`},
		"a network that is none":   {func(c *gateway.Config) { c.Guard.CIDRs = []string{"10.0.0.0/33"} }, "10.0.0.0/33"},
		"a scheme that is none":    {func(c *gateway.Config) { c.Guard.Schemes = []string{"ftp"} }, "ftp"},
		"a front that is none":     {func(c *gateway.Config) { c.TrustedProxies = []string{"front"} }, "front"},
		"a limit of nothing":       {func(c *gateway.Config) { c.IdleTimeout = 0 }, "--idle-timeout"},
		"a head of nothing":        {func(c *gateway.Config) { c.MaxHeaderBytes = 1 }, "--max-header-bytes"},
		"another status":           {func(c *gateway.Config) { c.UnknownSandboxStatus = 503 }, "502 or 404"},
		"a misspelled prefix":      {func(c *gateway.Config) { c.ProxyPrefix = "stripe" }, `"stripe": choose one of strip, keep`},
		"a misspelled orphan":      {func(c *gateway.Config) { c.OrphanedCreate = "kepe" }, "delete, keep"},
		"a misspelled access log":  {func(c *gateway.Config) { c.AccessLog = "some" }, `access log "some"`},
		"a misspelled level":       {func(c *gateway.Config) { c.LogLevel = "loud" }, `"loud"`},
		"a pool of one":            {func(c *gateway.Config) { c.Pool = 1 }, "--pool"},
		"a file that is not there": {nil, "no-such-file"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := valid()
			if tt.set == nil {
				fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
				cfg.Flags(fs)
				cfg.ConfigFile = "no-such-file"
			} else {
				tt.set(&cfg)
			}
			err := cfg.Validate()
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("Validate = %v, want an error with %q", err, tt.want)
			}
			if text := err.Error(); strings.Contains(text, apiKey) || strings.Contains(text, clusterSecret) || strings.Contains(text, "short-and-secret") {
				t.Errorf("the error shows a secret: %v", err)
			}
		})
	}
	all := gateway.DefaultConfig()
	all.Lookup, all.SecretFile, all.LogLevel = func(string) (string, bool) { return "", false }, "/nonexistent", "loud"
	err := all.Validate()
	for _, part := range []string{"BERTH_DATABASE_URL", "BERTH_SCHEDULER_URL", "BERTH_CLUSTER_SECRET", "BERTH_NODE_KEY", "loud"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("all mistakes at once lack %s: %v", part, err)
		}
	}
}

func TestSettingsComeFromFlagsVariablesAndAgentENVsFile(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "agentenv.json")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	read := func(vars map[string]string, args ...string) (gateway.Config, error) {
		cfg := valid()
		fs := pflag.NewFlagSet("gateway", pflag.ContinueOnError)
		cfg.Flags(fs)
		if err := fs.Parse(args); err != nil {
			return cfg, err
		}
		if err := flagenv.Apply(fs, "gateway", func(name string) (string, bool) { v, ok := vars[name]; return v, ok }); err != nil {
			return cfg, err
		}
		return cfg, cfg.Validate()
	}
	write(`{"log_level":"warn","gateway":{"http_listen_addr":":1111","request_timeout":"30s","sandbox_proxy_domains":["a.test","b.test"],
	        "debug_mode":true,"forward_response_size":0,"scheduler_addr":"x:1"},"scheduler":{"strategy":"random"}}`)
	cfg, err := read(map[string]string{"GATEWAY_METRICS_LISTEN_ADDR": ":2222", "BERTH_GATEWAY_STALE_LIMIT": "1m"}, "--config", file, "--unknown-sandbox-status", "404")
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Listen != ":1111" || cfg.OpsListen != ":2222" || cfg.StaleLimit != time.Minute || cfg.UnknownSandboxStatus != 404 ||
		cfg.RequestTimeout != 30*time.Second || !cfg.Debug || cfg.Domains != "a.test,b.test" || cfg.LogLevel != "warn" {
		t.Errorf("read %+v", cfg)
	}
	cfg, err = read(map[string]string{"GATEWAY_HTTP_LISTEN_ADDR": ":3333", "BERTH_GATEWAY_LISTEN": ":4444"}, "--config", file)
	if err != nil || cfg.Listen != ":4444" {
		t.Errorf("our variable against theirs and the file: %q, %v", cfg.Listen, err)
	}
	for text, want := range map[string]string{
		`{"gateway":{"http_listen_adr":":1"}}`:    `unknown key "gateway.http_listen_adr"`,
		`{"gatway":{}}`:                           `unknown key "gatway"`,
		`{"gateway":{"request_timeout":30}}`:      "gateway.request_timeout",
		`{"gateway":{"request_timeout":"30 ys"}}`: "30 ys",
		`{"gateway":`:                             "one JSON object",
	} {
		write(text)
		if _, err := read(nil, "--config", file); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error with %q", text, err, want)
		}
	}
	if _, err := read(map[string]string{"BERTH_GATEWAY_IDLE_TIMEOUT": "soon"}); err == nil || !strings.Contains(err.Error(), `BERTH_GATEWAY_IDLE_TIMEOUT="soon"`) {
		t.Errorf("a variable that is no duration: %v", err)
	}
}

// run runs a gateway that cannot start and returns its error.
func run(t *testing.T, cfg gateway.Config) error {
	t.Helper()
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	cfg.AccessOutput = io.Discard
	return gateway.Run(ctx, cfg, quiet(t), "test")
}

func TestAGatewayThatCannotWorkSaysWhatToDo(t *testing.T) {
	t.Parallel()
	t.Run("an unreachable database", func(t *testing.T) {
		t.Parallel()
		cfg := valid()
		cfg.DatabaseURL = "postgres://berth:hunter2@" + strings.TrimPrefix(gatewaytest.Refusing(t), "http://") + "/berth?sslmode=disable"
		err := run(t, cfg)
		if err == nil || !strings.Contains(err.Error(), "127.0.0.1:") || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("Run = %v, want the address without the password", err)
		}
	})
	t.Run("an old schema", func(t *testing.T) {
		t.Parallel()
		s := &stand{t: t, db: pgtest.Empty(t), scheduler: gatewaytest.NewScheduler()}
		cfg := s.config()
		if err := run(t, cfg); err == nil || (!errors.Is(err, pgdb.ErrOldSchema) && !strings.Contains(err.Error(), "berth migrate up")) {
			t.Errorf("Run = %v, want berth migrate up", err)
		}
	})
	t.Run("no key anywhere", func(t *testing.T) {
		t.Parallel()
		s := &stand{t: t, db: pgtest.New(t, migrations.FS), scheduler: gatewaytest.NewScheduler()}
		cfg := s.config()
		cfg.APIKey, cfg.Lookup, cfg.SecretFile = "", func(string) (string, bool) { return "", false }, "/nonexistent"
		if err := run(t, cfg); err == nil || !strings.Contains(err.Error(), "BERTH_API_KEY") {
			t.Errorf("Run = %v, want BERTH_API_KEY", err)
		}
	})
	for name, listen := range map[string]func(*gateway.Config) *string{
		"public": func(c *gateway.Config) *string { return &c.Listen },
		"ops":    func(c *gateway.Config) *string { return &c.OpsListen },
	} {
		t.Run("an occupied port: "+name, func(t *testing.T) {
			t.Parallel()
			occupied, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = occupied.Close() }()
			s := &stand{t: t, db: pgtest.New(t, migrations.FS), scheduler: gatewaytest.NewScheduler()}
			cfg := s.config()
			*listen(&cfg) = occupied.Addr().String()
			err = run(t, cfg)
			if err == nil || !strings.Contains(err.Error(), occupied.Addr().String()) || !strings.Contains(err.Error(), "choose another address") {
				t.Errorf("Run = %v, want the address and what to do", err)
			}
		})
	}
}

func TestAStoppingReplicaSaysSoAndFinishesWhatIsOpen(t *testing.T) {
	t.Parallel()
	n := berthNode(t, "n1")
	s := newStand(t, n)
	cfg := s.config()
	cfg.DrainDelay = 2 * time.Second
	r := s.start(cfg)
	for _, path := range []string{r.URL + "/health", r.Ops + "/healthz", r.Ops + "/readyz"} {
		resp, err := r.client.Get(path)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode >= 300 {
			t.Errorf("GET %s = %d while serving", path, resp.StatusCode)
		}
	}
	working, finish := make(chan struct{}), make(chan struct{})
	n.Script = func(_ http.ResponseWriter, r gatewaytest.Seen) bool {
		if r.Method == http.MethodPost {
			close(working)
			<-finish
		}
		return false
	}
	created := make(chan answer, 1)
	go func() {
		a, _ := r.try(ask{method: "POST", path: "/sandboxes", body: `{"templateID":"echo"}`})
		created <- a
	}()
	waittest.Receive(t, "the create to reach the node", working)
	stopped := make(chan error, 1)
	go func() { stopped <- r.stop() }()
	for r.status(r.Ops+"/readyz") != http.StatusServiceUnavailable {
	}
	if got := r.status(r.URL + "/health"); got != http.StatusServiceUnavailable {
		t.Errorf("/health while draining = %d, want 503", got)
	}
	a := r.do(ask{method: "GET", path: "/nodes"})
	if a.Status != 200 || !strings.EqualFold(a.Header.Get("Connection"), "close") && a.Header.Get("Connection") != "" {
		t.Errorf("a request while draining = %d %v, want it served", a.Status, a.Header)
	}
	close(finish)
	if a := <-created; a.Status != http.StatusCreated {
		t.Errorf("the open create = %d %s, want 201", a.Status, a.Body)
	}
	if err := <-stopped; err != nil {
		t.Errorf("Run = %v", err)
	}
}

func (r *replica) status(url string) int {
	resp, err := r.client.Get(url)
	if err != nil {
		r.t.Fatalf("GET %s: %v", url, err)
	}
	defer func() { _ = resp.Body.Close() }()
	return resp.StatusCode
}

func (r *replica) metrics() string {
	r.t.Helper()
	resp, err := r.client.Get(r.Ops + "/metrics")
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return string(text)
}
