package scheduler

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"berth/pkg/flagenv"
	"berth/pkg/telemetry"
	"berth/services/scheduler/internal/placement"
)

// setting is one row of the tables of settings: a flag with all that can be said of it from outside.
type setting struct {
	fallback  string   // the default, as the flag prints it
	variables []string // in order of precedence
	key       string   // in AgentENV's file; "": none

	// Two values that are good, and differ from each other and the default, as flags and variables take
	// them, and how the flag prints the first.
	good, other, printed string

	bad []string // values that refuse the start
}

func berths(name string) []string { return []string{"BERTH_SCHEDULER_" + name} }

// both are our variable and AgentENV's.
func both(name, theirs string) []string { return []string{"BERTH_SCHEDULER_" + name, theirs} }

func duration(name, fallback string, bad ...string) setting {
	return setting{fallback, berths(name), "", "2m1s", "3m", "2m1s", append(bad, "30", "soon", "-1s", "1000000h")}
}

func limitOf(name string) setting {
	return setting{"", berths(strings.ToUpper(name)), "scheduler.node_resource_limit." + name, "7", "0", "7", []string{"many", "-1", "1.5", "18446744073709551616"}}
}

func weight(name, fallback string) setting {
	return setting{fallback, berths("WEIGHT_" + name), "", "1.25", "0", "1.25", []string{"heavy", "-1", "NaN", "+Inf", "1001"}}
}

func count(name, fallback string) setting {
	return setting{fallback, berths(name), "", "7", "9", "7", []string{"0", "-1", "many", "1.5", "9223372036854775807", "9223372036854775808"}}
}

func tokens(name string) setting {
	return setting{"[]", berths(name), "", "a,b", "c", "[a,b]", nil} // any text is a token
}

func text(good, other string, bad ...string) setting {
	return setting{"", nil, "", good, other, good, bad}
}

func named(s setting, variables []string, key string) setting {
	s.variables, s.key = variables, key
	return s
}

func yesOrNo(variables ...string) setting {
	return setting{"false", variables, "", "true", "1", "true", []string{"perhaps", "2"}}
}

const (
	oneNode   = `[{"endpoint":"http://10.0.0.1:80","id":"a"}]`
	otherNode = `[{"endpoint":"http://10.0.0.2:80","id":"b"}]`
)

// settings has a row for every flag. A new flag without one fails the first test below.
var settings = sync.OnceValue(func() map[string]setting {
	rows := settingRows()
	for _, l := range limits(&placement.Limits{}) {
		rows[l.flag()] = limitOf(l.name)
	}
	return rows
})

