package scheduler

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/pflag"

	"berth/migrations"
	"berth/pkg/flagenv"
	"berth/pkg/pgtest"
	"berth/services/internal/node"
	"berth/services/scheduler/internal/nodes"
)

// fileConfig is a configuration from a file with text in it, and how to change that.
func fileConfig(t *testing.T, text string, args ...string) (cfg *Config, change func(text string)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.json")
	change = func(text string) {
		t.Helper()
		// As a ConfigMap changes: the name leads to another file.
		next := path + ".next"
		if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, path); err != nil {
			t.Fatal(err)
		}
	}
	change(text)
	c := DefaultConfig()
	fs := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	c.Flags(fs)
	if err := fs.Parse(append([]string{"--config=" + path, "--database-url=postgres://u@h/d"}, args...)); err != nil {
		t.Fatal(err)
	}
	if err := flagenv.Apply(fs, "scheduler", func(string) (string, bool) { return "", false }); err != nil {
		t.Fatal(err)
	}
	return &c, change
}

func TestAChangedFileIsReadAsAtAStart(t *testing.T) {
	t.Parallel()
	const one = `{"scheduler": {"nodes": [{"id": "a", "endpoint": "http://10.0.0.1:8000"}]}}`
	a := []nodes.StaticNode{{ID: "a", Endpoint: "http://10.0.0.1:8000"}}
	b := []nodes.StaticNode{{ID: "b", Endpoint: "http://10.0.0.2:8000"}}
	tests := map[string]struct {
		args   []string
		before string
		after  string
		want   []nodes.StaticNode
		wrong  []string // texts of the mistake; nil: none
	}{
		"another node": {before: one, after: `{"scheduler": {"nodes": [{"id": "b", "endpoint": "http://10.0.0.2:8000/"}]}}`, want: b},
		"the same":     {before: one, after: one, want: a},
		"no JSON":      {before: one, after: "{\n\n\"scheduler\": oops}", wrong: []string{"line 3"}},
		"a bad entry": {
			before: one, after: `{"scheduler": {"nodes": [{"id": "b", "endpoint": "http://10.0.0.2:8000"}, {"id": "c", "endpoint": "10.0.0.3"}]}}`,
			wrong: []string{"scheduler.nodes", "entry 2", "10.0.0.3"},
		},
		"another key that is bad": {
			before: one, after: `{"scheduler": {"report_ttl": "0s", "nodes": [{"id": "b", "endpoint": "http://10.0.0.2:8000"}]}}`,
			wrong: []string{"report-ttl"},
		},
		"an unknown key": {before: one, after: `{"scheduler": {"node": []}}`, wrong: []string{`"scheduler.node"`}},
		"an empty list":  {before: one, after: `{"scheduler": {"nodes": []}}`, wrong: []string{"scheduler.nodes", "empty"}},
		"no list":        {before: one, after: `{"scheduler": {}}`, wrong: []string{"scheduler.nodes", "missing"}},
		"a key that a flag sets, too": {
			args: []string{"--report-ttl=20s"}, before: one,
			after: `{"scheduler": {"report_ttl": "0s", "nodes": [{"id": "b", "endpoint": "http://10.0.0.2:8000"}]}}`, want: b,
		},
		"nodes beside Kubernetes that come later": {
			args: kubernetesArgs(), before: `{}`, after: `{"scheduler": {"nodes": [{"id": "b", "endpoint": "http://10.0.0.2:8000"}]}}`, want: b,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg, change := fileConfig(t, tt.before, tt.args...)
			if err := cfg.Validate(); err != nil {
				t.Fatalf("Validate = %v", err)
			}
			if !cfg.reloads() {
				t.Error("the file is not followed")
			}
			change(tt.after)
			got, err := cfg.reload()
			if (err != nil) != (tt.wrong != nil) {
				t.Fatalf("reload = %v, %v, want a mistake: %t", got, err, tt.wrong != nil)
			}
			for _, want := range tt.wrong {
				if !containsText(err, want) {
					t.Errorf("reload = %q, want it to say %q", err, want)
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("nodes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAListThatAFlagGivesIsNotTheFiles(t *testing.T) {
	t.Parallel()
	cfg, _ := fileConfig(t, `{"scheduler": {"nodes": [{"id": "a", "endpoint": "http://10.0.0.1:8000"}]}}`, `--nodes=[{"id": "b", "endpoint": "http://10.0.0.2:8000"}]`)
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	if cfg.reloads() || cfg.checked.static[0].ID != "b" {
		t.Errorf("static = %v, followed: %t; want the flag's for good", cfg.checked.static, cfg.reloads())
	}
}

func TestEachModeHasItsStaticList(t *testing.T) {
	t.Parallel()
	const file = `{"gateway": {"http_listen_addr": ":8080"}, "scheduler": {"discovery": {"mode": "kubernetes", "kubernetes": {
		"namespace": "n", "service_name": "s", "port": 8000, "scheme": "https", "prefer_ipv6": true, "ignore_pod_selector": "a=b"}}}}`
	tests := map[string]struct {
		file string
		args []string
		want int // static nodes
	}{
		"static":                      {`{}`, nil, 1}, // AgentENV's default
		"Kubernetes, by flags":        {`{}`, kubernetesArgs(), 0},
		"Kubernetes, by a file":       {file, nil, 0},
		"Kubernetes with static ones": {file, []string{`--nodes=[{"id": "b", "endpoint": "http://10.0.0.2:8000"}]`}, 1},
		"register":                    {`{}`, []string{"--discovery-mode=register"}, 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg, _ := fileConfig(t, tt.file, tt.args...)
			if err := cfg.Validate(); err != nil {
				t.Fatalf("Validate = %v", err)
			}
			if got := len(cfg.checked.static); got != tt.want {
				t.Errorf("%d static nodes, want %d", got, tt.want)
			}
			if cfg.DiscoveryMode == discoveryRegister && !cfg.Register {
				t.Error("nodes cannot register")
			}
		})
	}
}

func TestARunningSchedulerFollowsItsFile(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	cfg, change := fileConfig(t, `{"scheduler": {"nodes": [{"id": "a", "endpoint": "http://10.0.0.1:8000"}, {"id": "b", "endpoint": "http://10.0.0.2:8000"}]}}`)
	base := config(t, schedulerURL(t, db))
	cfg.DatabaseURL, cfg.Pool, cfg.DrainDelay = base.DatabaseURL, base.Pool, 0
	cfg.GRPCListen, cfg.TwirpListen, cfg.OpsListen, cfg.AdminListen = base.GRPCListen, base.TwirpListen, base.OpsListen, base.AdminListen
	start(t, *cfg)
	want := func(when string, ids ...node.ID) {
		t.Helper()
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		late := time.NewTimer(time.Minute)
		defer late.Stop()
		for {
			rows, err := db.Query(t.Context(), `SELECT node_id FROM nodes WHERE present ORDER BY node_id`)
			if err != nil {
				t.Fatal(err)
			}
			got, err := pgx.CollectRows(rows, pgx.RowTo[node.ID])
			if err != nil {
				t.Fatal(err)
			}
			diff := cmp.Diff(ids, got)
			if diff == "" {
				return
			}
			select {
			case <-late.C:
				t.Fatalf("present nodes %s (-want +got):\n%s", when, diff)
			case <-tick.C:
			}
		}
	}
	want("at the start", "a", "b")
	change(`{"scheduler": {"nodes": [{"id": "c", "endpoint": "http://10.0.0.3:8000"}, {"id": "b", "endpoint": "http://10.0.0.2:8000"}]}}`)
	want("after a change", "b", "c")
	change(`{"scheduler": {"nodes": [{"id": "c"}]}}`)
	awaitMetric(t, cfg.OpsListen, `berth_scheduler_discovery_failing{source="static"} 1`)
	want("after a bad change", "b", "c")
	change(`{"scheduler": {"nodes": [{"id": "a", "endpoint": "http://10.0.0.1:8000"}]}}`)
	want("after a good one", "a")
	awaitMetric(t, cfg.OpsListen, `berth_scheduler_discovery_failing{source="static"} 0`)
}

func containsText(err error, text string) bool {
	return err != nil && strings.Contains(err.Error(), text)
}

// awaitMetric returns once the replica shows line.
func awaitMetric(t *testing.T, opsListen, line string) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	late := time.NewTimer(time.Minute)
	defer late.Stop()
	for {
		_, shown := get(t, "http://"+opsListen+"/metrics")
		if strings.Contains(shown, line+"\n") {
			return
		}
		select {
		case <-late.C:
			t.Fatalf("the metrics never show %s", line)
		case <-tick.C:
		}
	}
}
