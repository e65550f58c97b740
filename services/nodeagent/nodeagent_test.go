package nodeagent_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"

	"berth/pkg/waittest"
	"berth/services/internal/node"
	"berth/services/nodeagent"
)

func TestTheMainJob(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()

	created := a.create("one", "base", `,"metadata":{"k":"v"}`).json(t)
	for field, want := range map[string]any{"sandboxID": "one", "templateID": "echo", "alias": "base", "clientID": "node-a", "envdVersion": "0.1.0"} {
		if created[field] != want {
			t.Errorf("create answered %s %v, want %v", field, created[field], want)
		}
	}
	a.scheduler.waitRoster(t, "one")

	var dump struct {
		Target, RawQuery string
		Headers          http.Header
	}
	r := a.ask("one", 3000, "/a%2fb//c?x=%20&y", headers{"Berth-Incarnation": "1", "X-Own": "yes", "Berth-Route-Revision": "5"})
	if err := json.Unmarshal([]byte(r.body), &dump); err != nil {
		t.Fatalf("%d %q: %v", r.status, r.body, err)
	}
	if dump.Target != "/a%2fb//c?x=%20&y" {
		t.Errorf("the application saw %q", dump.Target)
	}
	for name := range dump.Headers {
		if name == "X-Api-Key" || strings.HasPrefix(name, "Berth-") || strings.HasPrefix(name, "X-Agentenv-") {
			t.Errorf("the application saw %s", name)
		}
	}
	if dump.Headers.Get("X-Own") != "yes" {
		t.Error("the application did not see the client's own header")
	}
	echoOverWebSocket(t, a, "one")

	if r := a.call("DELETE", "/sandboxes/one", ""); r.status != http.StatusNoContent {
		t.Errorf("delete: %d %s", r.status, r.body)
	}
	a.scheduler.waitRoster(t)
	second := a.call("DELETE", "/sandboxes/one", "")
	if got := second.json(t); second.status != http.StatusNotFound || got["code"] != 404.0 || got["message"] != "sandbox one not found" {
		t.Errorf("second delete: %d %s", second.status, second.body)
	}
	if r := a.call("GET", "/proxy/", "", pair("one", 3000)); r.status != http.StatusBadGateway || r.json(t)["message"] != "sandbox one not found" {
		t.Errorf("data plane of a deleted sandbox: %d %s", r.status, r.body)
	}
}

func echoOverWebSocket(t testing.TB, a *agent, id string) {
	t.Helper()
	h := http.Header{"X-Api-Key": {nodeKey}}
	for name, value := range pair(id, 3000) {
		h.Set(name, value)
	}
	conn, resp, err := websocket.Dial(t.Context(), strings.Replace(a.base, "http", "ws", 1)+"/proxy/ws", &websocket.DialOptions{HTTPHeader: h, HTTPClient: a.client, Subprotocols: []string{"echo"}})
	if err != nil {
		t.Fatalf("WebSocket: %v (%v)", err, resp)
	}
	defer conn.CloseNow()
	if conn.Subprotocol() != "echo" {
		t.Errorf("sub-protocol %q, want echo", conn.Subprotocol())
	}
	for _, text := range []string{"hello", strings.Repeat("x", 100_000)} {
		conn.SetReadLimit(1 << 20)
		if err := conn.Write(t.Context(), websocket.MessageText, []byte(text)); err != nil {
			t.Fatalf("WebSocket write: %v", err)
		}
		_, got, err := conn.Read(t.Context())
		if err != nil || string(got) != text {
			t.Fatalf("WebSocket answered %d bytes, %v", len(got), err)
		}
	}
	if err := conn.Close(websocket.StatusNormalClosure, ""); err != nil {
		t.Errorf("WebSocket close: %v", err)
	}
}

