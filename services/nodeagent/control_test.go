package nodeagent_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/services/nodeagent"
)

func TestAStaleRouteIsRefused(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("s", "echo", "")
	revision := func(n string) headers { return headers{"Berth-Route-Revision": n} }
	if r := a.ask("s", 3000, "/", revision("3")); r.status != http.StatusOK {
		t.Fatalf("revision 3: %d %s", r.status, r.body)
	}
	for _, call := range []struct{ method, path string }{{"GET", "/proxy/"}, {"GET", "/sandboxes/s"}, {"POST", "/sandboxes/s/pause"}, {"DELETE", "/sandboxes/s"}} {
		r := a.call(call.method, call.path, "", pair("s", 3000), revision("2"))
		if r.status != http.StatusMisdirectedRequest || r.header.Get("Berth-Node") != "stale; revision=3" || r.json(t)["code"] != 421.0 {
			t.Errorf("%s %s with revision 2: %d %q %s", call.method, call.path, r.status, r.header.Get("Berth-Node"), r.body)
		}
	}
	if r := a.call("POST", "/sandboxes/s/pause", "", revision("3")); r.status != http.StatusNoContent {
		t.Errorf("pause with revision 3: %d %s", r.status, r.body)
	}
	if r := a.call("GET", "/sandboxes/s", "", revision("x")); r.status != http.StatusBadRequest {
		t.Errorf("revision x: %d %s", r.status, r.body)
	}
}

func TestAFullNodeSaysSo(t *testing.T) {
	t.Parallel()
	a := newAgent(t, func(c *nodeagent.Config) { c.MaxSandboxes = 1 })
	a.run()
	a.create("one", "shell", "")
	full := a.call("POST", "/sandboxes", `{"templateID":"shell"}`, headers{"Berth-Sandbox-Id": "two"})
	if full.status != http.StatusServiceUnavailable || full.header.Get("Berth-Node") != "full" || full.json(t)["error_code"] != "sandbox_capacity_unavailable" {
		t.Errorf("create on a full node: %d %v %s", full.status, full.header, full.body)
	}
	a.call("DELETE", "/sandboxes/one", "")
	a.create("two", "shell", "")
}

func TestLifeCalls(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("s", "echo", `,"timeout":100`)
	endsIn := func() time.Duration {
		t.Helper()
		end, err := time.Parse(time.RFC3339, a.call("GET", "/sandboxes/s", "").json(t)["endAt"].(string))
		if err != nil {
			t.Fatal(err)
		}
		return time.Until(end).Round(10 * time.Second)
	}
	steps := []struct {
		what, method, path, body string
		status                   int
		ends                     time.Duration // 0: not asked
	}{
		{"a short connect does not shorten", "POST", "/sandboxes/s/connect", `{"timeout":30}`, 200, 100 * time.Second},
		{"a long one lengthens", "POST", "/v2/sandboxes/s/connect", `{"timeout":200}`, 200, 200 * time.Second},
		{"connect without a body takes the default", "POST", "/v2/sandboxes/s/connect", ``, 200, 300 * time.Second},
		{"timeout shortens", "POST", "/sandboxes/s/timeout", `{"timeout":60}`, 204, 60 * time.Second},
		{"a refresh does not shorten", "POST", "/sandboxes/s/refreshes", `{"duration":10}`, 204, 60 * time.Second},
		{"a refresh lengthens", "POST", "/sandboxes/s/refreshes", `{"duration":90}`, 204, 90 * time.Second},
		{"resume of a running one", "POST", "/sandboxes/s/resume", `{"timeout":90}`, 409, 90 * time.Second},
		{"pause", "POST", "/sandboxes/s/pause", `{"memory":true}`, 204, 0},
		{"pause again", "POST", "/sandboxes/s/pause", `{}`, 409, 0},
		{"timeout of a paused one", "POST", "/sandboxes/s/timeout", `{"timeout":60}`, 409, 0},
		{"resume", "POST", "/sandboxes/s/resume", `{"timeout":120}`, 201, 120 * time.Second},
		{"pause once more", "POST", "/sandboxes/s/pause", ``, 204, 0},
		{"connect resumes", "POST", "/sandboxes/s/connect", `{"timeout":150}`, 201, 150 * time.Second},
		{"timeout 0 ends it", "POST", "/sandboxes/s/timeout", `{"timeout":0}`, 204, 0},
		{"it is gone", "GET", "/sandboxes/s", ``, 404, 0},
	}
	for _, step := range steps {
		r := a.call(step.method, step.path, step.body)
		if r.status != step.status {
			t.Errorf("%s: %d %s, want %d", step.what, r.status, r.body, step.status)
		}
		if r.status >= 400 && r.json(t)["code"] != float64(r.status) {
			t.Errorf("%s: code in %s", step.what, r.body)
		}
		if step.ends != 0 {
			if got := endsIn(); got != step.ends {
				t.Errorf("%s: it ends in %v, want %v", step.what, got, step.ends)
			}
		}
	}
}

