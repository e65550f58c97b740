package nodeagent_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/pkg/telemetry"
	"berth/services/internal/node"
	"berth/services/nodeagent"
)

type nodeagentConfig = nodeagent.Config

func writeFile(t testing.TB, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// runError runs an agent that must not start, and returns why.
func runError(t testing.TB, cfg nodeagent.Config) error {
	t.Helper()
	tel, err := telemetry.New(t.Context(), telemetry.Config{Service: "nodeagent", Output: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tel.Close(context.WithoutCancel(t.Context())) }()
	return nodeagent.Run(t.Context(), cfg, tel, "test")
}

func TestABadConfigurationNamesEachMistake(t *testing.T) {
	t.Parallel()
	good := nodeagent.DefaultConfig()
	good.NodeID, good.Endpoint, good.NodeKeys, good.SchedulerGRPC = "a", "http://127.0.0.1:1", []string{"k"}, []string{"127.0.0.1:1"}
	if err := good.Validate(); err != nil {
		t.Fatalf("a good configuration: %v", err)
	}
	cases := map[string]struct {
		change func(*nodeagent.Config)
		want   string
	}{
		"no node id":             {func(c *nodeagent.Config) { c.NodeID = " " }, `--node-id (BERTH_NODEAGENT_NODE_ID) is " "`},
		"a node id that is none": {func(c *nodeagent.Config) { c.NodeID = "a b" }, `is "a b": node_id is not valid`},
		"no endpoint":            {func(c *nodeagent.Config) { c.Endpoint = "" }, "--endpoint (BERTH_NODEAGENT_ENDPOINT)"},
		"an endpoint with path":  {func(c *nodeagent.Config) { c.Endpoint = "http://a:1/x" }, "it has a path"},
		"an endpoint that is ws": {func(c *nodeagent.Config) { c.Endpoint = "ws://a:1" }, "not an http or https URL"},
		"no key":                 {func(c *nodeagent.Config) { c.NodeKeys = nil }, "--node-key (BERTH_NODE_KEY)"},
		"an empty second key":    {func(c *nodeagent.Config) { c.NodeKeys = []string{"a", ""} }, "has an empty key"},
		"isolation misspelled":   {func(c *nodeagent.Config) { c.Isolation = "bubblewarp" }, `is "bubblewarp": give bubblewrap or none`},
		"transport misspelled":   {func(c *nodeagent.Config) { c.Transport = "http" }, `is "http": give grpc or twirp`},
		"no scheduler":           {func(c *nodeagent.Config) { c.SchedulerGRPC = nil }, "BERTH_NODEAGENT_SCHEDULER_GRPC"},
		"a scheduler URL as gRPC": {
			func(c *nodeagent.Config) { c.SchedulerGRPC = []string{"http://x:1"} },
			`is "http://x:1"`,
		},
		"no Twirp scheduler":    {func(c *nodeagent.Config) { c.Transport = "twirp" }, "BERTH_SCHEDULER_URL"},
		"root in sandboxes":     {func(c *nodeagent.Config) { c.SandboxUID = 0 }, "cannot be root"},
		"no room for sandboxes": {func(c *nodeagent.Config) { c.MaxSandboxes = 0 }, "--max-sandboxes"},
		"half a peer":           {func(c *nodeagent.Config) { c.P2PBackend = "x" }, "go together"},
		"a listen address without port": {
			func(c *nodeagent.Config) { c.Listen = "localhost" },
			`--listen (BERTH_NODEAGENT_LISTEN) is "localhost": it is not host:port`,
		},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := good
			tt.change(&cfg)
			if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Validate() = %v, want an error with %q", err, tt.want)
			}
		})
	}
	two := good
	two.Transport, two.MaxSandboxes = "x", 0
	if err := two.Validate(); err == nil || !strings.Contains(err.Error(), "--transport") || !strings.Contains(err.Error(), "--max-sandboxes") {
		t.Errorf("two mistakes: %v", err)
	}
}

func TestAnOccupiedPortIsAnError(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	l, err := net.Listen("tcp", a.cfg.Listen)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := runError(t, a.cfg); err == nil || !strings.Contains(err.Error(), a.cfg.Listen) {
		t.Errorf("Run = %v, want an error that names %s", err, a.cfg.Listen)
	}
}

func TestOneAgentForOneDataFolder(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	if err := runError(t, a.cfg); err == nil || !strings.Contains(err.Error(), "another node agent runs on "+a.cfg.Data) {
		t.Errorf("second Run = %v", err)
	}
}

func TestADataFolderThatCannotBeIsAnError(t *testing.T) {
	t.Parallel()
	a := newAgent(t, func(c *nodeagent.Config) { c.Data = filepath.Join(writeFile(t, "file", ""), "data") })
	err := runError(t, a.cfg)
	if err == nil || !strings.Contains(err.Error(), "--data "+a.cfg.Data) || !strings.Contains(err.Error(), "give a folder that this user may make and write") {
		t.Errorf("Run = %v", err)
	}
}