func TestAHeartbeatTellsEverything(t *testing.T) {
	t.Parallel()
	a := newAgent(t, func(c *nodeagent.Config) {
		c.Labels, c.P2PBackend, c.P2PAddress, c.CapacityCPUMillis = map[string]string{"zone": "a"}, "files", "10.0.0.1:7000", 4000
	})
	a.run()
	a.create("up", "shell", "")
	a.create("still", "shell", "")
	if r := a.call("POST", "/sandboxes/still/pause", ""); r.status != http.StatusNoContent {
		t.Fatalf("pause: %d %s", r.status, r.body)
	}
	a.scheduler.wait(t, "both sandboxes, one paused", func(f *fakeScheduler) bool {
		b := f.beats[len(f.beats)-1]
		return len(b.GetSandboxIds()) == 2 && b.GetSnapshot().GetPausedSandboxCount() == 1
	})
	a.scheduler.mu.Lock()
	defer a.scheduler.mu.Unlock()
	beats := a.scheduler.beats
	b := beats[len(beats)-1]
	s := b.GetSnapshot()
	if b.GetNodeId() != "node-a" || b.GetClusterId() != "test" || b.GetServiceInstanceId() == "" || b.GetEndpoint() != a.cfg.Endpoint || b.GetVersion() != "test" {
		t.Errorf("identity is %v", b)
	}
	if s.GetSandboxCount() != 1 || s.GetAllocatedCpu() != 1 || s.GetPausedAllocatedCpu() != 1 || s.GetCreateSuccesses() != 2 {
		t.Errorf("snapshot is %v", s)
	}
	if s.GetMemoryTotalBytes() < 1<<26 || s.GetMemoryUsedBytes() == 0 || s.GetCpuCount() == 0 || len(s.GetDisks()) != 1 || s.GetDisks()[0].GetTotalBytes() == 0 {
		t.Errorf("the machine is not measured: %v", s)
	}
	if b.GetMachineInfo().GetCpuArchitecture() == "" || b.GetP2PEndpoint().GetBackend() != "files" || b.GetLabels()["zone"] != "a" || b.GetCapacity().GetCpuMillis() != 4000 {
		t.Errorf("facts are missing: %v", b)
	}
	if !slices.Contains(b.GetCapabilities(), "create_key") || !slices.Contains(b.GetCapabilities(), "route_revision") {
		t.Errorf("capabilities are %v", b.GetCapabilities())
	}
	for _, e := range b.GetRoster() {
		if e.GetReservationId() != "r-"+e.GetSandboxId() || e.GetCpuMillis() != 250 || e.GetMemoryBytes() != 128<<20 {
			t.Errorf("roster entry is %v", e)
		}
	}
	roster, _ := node.NewRoster(b.GetSandboxIds(), nil)
	if diff := cmp.Diff(roster.Digest(), b.GetRosterDigest()); diff != "" {
		t.Errorf("digest (-of the ids +sent):\n%s", diff)
	}
	for i := 1; i < len(beats); i++ {
		if beats[i].GetSeq() <= beats[i-1].GetSeq() {
			t.Errorf("seq %d after %d", beats[i].GetSeq(), beats[i-1].GetSeq())
		}
	}
	if len(a.scheduler.tokens) == 0 || a.scheduler.tokens[0] != "Bearer "+nodeToken {
		t.Errorf("tokens are %q", a.scheduler.tokens)
	}
}

func TestTheFirstRequestMayComeRightAfterTheCreate(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	for i := range 3 {
		id := fmt.Sprintf("s-%d", i)
		a.create(id, "echo", "")
		if r := a.call("GET", "/proxy/", "", pair(id, 3000)); r.status != http.StatusOK {
			t.Errorf("the first request: %d %s", r.status, r.body)
		}
	}
}

func TestOneIdIsCreatedOnce(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	const callers = 8
	answers := make([]answer, callers)
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() {
			answers[i], _ = a.try("POST", "/sandboxes", `{"templateID":"shell","timeout":`+fmt.Sprint(100+i)+`}`, headers{"Berth-Sandbox-Id": "same"})
		})
	}
	all.Wait()
	for i, r := range answers {
		if r.status != http.StatusCreated || r.body != answers[0].body {
			t.Errorf("create %d answered %d %s, the first %s", i, r.status, r.body, answers[0].body)
		}
	}
	a.scheduler.waitRoster(t, "same")
	a.call("DELETE", "/sandboxes/same", "")
	again := a.call("POST", "/sandboxes", `{"templateID":"shell"}`, headers{"Berth-Sandbox-Id": "same"})
	if again.status != http.StatusConflict || again.json(t)["message"] != "sandbox same was deleted" {
		t.Errorf("create of a deleted id: %d %s", again.status, again.body)
	}
}