func TestTimeEndsASandbox(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("ends", "shell", `,"timeout":1`)
	a.create("pauses", "echo", `,"timeout":1,"autoPause":true`)
	a.create("wakes", "echo", `,"timeout":1,"autoPause":true,"autoResume":{"enabled":true}`)
	a.scheduler.wait(t, "two paused sandboxes and nothing else", func(f *fakeScheduler) bool {
		b := f.beats[len(f.beats)-1]
		return len(b.GetSandboxIds()) == 2 && b.GetSnapshot().GetPausedSandboxCount() == 2 && b.GetSnapshot().GetCreateSuccesses() == 3
	})
	gone := a.call("GET", "/proxy/x", "", pair("pauses", 3000))
	if gone.status != http.StatusGone || gone.json(t)["message"] != "sandbox pauses is paused" {
		t.Errorf("traffic to a paused sandbox: %d %s", gone.status, gone.body)
	}
	if r := a.ask("wakes", 3000, "/"); r.status != http.StatusOK {
		t.Errorf("traffic to one that wakes: %d %s", r.status, r.body)
	}
}

func TestAnOrphanIsEnded(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("mine", "shell", "")
	a.create("orphan", "shell", "")
	a.scheduler.set(func(f *fakeScheduler) { f.orphans = []string{"orphan", "never-here", "NOT AN ID"} })
	a.scheduler.waitRoster(t, "mine")
}

func TestEverythingDyingInsideDeletesTheSandbox(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("dies", "shell", "")
	a.scheduler.waitRoster(t, "dies") // or an empty roster of before would do below
	for _, pid := range initsOf(t, a) {
		killProcess(t, pid)
	}
	a.scheduler.waitRoster(t)
	if r := a.call("GET", "/sandboxes/dies", ""); r.status != http.StatusNotFound {
		t.Errorf("get: %d %s", r.status, r.body)
	}
}

func TestLists(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("s1", "shell", `,"metadata":{"a b":"c+d=e&f","k2":"v2"}`)
	a.create("s2", "base", `,"metadata":{"k2":"v2"}`)
	a.create("s3", "shell", "")
	a.call("POST", "/sandboxes/s3/pause", "")
	ids := func(r answer) []string {
		t.Helper()
		var items []struct{ SandboxID string }
		if err := json.Unmarshal([]byte(r.body), &items); err != nil {
			t.Fatalf("%d %s: %v", r.status, r.body, err)
		}
		got := []string{}
		for _, item := range items {
			got = append(got, item.SandboxID)
		}
		return got
	}
	cases := map[string]struct {
		query string
		want  []string
	}{
		"all, latest first":                  {"/v2/sandboxes", []string{"s3", "s2", "s1"}},
		"the old path too":                   {"/sandboxes", []string{"s3", "s2", "s1"}},
		"oldest first":                       {"/v2/sandboxes?order=asc", []string{"s1", "s2", "s3"}},
		"running ones":                       {"/v2/sandboxes?state=running", []string{"s2", "s1"}},
		"states with an encoded comma":       {"/v2/sandboxes?state=running%2Cpaused&order=asc", []string{"s1", "s2", "s3"}},
		"paused ones":                        {"/v2/sandboxes?state=paused", []string{"s3"}},
		"metadata as the SDK encodes it":     {"/v2/sandboxes?metadata=a%252520b%3Dc%25252Bd%25253De%252526f%26k2%3Dv2", []string{"s1"}},
		"metadata as the CLI encodes it":     {"/v2/sandboxes?metadata=k2%3Dv2&order=asc", []string{"s1", "s2"}},
		"metadata nobody has":                {"/v2/sandboxes?metadata=k2%3Dv3", []string{}},
		"a template by its alias":            {"/v2/sandboxes?template=base", []string{"s2"}},
		"a template by its name":             {"/v2/sandboxes?template=echo", []string{"s2"}},
		"started after a time far away":      {"/v2/sandboxes?startedAfter=2101-09-09T01%3A46%3A40.000Z", []string{}},
		"an empty list is an array, no null": {"/v2/sandboxes?template=none", []string{}},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			r := a.call("GET", tt.query, "")
			if diff := cmp.Diff(tt.want, ids(r)); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tt.query, diff)
			}
			if next, sent := r.header["X-Next-Token"]; sent {
				t.Errorf("a next token %q without a next page", next)
			}
		})
	}
	t.Run("pages", func(t *testing.T) {
		var all []string
		path := "/v2/sandboxes?limit=2"
		for {
			r := a.call("GET", path, "")
			all = append(all, ids(r)...)
			next := r.header.Get("X-Next-Token")
			if next == "" {
				break
			}
			path = "/v2/sandboxes?limit=2&nextToken=" + next
		}
		if diff := cmp.Diff([]string{"s3", "s2", "s1"}, all); diff != "" {
			t.Errorf("pages (-want +got):\n%s", diff)
		}
	})
	t.Run("required fields", func(t *testing.T) {
		var items []map[string]any
		if err := json.Unmarshal([]byte(a.call("GET", "/v2/sandboxes", "").body), &items); err != nil {
			t.Fatal(err)
		}
		for _, field := range []string{"templateID", "sandboxID", "clientID", "startedAt", "endAt", "cpuCount", "memoryMB", "diskSizeMB", "state", "envdVersion"} {
			if _, sent := items[0][field]; !sent {
				t.Errorf("%s is missing in %v", field, items[0])
			}
		}
	})
}