func TestRecordsThatTellNoSandboxStopTheStart(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	stop := a.run()
	a.create("good", "shell", "")
	stop()
	journal := filepath.Join(a.cfg.Data, "journal")
	for id, text := range map[string]string{"empty": `{"id":"empty"}`, "other": `{"id":"other","state":{"paused":"no"}}`} {
		if err := os.WriteFile(filepath.Join(journal, id+".json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	err := runError(t, a.cfg)
	for _, want := range []string{filepath.Join(journal, "empty.json"), filepath.Join(journal, "other.json"), "move it away if that sandbox may be forgotten"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Run = %v, want %q in it", err, want)
		}
	}
	if got := initsOf(t, a); len(got) != 0 {
		t.Errorf("sandboxes %v run although the start was refused", got)
	}
}

func TestABadTemplateFileIsAnError(t *testing.T) {
	t.Parallel()
	a := newAgent(t, func(c *nodeagent.Config) { c.Templates = writeFile(t, "t.yaml", "templates: {a: {comand: [x]}}") })
	if err := runError(t, a.cfg); err == nil || !strings.Contains(err.Error(), "field comand not found") {
		t.Errorf("Run = %v", err)
	}
}

func TestACommandThatCannotStartLeavesNothing(t *testing.T) {
	t.Parallel()
	a := newAgent(t, func(c *nodeagent.Config) {
		c.Templates = writeFile(t, "t.yaml", "templates: {bad: {command: [no-such-program]}}")
	})
	a.run()
	h := headers{"Berth-Sandbox-Id": "x"}
	if r := a.call("POST", "/sandboxes", `{"templateID":"bad"}`, h); r.status != 500 || r.json(t)["message"] != "internal error" {
		t.Errorf("create: %d %s", r.status, r.body)
	}
	if r := a.call("GET", "/sandboxes/x", ""); r.status != 404 {
		t.Errorf("get: %d %s", r.status, r.body)
	}
	if r := a.call("POST", "/sandboxes", `{"templateID":"shell"}`, h); r.status != 201 {
		t.Errorf("create of the same id again: %d %s", r.status, r.body)
	}
	a.scheduler.wait(t, "one failed create", func(f *fakeScheduler) bool { return f.beats[len(f.beats)-1].GetSnapshot().GetCreateFails() == 1 })
}

func TestADeadSchedulerIsPassedOver(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*testing.T, *nodeagent.Config){
		"grpc": func(t *testing.T, c *nodeagent.Config) {
			c.SchedulerGRPC = append([]string{freeAddress(t)}, c.SchedulerGRPC...)
		},
		"twirp": func(t *testing.T, c *nodeagent.Config) {
			c.Transport, c.SchedulerURLs = "twirp", []string{"http://" + freeAddress(t)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newAgent(t, func(c *nodeagent.Config) { change(t, c) })
			if a.cfg.Transport == "twirp" {
				a.cfg.SchedulerURLs = append(a.cfg.SchedulerURLs, serveTwirp(t, a.scheduler))
			}
			stop := a.run() // is ready only after an accepted heartbeat
			stop()
			a.scheduler.wait(t, "unregister", func(f *fakeScheduler) bool { return len(f.unreg) == 1 })
		})
	}
}

func TestARefusedHeartbeatSaysWhatToDo(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.scheduler.refuse = node.ErrSuperseded
	out := writeFile(t, "log", "")
	log, err := os.OpenFile(out, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	ctx, cancel := context.WithCancel(t.Context())
	tel, err := telemetry.New(ctx, telemetry.Config{Service: "nodeagent", LogFormat: "json", Output: log})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- nodeagent.Run(ctx, a.cfg, tel, "test") }()
	a.scheduler.wait(t, "a heartbeat", func(f *fakeScheduler) bool { return len(f.beats) > 0 })
	for {
		text, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "heartbeat failed") {
			if !strings.Contains(string(text), "a newer agent runs under this node id") {
				t.Errorf("log is %s", text)
			}
			break
		}
	}
	cancel()
	if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("Run: %v", err)
	}
	if err := tel.Close(context.WithoutCancel(t.Context())); err != nil {
		t.Error(err)
	}
}

func TestNoIsolationIsLoudAndWorks(t *testing.T) {
	t.Parallel()
	a := newAgent(t, func(c *nodeagent.Config) { c.Isolation = "none" })
	a.run()
	a.create("s", "echo", `,"envVars":{"PORT":"`+portOf(freeAddress(t))+`"}`)
	if nodeagent.DefaultConfig().Isolation == "none" {
		t.Error("no isolation is the default")
	}
	if r := a.call("POST", "/sandboxes/s/pause", ""); r.status != 204 {
		t.Errorf("pause: %d %s", r.status, r.body)
	}
	if r := a.call("POST", "/sandboxes/s/resume", "{}"); r.status != 201 {
		t.Errorf("resume: %d %s", r.status, r.body)
	}
	if r := a.call("DELETE", "/sandboxes/s", ""); r.status != 204 {
		t.Errorf("delete: %d %s", r.status, r.body)
	}
}

func portOf(address string) string {
	_, port, _ := net.SplitHostPort(address)
	return port
}
