package flagenv_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"berth/pkg/flagenv"
)

type config struct {
	Listen  string
	Pool    int
	TTL     time.Duration
	Domains []string
	Require bool
}

func flags(c *config) *pflag.FlagSet {
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	fs.StringVar(&c.Listen, "grpc-listen", ":9090", "gRPC address")
	fs.IntVar(&c.Pool, "pool", 16, "connections")
	fs.DurationVar(&c.TTL, "report-ttl", 30*time.Second, "lease time")
	fs.StringSliceVar(&c.Domains, "domains", []string{"berth.localhost"}, "domains")
	fs.BoolVar(&c.Require, "require-tokens", false, "refuse callers without a token")
	flagenv.Variables(fs, "grpc-listen", "BERTH_SCHEDULER_GRPC_LISTEN", "SCHEDULER_GRPC_LISTEN_ADDR")
	return fs
}

var keys = map[string]string{
	"scheduler.grpc_listen_addr": "grpc-listen",
	"scheduler.report_ttl":       "report-ttl",
	"scheduler.pool":             "pool",
	"scheduler.redis_addr":       "",
	"gateway.domains":            "domains",
}

func env(pairs map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) { v, ok := pairs[name]; return v, ok }
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestTheMostParticularSourceWins(t *testing.T) {
	t.Parallel()
	const file = `{"scheduler":{"grpc_listen_addr":"file:1"}}`
	tests := map[string]struct {
		args []string
		env  map[string]string
		file string
		want string
	}{
		"nothing is set: the default": {want: ":9090"},
		"the file is above the default": {
			file: file, want: "file:1",
		},
		"the other vendor's variable is above the file": {
			env: map[string]string{"SCHEDULER_GRPC_LISTEN_ADDR": "theirs:1"}, file: file, want: "theirs:1",
		},
		"our variable is above theirs": {
			env:  map[string]string{"SCHEDULER_GRPC_LISTEN_ADDR": "theirs:1", "BERTH_SCHEDULER_GRPC_LISTEN": "ours:1"},
			file: file, want: "ours:1",
		},
		"the flag is above all": {
			args: []string{"--grpc-listen", "flag:1"},
			env:  map[string]string{"BERTH_SCHEDULER_GRPC_LISTEN": "ours:1"}, file: file, want: "flag:1",
		},
		"a flag that repeats the default is above all too": {
			args: []string{"--grpc-listen", ":9090"},
			env:  map[string]string{"BERTH_SCHEDULER_GRPC_LISTEN": "ours:1"}, file: file, want: ":9090",
		},
		"an empty variable is unset": {
			env:  map[string]string{"BERTH_SCHEDULER_GRPC_LISTEN": "", "SCHEDULER_GRPC_LISTEN_ADDR": "theirs:1"},
			want: "theirs:1",
		},
	}
	for name, tt := range tests {
		for _, fileFirst := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				var c config
				fs := flags(&c)
				if err := fs.Parse(tt.args); err != nil {
					t.Fatal(err)
				}
				apply := func() {
					if err := flagenv.Apply(fs, "scheduler", env(tt.env)); err != nil {
						t.Fatalf("Apply: %v", err)
					}
				}
				if !fileFirst {
					apply()
				}
				if tt.file != "" {
					if err := flagenv.File(fs, write(t, tt.file), keys); err != nil {
						t.Fatalf("File: %v", err)
					}
				}
				if fileFirst {
					apply()
				}
				if c.Listen != tt.want {
					t.Errorf("grpc-listen = %q, want %q", c.Listen, tt.want)
				}
			})
		}
	}
}

func TestVariablesReachFlagsOfEveryKind(t *testing.T) {
	t.Parallel()
	var c config
	fs := flags(&c)
	err := flagenv.Apply(fs, "scheduler", env(map[string]string{
		"BERTH_SCHEDULER_POOL": "4", "BERTH_SCHEDULER_REPORT_TTL": "5s",
		"BERTH_SCHEDULER_DOMAINS": "a.test,b.test", "BERTH_SCHEDULER_REQUIRE_TOKENS": "true",
	}))
	if err != nil {
		t.Fatal(err)
	}
	want := config{Listen: ":9090", Pool: 4, TTL: 5 * time.Second, Domains: []string{"a.test", "b.test"}, Require: true}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Errorf("config (-want +got):\n%s", diff)
	}
}