func TestBadInputIsRefusedWithItsReason(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("s", "shell", "")
	big := strings.Repeat("x", 1<<20)
	cases := map[string]struct {
		method, path, body string
		h                  headers
		status             int
		message            string
	}{
		"no key":                      {"GET", "/sandboxes", "", headers{"X-API-Key": ""}, 401, "unauthorized"},
		"a wrong key":                 {"GET", "/sandboxes", "", headers{"X-API-Key": "x"}, 401, "unauthorized"},
		"an unknown path":             {"GET", "/nothing", "", nil, 404, "route not found: GET /nothing"},
		"a trailing slash":            {"GET", "/sandboxes/s/", "", nil, 404, "route not found: GET /sandboxes/s/"},
		"a known path, other method":  {"PATCH", "/sandboxes/s", "", nil, 405, "method not allowed"},
		"an unknown sandbox":          {"GET", "/sandboxes/nope", "", nil, 404, "sandbox nope not found"},
		"an id that is none":          {"DELETE", "/sandboxes/a%2Fb", "", nil, 404, "sandbox a%2Fb not found"},
		"a body that is no JSON":      {"POST", "/sandboxes", "{", nil, 400, "request body is not valid JSON"},
		"a body that is an array":     {"POST", "/sandboxes", "[]", nil, 400, "request body must be one JSON object"},
		"two bodies":                  {"POST", "/sandboxes", "{}{}", nil, 400, "request body must be one JSON object"},
		"no body":                     {"POST", "/sandboxes", "", nil, 400, "request body must be one JSON object"},
		"no template":                 {"POST", "/sandboxes", "{}", nil, 400, "templateID is required"},
		"an unknown template":         {"POST", "/sandboxes", `{"templateID":"nope"}`, nil, 404, "template not found: this node has base, echo, files, shell"},
		"a body too large":            {"POST", "/sandboxes", `{"templateID":"` + big + `"}`, nil, 413, "request body too large"},
		"a timeout of nothing":        {"POST", "/sandboxes", `{"templateID":"shell","timeout":0}`, nil, 400, "timeout must be a whole number of seconds from 1 to 2592000"},
		"half a second":               {"POST", "/sandboxes", `{"templateID":"shell","timeout":0.5}`, nil, 400, "timeout must be a whole number of seconds from 1 to 2592000"},
		"a timeout in words":          {"POST", "/sandboxes/s/timeout", `{"timeout":"soon"}`, nil, 400, "timeout must be a whole number of seconds from 0 to 2592000"},
		"a timeout that is true":      {"POST", "/sandboxes", `{"templateID":"shell","timeout":true}`, nil, 400, "timeout must be a whole number of seconds from 1 to 2592000"},
		"no timeout":                  {"POST", "/sandboxes/s/timeout", `{}`, nil, 400, "timeout is required"},
		"a refresh too long":          {"POST", "/sandboxes/s/refreshes", `{"duration":3601}`, nil, 400, "duration must be a whole number of seconds from 1 to 3600"},
		"metadata that is no text":    {"POST", "/sandboxes", `{"templateID":"shell","metadata":{"a":1}}`, nil, 400, "metadata must not be a number"},
		"metadata with a zero":        {"POST", "/sandboxes", `{"templateID":"shell","metadata":{"a":"\u0000"}}`, nil, 400, `metadata must not contain \u0000`},
		"metadata too long":           {"POST", "/sandboxes", `{"templateID":"shell","metadata":{"a":"` + big[:70_000] + `"}}`, nil, 400, "metadata must not be longer than 65536 bytes in all"},
		"a variable that is none":     {"POST", "/sandboxes", `{"templateID":"shell","envVars":{"A=B":"x"}}`, nil, 400, `envVars: "A=B" is not a variable a process can get: want a name of letters, digits and _, a value without zero bytes, and less than 128 KiB in both`},
		"a variable too long":         {"POST", "/sandboxes", `{"templateID":"shell","envVars":{"A":"` + big[:128<<10-2] + `"}}`, nil, 400, `envVars: "A" is not a variable a process can get: want a name of letters, digits and _, a value without zero bytes, and less than 128 KiB in both`},
		"a sandbox id that is none":   {"POST", "/sandboxes", `{"templateID":"shell"}`, headers{"Berth-Sandbox-Id": "Big_Id"}, 400, "Berth-Sandbox-Id is not a sandbox id"},
		"an id one byte too long":     {"POST", "/sandboxes", `{"templateID":"shell"}`, headers{"Berth-Sandbox-Id": strings.Repeat("a", 58)}, 400, "Berth-Sandbox-Id is not a sandbox id"},
		"an unknown state":            {"GET", "/v2/sandboxes?state=dead", "", nil, 400, `invalid state: "dead", want running or paused`},
		"a limit beyond the most":     {"GET", "/v2/sandboxes?limit=101", "", nil, 400, "invalid limit: want 1 to 100"},
		"a foreign token":             {"GET", "/v2/sandboxes?nextToken=%21", "", nil, 400, "invalid next token: not one of ours"},
		"data plane without an id":    {"GET", "/proxy/", "", headers{"x-agentenv-target-port": "1"}, 400, "sandbox id header required"},
		"data plane without a port":   {"GET", "/proxy/", "", headers{"x-agentenv-sandbox-id": "s"}, 400, "target port header required"},
		"a port with a leading zero":  {"GET", "/proxy/", "", headers{"x-agentenv-sandbox-id": "s", "x-agentenv-target-port": "080"}, 400, "target port header invalid"},
		"a port beyond the last":      {"GET", "/proxy/", "", headers{"x-agentenv-sandbox-id": "s", "x-agentenv-target-port": "65536"}, 400, "target port header invalid"},
		"a port nobody listens on":    {"GET", "/proxy/", "", pair("s", 3000), 502, "nobody listens on port 3000 of sandbox s"},
		"a sandbox that is not there": {"GET", "/proxy/", "", pair("nope", 3000), 502, "sandbox nope not found"},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			r := a.call(tt.method, tt.path, tt.body, tt.h)
			got := r.json(t)
			if r.status != tt.status || got["code"] != float64(tt.status) || got["message"] != tt.message {
				t.Errorf("%d %s, want %d %q", r.status, r.body, tt.status, tt.message)
			}
		})
	}
	a.create("longest", "shell", `,"envVars":{"A":"`+big[:128<<10-3]+`"}`)
	a.scheduler.waitRoster(t, "longest", "s")
}