func TestAKilledAgentBringsItsSandboxesBack(t *testing.T) {
	t.Parallel()
	for name, uid := range map[string]int{"as root": 0, "as an ordinary user": nobody} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if os.Getuid() != 0 && uid != 0 {
				uid = 0 // this run is an ordinary user's already
			}
			if os.Getuid() != 0 && name == "as root" {
				t.Skip("only root can be root")
			}
			a := newAgent(t, func(c *nodeagent.Config) { c.Data = openFolder(t) + "/data" })
			if uid != 0 {
				if err := os.Mkdir(a.cfg.Data, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.Chown(a.cfg.Data, uid, uid); err != nil {
					t.Fatal(err)
				}
			}
			first := a.process(uid)
			created := a.create("kept", "echo", `,"timeout":1000,"metadata":{"a":"b"}`)
			a.create("still", "echo", "")
			a.create("gone", "shell", "")
			if r := a.ask("kept", 3000, "/"); r.status != http.StatusOK {
				t.Fatalf("ask: %d %s", r.status, r.body)
			}
			workspace := filepath.Join(a.cfg.Data, "sandboxes", "kept", "workspace")
			if err := os.WriteFile(filepath.Join(workspace, "note"), []byte("mine"), 0o644); err != nil {
				t.Fatal(err)
			}
			for _, path := range []string{"/sandboxes/still/pause", "/sandboxes/kept/timeout"} {
				if r := a.call("POST", path, `{"timeout":500}`, headers{"Berth-Route-Revision": "7"}); r.status != http.StatusNoContent {
					t.Fatalf("%s: %d %s", path, r.status, r.body)
				}
			}
			a.call("DELETE", "/sandboxes/gone", "")
			before := a.call("GET", "/sandboxes/kept", "").json(t)
			kill9(t, first)
			a.scheduler.set(func(f *fakeScheduler) { f.beats = nil })

			a.process(uid)
			a.scheduler.set(func(f *fakeScheduler) {
				if got := f.beats[0].GetSandboxIds(); !slices.Equal(got, []string{"kept", "still"}) {
					t.Errorf("the first heartbeat lists %v", got)
				}
			})
			if diff := cmp.Diff(before, a.call("GET", "/sandboxes/kept", "").json(t)); diff != "" {
				t.Errorf("detail (-before +after):\n%s", diff)
			}
			repeated := a.call("POST", "/v2/sandboxes", `{"templateID":"echo"}`, headers{"Berth-Sandbox-Id": "kept"})
			if repeated.status != http.StatusCreated || repeated.body != created.body {
				t.Errorf("repeated create: %d %s, want %s", repeated.status, repeated.body, created.body)
			}
			if r := a.call("POST", "/v2/sandboxes", `{"templateID":"echo"}`, headers{"Berth-Sandbox-Id": "gone"}); r.status != http.StatusConflict {
				t.Errorf("create of a deleted id: %d %s", r.status, r.body)
			}
			if r := a.ask("kept", 3000, "/"); r.status != http.StatusOK {
				t.Errorf("ask after the restart: %d %s", r.status, r.body)
			}
			if text, err := os.ReadFile(filepath.Join(workspace, "note")); err != nil || string(text) != "mine" {
				t.Errorf("the workspace has %q, %v", text, err)
			}
			stale := a.call("POST", "/sandboxes/kept/timeout", `{"timeout":500}`, headers{"Berth-Route-Revision": "6"})
			if stale.status != http.StatusMisdirectedRequest || stale.header.Get("Berth-Node") != "stale; revision=7" {
				t.Errorf("a stale call after the restart: %d %v", stale.status, stale.header)
			}
			if got := a.call("GET", "/sandboxes/still", "").json(t)["state"]; got != "paused" {
				t.Errorf("the paused one came back %v", got)
			}
			if r := a.call("POST", "/sandboxes/still/connect", `{}`); r.status != http.StatusCreated {
				t.Errorf("connect to the paused one: %d %s", r.status, r.body)
			}
			if r := a.ask("still", 3000, "/"); r.status != http.StatusOK {
				t.Errorf("the resumed one answers %d %s", r.status, r.body)
			}
		})
	}
}