func settingRows() map[string]setting {
	return map[string]setting{
		"database-url": named(text("postgres://a@h/d", "postgres://b@h/d"), []string{"BERTH_DATABASE_URL"}, ""),
		"pool":         count("POOL", "16"),
		"grpc-listen":  {":9090", both("GRPC_LISTEN", "SCHEDULER_GRPC_LISTEN_ADDR"), "scheduler.grpc_listen_addr", ":1", "h:2", ":1", []string{"h", "h:", "h:x", "h:65536", "1"}},
		"twirp-listen": {":9091", berths("TWIRP_LISTEN"), "", ":1", "h:2", ":1", []string{"h", "h:99999"}},
		"ops-listen":   {":9101", both("OPS_LISTEN", "SCHEDULER_METRICS_LISTEN_ADDR"), "scheduler.metrics_listen_addr", ":1", "h:2", ":1", []string{"h"}},
		"admin-listen": {"127.0.0.1:9111", berths("ADMIN_LISTEN"), "", ":1", "h:2", ":1", []string{"h"}},

		"discovery-mode": {"static", berths("DISCOVERY_MODE"), "scheduler.discovery.mode", "register", "kubernetes", "register", []string{"consul", "Static"}},
		"register":       yesOrNo(berths("REGISTER")...),
		"nodes":          named(text(oneNode, otherNode, "a", "{}"), berths("NODES"), "scheduler.nodes"),
		"discovery-kubernetes-namespace": named(text("a", "b"), berths("DISCOVERY_KUBERNETES_NAMESPACE"),
			"scheduler.discovery.kubernetes.namespace"),
		"discovery-kubernetes-service-name": named(text("a", "b"), berths("DISCOVERY_KUBERNETES_SERVICE_NAME"),
			"scheduler.discovery.kubernetes.service_name"),
		"discovery-kubernetes-port": named(text("8000", "9000"), berths("DISCOVERY_KUBERNETES_PORT"),
			"scheduler.discovery.kubernetes.port"),
		"discovery-kubernetes-scheme": {
			"http", berths("DISCOVERY_KUBERNETES_SCHEME"), "scheduler.discovery.kubernetes.scheme", "https", "h2", "https", nil,
		},
		"discovery-kubernetes-ignore-pod-selector": named(text("a=b", "c"), berths("DISCOVERY_KUBERNETES_IGNORE_POD_SELECTOR"),
			"scheduler.discovery.kubernetes.ignore_pod_selector"),
		"discovery-kubernetes-no-schedule-pod-selector": named(text("a=b", "c"), berths("DISCOVERY_KUBERNETES_NO_SCHEDULE_POD_SELECTOR"),
			"scheduler.discovery.kubernetes.no_schedule_pod_selector"),
		"discovery-kubernetes-prefer-ipv6": yesOrNo(berths("DISCOVERY_KUBERNETES_PREFER_IPV6")...),
		"discovery-kubernetes-kubeconfig":  named(text("/a", "/b"), both("DISCOVERY_KUBERNETES_KUBECONFIG", "KUBECONFIG"), ""),

		"query-only":          yesOrNo(berths("QUERY_ONLY")...),
		"query-database-url":  named(text("postgres://a@h/d", "postgres://b@h/d"), berths("QUERY_DATABASE_URL"), ""),
		"query-max-staleness": duration("QUERY_MAX_STALENESS", "1s", "0s", "16m"),

		"strategy":            {"best_of_k", both("STRATEGY", "SCHEDULER_STRATEGY"), "scheduler.strategy", "random", "round_robin", "random", []string{"best", "Random", "least_loaded"}},
		"sample-size":         count("SAMPLE_SIZE", "3"),
		"place-batch":         count("PLACE_BATCH", "64"),
		"heartbeat-batch":     count("HEARTBEAT_BATCH", "100"),
		"weight-r-cpu":        weight("R_CPU", "4"),
		"weight-r-mem":        weight("R_MEM", "1.5"),
		"weight-cpu-used":     weight("CPU_USED", "0.5"),
		"weight-mem-used":     weight("MEM_USED", "0.5"),
		"weight-starting":     weight("STARTING", "0.05"),
		"weight-spread":       weight("SPREAD", "0.5"),
		"weight-artifact":     weight("ARTIFACT", "0.2"),
		"weight-prefer":       weight("PREFER", "0.5"),
		"report-ttl":          named(duration("REPORT_TTL", "30s", "0s", "2h"), berths("REPORT_TTL"), "scheduler.report_ttl"),
		"reservation-ttl":     duration("RESERVATION_TTL", "1m30s", "0s", "16m"),
		"heartbeat-every":     duration("HEARTBEAT_EVERY", "5s", "0s"),
		"binding-grace":       duration("BINDING_GRACE", "15s"),
		"tombstone-grace":     duration("TOMBSTONE_GRACE", "30s"),
		"lost-grace":          duration("LOST_GRACE", "5m0s", "0s"),
		"parked-ttl":          duration("PARKED_TTL", "15m0s", "0s"),
		"full-reconcile":      duration("FULL_RECONCILE", "1m0s", "0s"),
		"registered-ttl":      duration("REGISTERED_TTL", "1h0m0s", "0s"),
		"drain-delay":         duration("DRAIN_DELAY", "1s"),
		"artifact-touch":      duration("ARTIFACT_TOUCH", "1m0s"),
		"key-retention":       named(duration("", "24h0m0s", "59s"), []string{"BERTH_KEY_RETENTION"}, ""),
		"event-retention":     {"168h0m0s", berths("EVENT_RETENTION"), "", "48h0m1s", "72h", "48h0m1s", []string{"7", "1h", "-1s", "7d"}},
		"tombstone-retention": duration("TOMBSTONE_RETENTION", "10m0s", "0s"),

		"artifact-store-capacity": named(count("", "1000000"), both("ARTIFACT_STORE_CAPACITY", "SCHEDULER_ARTIFACT_STORE_CAPACITY"), "scheduler.artifact_store_capacity"),
		"artifact-lookup-node-limit": {
			"0", both("ARTIFACT_LOOKUP_NODE_LIMIT", "SCHEDULER_ARTIFACT_LOOKUP_NODE_LIMIT"), "scheduler.artifact_lookup_node_limit", "7", "-1", "7", []string{"few", "1.5"},
		},
		"default-cpu-millis": count("DEFAULT_CPU_MILLIS", "2000"),
		"default-memory-mb":  count("DEFAULT_MEMORY_MB", "512"),

		"node-tokens": tokens("NODE_TOKENS"), "gateway-tokens": tokens("GATEWAY_TOKENS"),
		"dispatcher-tokens": tokens("DISPATCHER_TOKENS"), "operator-tokens": tokens("OPERATOR_TOKENS"),
		"require-tokens": yesOrNo(berths("REQUIRE_TOKENS")...),

		"endpoint-cidrs": {
			"[10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,fc00::/7]",
			[]string{"BERTH_ENDPOINT_CIDRS"},
			"", "10.1.0.0/16", "10.2.0.0/16,fd00::/8", "[10.1.0.0/16]",
			[]string{"10.0.0.0", "10.0.0.0/33", "home"},
		},
		"endpoint-schemes":  {"[http,https]", []string{"BERTH_ENDPOINT_SCHEMES"}, "", "http", "https", "[http]", []string{"ftp", "gopher"}},
		"endpoint-loopback": yesOrNo("BERTH_ENDPOINT_LOOPBACK"),

		"tls-cert":      named(text("/a", "/b"), berths("TLS_CERT"), ""),
		"tls-key":       named(text("/a", "/b"), berths("TLS_KEY"), ""),
		"tls-client-ca": named(text("/a", "/b"), berths("TLS_CLIENT_CA"), ""),

		"log-level":  {"info", []string{"BERTH_LOG_LEVEL", "LOG_LEVEL"}, "log_level", "debug", "error", "debug", []string{"loud", "trace"}},
		"log-format": {"auto", []string{"BERTH_LOG_FORMAT", "LOG_FORMAT"}, "log_format", "json", "console", "json", []string{"xml"}},
	}
}

