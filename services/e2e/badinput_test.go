package e2e

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"berth/pkg/migrate"
	"berth/pkg/pglocal"
)

func contains(text, part string) bool { return strings.Contains(text, part) }

func command(args ...string) *exec.Cmd {
	cmd := exec.Command(binary, args...)
	cmd.Env = environment()
	return cmd
}

// processesNaming returns the processes whose command line has text in it, this one aside.
func processesNaming(t *testing.T, text string) []string {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, path := range paths {
		line, err := os.ReadFile(path)
		if err == nil && contains(string(line), text) {
			found = append(found, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}

// occupied returns an address that somebody listens on.
func occupied(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String()
}

// database is a server of its own, with the schema and a login for each service.
type database struct{ admin, scheduler, gateway string }

func newDatabase(t *testing.T) database {
	t.Helper()
	server, err := pglocal.Start(t.Context(), pglocal.Options{Ephemeral: true, DieWithParent: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(context.WithoutCancel(t.Context()), pglocal.Immediate); err != nil {
			t.Errorf("stop PostgreSQL: %v", err)
		}
	})
	db := database{admin: server.URL("postgres"), scheduler: server.URLAs("s", "", "postgres"), gateway: server.URLAs("g", "", "postgres")}
	if got := run(t, nil, "migrate", "up", "--database-url", db.admin); got.code != 0 || !contains(got.stdout, "the schema is up to date") {
		t.Fatalf("berth migrate up = %+v, want code 0", got)
	}
	for login, group := range map[string]string{"s": "berth_scheduler", "g": "berth_gateway"} {
		if err := migrate.EnsureLogin(t.Context(), db.admin, login, "", group); err != nil {
			t.Fatal(err)
		}
	}
	return db
}

func TestServicesRefuseAnOlderSchemaAndSayWhatToRun(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	if got := run(t, nil, "migrate", "status", "--database-url", db.admin); got.code != 0 || contains(got.stdout, "missing") {
		t.Errorf("berth migrate status = %+v, want code 0 and nothing missing", got)
	}
	if got := run(t, nil, "migrate", "down", "--steps", "1", "--yes", "--database-url", db.admin); got.code != 0 {
		t.Fatalf("berth migrate down = %+v, want code 0", got)
	}
	for name, tt := range map[string]struct{ env, args []string }{
		"scheduler": {schedulerEnv(db.scheduler), []string{"scheduler", "serve", "--register"}},
		"gateway":   {gatewayEnv(db.gateway), []string{"gateway", "serve"}},
	} {
		got := run(t, append(tt.env, anyPorts(name)...), tt.args...)
		if got.code != 1 || !contains(got.stderr, "berth migrate up") || !contains(got.stderr, "berth: ") {
			t.Errorf("berth %s serve on an older schema = %+v, want code 1 and what to run", name, got)
		}
	}
	if got := run(t, nil, "migrate", "status", "--database-url", db.admin); got.code != 1 || !contains(got.stderr, `run "berth migrate up"`) {
		t.Errorf("berth migrate status = %+v, want code 1 and what to run", got)
	}
}

const secret = "0123456789abcdef0123456789abcdef0123456789abcdef"

func schedulerEnv(url string) []string {
	return []string{
		"BERTH_DATABASE_URL=" + url, "BERTH_SCHEDULER_NODE_TOKENS=" + secret, "BERTH_SCHEDULER_GATEWAY_TOKENS=" + secret + "g",
		"BERTH_SCHEDULER_OPERATOR_TOKENS=" + secret + "o", "BERTH_ENDPOINT_LOOPBACK=true",
	}
}

func gatewayEnv(url string) []string {
	return []string{
		"BERTH_DATABASE_URL=" + url, "BERTH_SCHEDULER_URL=http://127.0.0.1:1", "BERTH_SCHEDULER_TOKEN=" + secret + "g",
		"BERTH_API_KEY=e2b_" + secret, "BERTH_NODE_KEY=" + secret, "BERTH_CLUSTER_SECRET=" + secret, "BERTH_ENDPOINT_LOOPBACK=true",
	}
}

func nodeEnv() []string {
	return []string{"BERTH_SCHEDULER_TOKEN=" + secret, "BERTH_NODE_KEY=" + secret}
}

// anyPorts lets a service listen where nobody else is.
func anyPorts(service string) []string {
	prefix := "BERTH_" + strings.ToUpper(service) + "_"
	env := []string{prefix + "OPS_LISTEN=127.0.0.1:0", prefix + "ADMIN_LISTEN=127.0.0.1:0"}
	switch service {
	case "scheduler":
		env = append(env, prefix+"GRPC_LISTEN=127.0.0.1:0", prefix+"TWIRP_LISTEN=127.0.0.1:0")
	default:
		env = append(env, prefix+"LISTEN=127.0.0.1:0")
	}
	return env
}

func TestAProcessThatCannotRunSaysWhyAndWhatToDo(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	taken := occupied(t)
	config := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(config, []byte(`{"scheduler":{"strategie":"best_of_k"},"gateway":{"domain":"x"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	templates := filepath.Join(t.TempDir(), "templates.yaml")
	if err := os.WriteFile(templates, []byte("templates:\n  app:\n    comand: [sh]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	node := []string{
		"nodeagent", "serve", "--node-id", "n1", "--endpoint", "http://127.0.0.1:8000", "--scheduler-grpc", "127.0.0.1:1", "--data", t.TempDir(),
	}
	scheduler := []string{"scheduler", "serve", "--register"}
	nowhere := "postgres://127.0.0.1:1/berth"
	tests := map[string]struct {
		service   string
		env, args []string
		want      []string
	}{
		"scheduler: unreachable database": {"scheduler", schedulerEnv(nowhere), scheduler, []string{"127.0.0.1:1", "nothing listens there"}},
		"gateway: unreachable database":   {"gateway", gatewayEnv(nowhere), []string{"gateway", "serve"}, []string{"127.0.0.1:1", "nothing listens there"}},
		"scheduler: occupied port": {
			"scheduler", schedulerEnv(db.scheduler), append(scheduler, "--twirp-listen", taken),
			[]string{taken, "address already in use", "choose another address"},
		},
		"gateway: occupied port": {
			"gateway", gatewayEnv(db.gateway),
			[]string{"gateway", "serve", "--listen", taken},
			[]string{taken, "address already in use", "choose another address"},
		},
		"nodeagent: occupied port": {
			"nodeagent", nodeEnv(), append(node, "--listen", taken),
			[]string{taken, "address already in use", "choose another address"},
		},
		"scheduler: misspelled strategy": {
			"scheduler", schedulerEnv(db.scheduler), append(scheduler, "--strategy", "best_of_kay"),
			[]string{"best_of_kay", "best_of_k"},
		},
		"scheduler: unknown key in its file": {
			"scheduler", schedulerEnv(db.scheduler), append(scheduler, "--config", config),
			[]string{"scheduler.strategie"},
		},
		"gateway: unknown key in its file": {
			"gateway", gatewayEnv(db.gateway),
			[]string{"gateway", "serve", "--config", config},
			[]string{"gateway.domain", "gateway.sandbox_proxy_domains"},
		},
		"nodeagent: unknown key in its templates": {"nodeagent", nodeEnv(), append(node, "--templates", templates), []string{"comand"}},
		"nodeagent: unknown isolation":            {"nodeagent", nodeEnv(), append(node, "--isolation", "jail"), []string{"jail", "bubblewrap or none"}},
		"nodeagent: malformed endpoint":           {"nodeagent", nodeEnv(), append(node, "--endpoint", "127.0.0.1:8000"), []string{"--endpoint", "http://"}},
		"gateway: everything is missing, told at once": {
			"gateway", nil,
			[]string{"gateway", "serve"},
			[]string{"BERTH_DATABASE_URL", "BERTH_SCHEDULER_URL", "BERTH_CLUSTER_SECRET", "BERTH_API_KEY"},
		},
		"scheduler: a duration that is none": {
			"scheduler", append(schedulerEnv(db.scheduler), "BERTH_SCHEDULER_REPORT_TTL=30"), scheduler,
			[]string{`BERTH_SCHEDULER_REPORT_TTL="30"`, "a duration"},
		},
		"an unknown log level": {"scheduler", append(schedulerEnv(db.scheduler), "BERTH_LOG_LEVEL=loud"), scheduler, []string{`loud`, "debug, info, warn"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := run(t, append(tt.env, anyPorts(tt.service)...), tt.args...)
			if got.code == 0 || !contains(got.stderr, "berth: ") {
				t.Errorf("berth %q = code %d, stderr %s; want another code and an error", tt.args, got.code, got.stderr)
			}
			for _, want := range tt.want {
				if !contains(got.stderr, want) {
					t.Errorf("berth %q says %s; want %q in it", tt.args, got.stderr, want)
				}
			}
			if contains(got.stderr, "goroutine ") {
				t.Errorf("berth %q panicked: %s", tt.args, got.stderr)
			}
		})
	}
}

func TestADatabaseOfOnesOwnWorksOrTheMissingGrantIsNamed(t *testing.T) {
	t.Parallel()
	server, err := pglocal.Start(t.Context(), pglocal.Options{Ephemeral: true, DieWithParent: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(context.WithoutCancel(t.Context()), pglocal.Immediate); err != nil {
			t.Errorf("stop PostgreSQL: %v", err)
		}
	})
	admin := &stack{t: t, info: info{DatabaseURL: server.URL("postgres")}}
	for _, statement := range []string{
		"CREATE ROLE maker LOGIN CREATEROLE", "CREATE ROLE weak LOGIN", "CREATE DATABASE mine OWNER maker", "CREATE DATABASE other OWNER weak",
	} {
		admin.sql(statement)
	}
	// Before anybody made the group roles, the weak one may not; afterwards it is not a member.
	for _, want := range []string{"CREATEROLE", "GRANT berth_migrator TO"} {
		got := run(t, nil, "dev", "--ephemeral", "--database-url", server.URLAs("weak", "", "other"))
		if got.code != 1 || !contains(got.stderr, "a superuser must run") || !contains(got.stderr, want) {
			t.Errorf("berth dev as a weak login = %+v, want code 1 and %q", got, want)
		}
		if want == "CREATEROLE" {
			s := start(t, "--schedulers", "1", "--gateways", "1", "--nodes", "1", "--database-url", server.URLAs("maker", "", "mine"))
			if err := s.client(0).life(t.Context()); err != nil {
				t.Errorf("on a database of one's own: %v", err)
			}
			if _, embedded := s.PIDs["postgres"]; embedded {
				t.Errorf("processes = %v, want no PostgreSQL", s.PIDs)
			}
			s.stop()
		}
	}
	empty := t.TempDir()
	if got := run(t, nil, "dev", "--ephemeral", "--postgres-bin", empty); got.code != 1 || !contains(got.stderr, "no PostgreSQL server found") || !contains(got.stderr, empty) {
		t.Errorf("berth dev with a folder without PostgreSQL = %+v, want code 1 and the folder", got)
	}
	if got := run(t, nil, "dev", "--ephemeral", "--database-url", "postgres://127.0.0.1:1/x"); got.code != 1 || !contains(got.stderr, "nothing listens there") {
		t.Errorf("berth dev without a database = %+v, want code 1 and the reason", got)
	}
}