func TestAllMistakesInVariablesAreToldAtOnce(t *testing.T) {
	t.Parallel()
	var c config
	err := flagenv.Apply(flags(&c), "scheduler", env(map[string]string{
		"BERTH_SCHEDULER_POOL": "many", "BERTH_SCHEDULER_REPORT_TTL": "30", "BERTH_SCHEDULER_REQUIRE_TOKENS": "perhaps",
	}))
	want := strings.Join([]string{
		`BERTH_SCHEDULER_POOL="many": a whole number is wanted`,
		`BERTH_SCHEDULER_REPORT_TTL="30": a duration like "30s" is wanted`,
		`BERTH_SCHEDULER_REQUIRE_TOKENS="perhaps": true or false is wanted`,
	}, "\n")
	if err == nil || err.Error() != want {
		t.Errorf("Apply = %v, want:\n%s", err, want)
	}
	if diff := cmp.Diff(config{Listen: ":9090", Pool: 16, TTL: 30 * time.Second, Domains: []string{"berth.localhost"}}, c); diff != "" {
		t.Errorf("refused values must not stay (-want +got):\n%s", diff)
	}
}

func TestAllMistakesInAFileAreToldAtOnce(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		text string
		want []string
	}{
		"an unknown key is named with those beside it": {
			text: `{"scheduler":{"redis_addr":"x","strategie":"best_of_k"},"nodes":1}`,
			want: []string{`unknown key "nodes"`, `unknown key "scheduler.strategie"; known are scheduler.grpc_listen_addr, scheduler.pool`},
		},
		"a number is no duration, a text no number": {
			text: `{"scheduler":{"report_ttl":30,"pool":"many"}}`,
			want: []string{`scheduler.report_ttl: it is 30: a duration like "30s" is wanted`, `scheduler.pool is "many": a whole number is wanted`},
		},
		"null is refused":        {text: `{"scheduler":{"pool":null}}`, want: []string{"scheduler.pool: it is null"}},
		"no JSON":                {text: `pool: 1`, want: []string{"one JSON object"}},
		"something behind it":    {text: `{} {}`, want: []string{"something follows it"}},
		"a list at the top":      {text: `[]`, want: []string{"one JSON object"}},
		"an object for a number": {text: `{"scheduler":{"pool":{"a":1}}}`, want: []string{"scheduler.pool", "a whole number is wanted"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var c config
			err := flagenv.File(flags(&c), write(t, tt.text), keys)
			if err == nil {
				t.Fatalf("File(%s) = nil, want an error", tt.text)
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("File(%s) = %q, want one with %q", tt.text, err, want)
				}
			}
		})
	}
}

func TestAMissingFileIsAnError(t *testing.T) {
	t.Parallel()
	var c config
	err := flagenv.File(flags(&c), filepath.Join(t.TempDir(), "none.json"), keys)
	if err == nil || !strings.Contains(err.Error(), "none.json") {
		t.Errorf("File = %v, want one that names the file", err)
	}
}

func TestAFileSetsListsAndIgnoresWhatItShould(t *testing.T) {
	t.Parallel()
	var c config
	fs := flags(&c)
	text := `{"scheduler":{"redis_addr":"r:1","report_ttl":"10s","pool":3},"gateway":{"domains":["a.test","b.test"]}}`
	if err := flagenv.File(fs, write(t, text), keys); err != nil {
		t.Fatal(err)
	}
	want := config{Listen: ":9090", Pool: 3, TTL: 10 * time.Second, Domains: []string{"a.test", "b.test"}}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Errorf("config (-want +got):\n%s", diff)
	}
}

func TestAVariableReplacesTheListOfAFile(t *testing.T) {
	t.Parallel()
	var c config
	fs := flags(&c)
	if err := flagenv.File(fs, write(t, `{"gateway":{"domains":["a.test","b.test"]}}`), keys); err != nil {
		t.Fatal(err)
	}
	if err := flagenv.Apply(fs, "gateway", env(map[string]string{"BERTH_GATEWAY_DOMAINS": "c.test"})); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"c.test"}, c.Domains); diff != "" {
		t.Errorf("domains (-want +got):\n%s", diff)
	}
}

func TestUsagesNameTheVariablesOnce(t *testing.T) {
	t.Parallel()
	var c config
	fs := flags(&c)
	flagenv.Describe(fs, "scheduler")
	flagenv.Describe(fs, "scheduler")
	for flag, want := range map[string]string{
		"pool":        "connections (env BERTH_SCHEDULER_POOL)",
		"grpc-listen": "gRPC address (env BERTH_SCHEDULER_GRPC_LISTEN, SCHEDULER_GRPC_LISTEN_ADDR)",
	} {
		if got := fs.Lookup(flag).Usage; got != want {
			t.Errorf("usage of %s = %q, want %q", flag, got, want)
		}
	}
}