// openFolder is a folder any user may enter, which t.TempDir's are not.
func openFolder(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth-agent-") //nolint:usetesting // the parent of t.TempDir only root may enter
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestACreateSurvivesAKillAtAnyPoint kills an agent while it creates, again and again, and asks the next one for the same id.
func TestACreateSurvivesAKillAtAnyPoint(t *testing.T) {
	t.Parallel()
	a := newAgent(t, func(c *nodeagent.Config) { c.Data = openFolder(t) + "/data" })
	current := a.process(0)
	for i := range 6 {
		id := fmt.Sprintf("try-%d", i)
		h := headers{"Berth-Sandbox-Id": id}
		body := `{"templateID":"echo","timeout":1000}`
		answered := make(chan answer, 1)
		go func() {
			r, _ := a.try("POST", "/sandboxes", body, h)
			answered <- r
		}()
		// From before the first write to after the answer: a create takes some 50 ms here.
		timer := time.NewTimer(time.Duration(i*12) * time.Millisecond)
		select {
		case <-timer.C:
		case r := <-answered:
			answered <- r
		}
		kill9(t, current)
		first := waittest.Receive(t, "the answer of the killed agent", answered)
		current = a.process(0)
		second := a.call("POST", "/sandboxes", body, h)
		if second.status != http.StatusCreated {
			t.Fatalf("%s after the kill: %d %s", id, second.status, second.body)
		}
		if first.status == http.StatusCreated && first.body != second.body {
			t.Errorf("%s was answered\n%s, then\n%s", id, first.body, second.body)
		}
		if r := a.ask(id, 3000, "/"); r.status != http.StatusOK {
			t.Errorf("%s answers %d %s", id, r.status, r.body)
		}
		if third := a.call("POST", "/sandboxes", body, h); third.body != second.body {
			t.Errorf("%s was answered\n%s, then\n%s", id, second.body, third.body)
		}
	}
}

func TestACleanStopPausesUnregistersAndComesBack(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	stop := a.run()
	a.create("stays", "echo", "")
	a.ask("stays", 3000, "/")
	inits := initsOf(t, a)
	if len(inits) != 1 {
		t.Fatalf("%d inits run, want 1", len(inits))
	}
	var frozen bool
	a.scheduler.set(func(f *fakeScheduler) { f.onUnreg = func() { frozen = isFrozen(inits[0]) } })
	stop()
	a.scheduler.set(func(f *fakeScheduler) {
		if len(f.unreg) != 1 || f.unreg[0].GetNodeId() != "node-a" || f.unreg[0].GetServiceInstanceId() != f.beats[0].GetServiceInstanceId() {
			t.Errorf("unregistered with %v", f.unreg)
		}
		f.onUnreg = nil
		f.beats = nil
	})
	if !frozen {
		t.Error("at unregister the sandbox still ran, want it frozen")
	}
	if err := syscall.Kill(inits[0], 0); err != syscall.ESRCH {
		t.Errorf("a sandbox outlived its agent: %v", err)
	}
	a.run()
	a.scheduler.set(func(f *fakeScheduler) {
		if got := f.beats[0].GetSandboxIds(); !slices.Equal(got, []string{"stays"}) {
			t.Errorf("the first heartbeat lists %v", got)
		}
	})
	if r := a.ask("stays", 3000, "/"); r.status != http.StatusOK {
		t.Errorf("after the restart it answers %d %s", r.status, r.body)
	}
}

// initsOf returns the inits that run the copy of the binary in the agent's data folder.
func initsOf(t testing.TB, a *agent) []int {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.Stat(filepath.Join(a.cfg.Data, "isolation", "berth"))
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(text), "/.berth/berth\x00berth-sandbox-init") {
			continue
		}
		if strings.HasPrefix(string(text), "/.berth/berth") { // not bubblewrap itself, which names it in its arguments
			exe, err := os.Stat(filepath.Join(filepath.Dir(path), "exe"))
			if err != nil || !os.SameFile(exe, want) {
				continue
			}
			var pid int
			if _, err := fmt.Sscanf(path, "/proc/%d/", &pid); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// isFrozen reports whether a process stands still: stopped, or in a frozen cgroup.
func isFrozen(pid int) bool {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if strings.Contains(string(status), "State:\tT") {
		return true
	}
	groups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	for line := range strings.Lines(string(groups)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/freezer"} {
			events, _ := os.ReadFile(filepath.Join(root, parts[2], "cgroup.events"))
			state, _ := os.ReadFile(filepath.Join(root, parts[2], "freezer.state"))
			if strings.Contains(string(events), "frozen 1") || strings.Contains(string(state), "FROZEN") {
				return true
			}
		}
	}
	return false
}