func TestTheDataPlaneNeedsNoKeyAndKeepsTheApplications(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("s", "echo", "")
	a.ask("s", 3000, "/")
	for sent, want := range map[string]string{nodeKey: "", "the applications own": "the applications own"} {
		var dump struct{ Headers http.Header }
		if err := json.Unmarshal([]byte(a.ask("s", 3000, "/", headers{"X-API-Key": sent}).body), &dump); err != nil {
			t.Fatal(err)
		}
		if got := dump.Headers.Get("X-Api-Key"); got != want {
			t.Errorf("X-API-Key %q arrived as %q, want %q", sent, got, want)
		}
	}
}

func TestHealthNeedsNoKey(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	if r := a.call("GET", "/health", "", headers{"X-API-Key": ""}); r.status != http.StatusNoContent || r.body != "" {
		t.Errorf("/health: %d %q", r.status, r.body)
	}
}

func TestTwoKeysWorkWhileTheKeyIsChanged(t *testing.T) {
	t.Parallel()
	a := newAgent(t, func(c *nodeagent.Config) { c.NodeKeys = []string{"new-key", nodeKey} })
	a.run()
	for _, key := range []string{"new-key", nodeKey} {
		if r := a.call("GET", "/sandboxes", "", headers{"X-API-Key": key}); r.status != http.StatusOK {
			t.Errorf("key %s: %d", key, r.status)
		}
	}
}

func TestAPrivateSandboxAsksForItsToken(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	token, _ := a.create("p", "echo", `,"network":{"allowPublicTraffic":false}`).json(t)["trafficAccessToken"].(string)
	if len(token) < 20 {
		t.Fatalf("token is %q", token)
	}
	if r := a.call("GET", "/proxy/", "", pair("p", 3000)); r.status != http.StatusUnauthorized {
		t.Errorf("without the token: %d %s", r.status, r.body)
	}
	if r := a.ask("p", 3000, "/", headers{"e2b-traffic-access-token": token}); r.status != http.StatusOK {
		t.Errorf("with the token: %d %s", r.status, r.body)
	}
}