// flagsOf returns a fresh set of flags.
func flagsOf() (*Config, *pflag.FlagSet) {
	cfg := DefaultConfig()
	fs := pflag.NewFlagSet("scheduler", pflag.ContinueOnError)
	cfg.Flags(fs)
	return &cfg, fs
}

func TestEveryFlagHasItsDefaultItsVariablesAndARow(t *testing.T) {
	t.Parallel()
	_, fs := flagsOf()
	left := settingNames()
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Name == "config" {
			return // where the others are read from
		}
		want, known := settings()[f.Name]
		if !known {
			t.Errorf("--%s has no row in settings: say its default, its variables and what is refused", f.Name)
			return
		}
		left = slices.DeleteFunc(left, func(name string) bool { return name == f.Name })
		if f.DefValue != want.fallback {
			t.Errorf("--%s is %q by default, want %q", f.Name, f.DefValue, want.fallback)
		}
		if diff := cmp.Diff(want.variables, flagenv.Names(f, "scheduler")); diff != "" {
			t.Errorf("variables of --%s (-want +got):\n%s", f.Name, diff)
		}
	})
	if len(left) > 0 {
		t.Errorf("no flag is called %v", left)
	}
}

func settingNames() []string {
	var names []string
	for name := range settings() {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// read returns the value that a flag has after all sources were read, as it prints it.
func read(t *testing.T, flag string, args []string, variables map[string]string, file string) string {
	t.Helper()
	cfg, fs := flagsOf()
	if err := fs.Parse(args); err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	if err := flagenv.Apply(fs, "scheduler", func(name string) (string, bool) { v, ok := variables[name]; return v, ok }); err != nil {
		t.Fatalf("%v: %v", variables, err)
	}
	if file != "" {
		if err := flagenv.File(fs, file, cfg.fileKeys()); err != nil {
			t.Fatal(err)
		}
	}
	return fs.Lookup(flag).Value.String()
}

// fileWith writes AgentENV's file with one key.
func fileWith(t *testing.T, key, value string) string {
	t.Helper()
	var inner any = value
	if strings.Contains(key, "limit") || strings.Contains(key, "capacity") {
		inner = json.Number(value)
	}
	if key == "scheduler.nodes" {
		inner = json.RawMessage(value)
	}
	parts := strings.Split(key, ".")
	for _, part := range slices.Backward(parts) {
		inner = map[string]any{part: inner}
	}
	text, err := json.Marshal(inner)
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(name, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestEachSettingIsReadFromEachOfItsSourcesInOrder(t *testing.T) {
	t.Parallel()
	for flag, s := range settings() {
		t.Run(flag, func(t *testing.T) {
			t.Parallel()
			expect := func(what string, args []string, variables map[string]string, file string) {
				t.Helper()
				got := read(t, flag, args, variables, file)
				if got != s.printed {
					t.Errorf("%s: --%s = %q, want %q", what, flag, got, s.printed)
				}
			}
			file, otherFile := "", ""
			if s.key != "" {
				file, otherFile = fileWith(t, s.key, s.good), fileWith(t, s.key, s.other)
				expect("the file", nil, nil, file)
			}
			others := map[string]string{}
			for _, name := range slices.Backward(s.variables) { // the weakest first
				with := map[string]string{name: s.good}
				for weaker := range others {
					with[weaker] = s.other
				}
				expect(name+" above what is weaker", nil, with, otherFile)
				others[name] = s.other
			}
			expect("the flag above all", []string{"--" + flag + "=" + s.good}, others, otherFile)
			for name := range others {
				others[name] = ""
			}
			if file != "" {
				expect("empty variables above the file", nil, others, file)
			}
		})
	}
}

// refuses returns why the start is refused, or nil.
func refuses(t *testing.T, args []string, variables map[string]string, file string) error {
	t.Helper()
	args = append([]string{"--database-url=postgres://u@h/d"}, args...)
	if file != "" {
		args = append(args, "--config="+file)
	}
	cfg, err := parse(args, variables)
	if err = errors.Join(err, cfg.Validate()); err != nil {
		return err
	}
	_, err = telemetry.New(t.Context(), telemetry.Config{Service: "scheduler", LogLevel: cfg.LogLevel, LogFormat: cfg.LogFormat, Output: io.Discard})
	return err
}

func TestEachBadValueRefusesTheStartAndNamesItself(t *testing.T) {
	t.Parallel()
	for flag, s := range settings() {
		t.Run(flag, func(t *testing.T) {
			t.Parallel()
			for _, bad := range s.bad {
				for source, err := range map[string]error{
					"the flag":     refuses(t, []string{"--" + flag + "=" + bad}, nil, ""),
					"the variable": refuses(t, nil, map[string]string{s.variables[0]: bad}, ""),
				} {
					if err == nil {
						t.Errorf("%s %s=%q starts", source, flag, bad)
						continue
					}
					text := err.Error()
					if !strings.Contains(text, flag) && !strings.Contains(text, s.variables[0]) {
						t.Errorf("%s %s=%q: %q does not name it", source, flag, bad, text)
					}
					if !strings.Contains(text, bad) && !strings.Contains(text, strings.Trim(bad, "+-")) {
						t.Errorf("%s %s=%q: %q does not name the value", source, flag, bad, text)
					}
				}
			}
		})
	}
}
