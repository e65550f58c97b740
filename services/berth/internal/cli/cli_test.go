package cli_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/services/berth/internal/cli"
)

// run calls the command line as a process would, without its environment's BERTH_ variables mattering:
// every test that needs a gateway or a key says so by flag.
func run(args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = cli.Main(args, &out, &errs)
	return code, out.String(), errs.String()
}

// gateway answers each "METHOD path" with a status and a body, and remembers what it was asked.
type gateway struct {
	answers map[string]string // "201 {…}"

	mu     sync.Mutex
	asked  []string
	header http.Header
}

func (g *gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	body, _ := io.ReadAll(r.Body)
	g.asked = append(g.asked, strings.TrimSpace(r.Method+" "+r.RequestURI+" "+string(body)))
	g.header = r.Header.Clone()
	answer, ok := g.answers[r.Method+" "+r.RequestURI]
	if !ok {
		answer = `404 {"code":404,"message":"route not found: ` + r.Method + " " + r.URL.Path + `","error_code":"unknown_route"}`
	}
	var status int
	status, body = parse(answer)
	if token, rest, ok := bytes.Cut(body, []byte(" next ")); ok {
		w.Header().Set("X-Next-Token", string(rest))
		body = token
	}
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

func parse(answer string) (status int, body []byte) {
	code, rest, _ := strings.Cut(answer, " ")
	_, _ = fmt.Sscan(code, &status)
	return status, []byte(rest)
}

func serve(t *testing.T, answers map[string]string) (*gateway, []string) {
	t.Helper()
	g := &gateway{answers: answers}
	server := httptest.NewServer(g)
	t.Cleanup(server.Close)
	return g, []string{"--gateway-url", server.URL, "--api-key", "e2b_key"}
}

const id = "019a7c2e-3b5d-7f10-8a44-0c2d9e6f1b23"

func TestWhatCannotBeUnderstoodIsExitCodeTwoAndSaysWhereToLook(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		args []string
		want string
	}{
		"an unknown command":            {[]string{"sandbx"}, `berth: unknown command "sandbx" for "berth"; did you mean sandbox?`},
		"an unknown command in a group": {[]string{"sandbox", "creat"}, `berth: unknown command "creat" for "berth sandbox"; did you mean create?`},
		"an unknown flag":               {[]string{"sandbox", "list", "--al"}, `berth: unknown flag: --al; run "berth sandbox list --help"`},
		"a missing argument":            {[]string{"sandbox", "get"}, "berth: SANDBOX is missing"},
		"an argument too many":          {[]string{"node", "list", "x"}, `berth: unexpected argument "x"`},
		"an unknown format":             {[]string{"version", "-o", "yaml"}, "table or json is wanted"},
		"a port out of range":           {[]string{"sandbox", "url", id, "65536"}, `berth: PORT "65536": a number from 1 to 65535 is wanted`},
		"metadata without a value":      {[]string{"sandbox", "create", "echo", "--metadata", "x"}, `berth: --metadata "x": name=value is wanted`},
		"a life of part of a second":    {[]string{"sandbox", "create", "echo", "--timeout", "1500ms"}, "berth: --timeout 1.5s: whole seconds from 1s are wanted"},
		"a placement by nothing":        {[]string{"placement", "explain"}, "berth: name a SANDBOX, or --placement"},
		"down without yes":              {[]string{"migrate", "down"}, "berth: this drops tables with all their rows"},
		"data of an ephemeral stack":    {[]string{"dev", "--ephemeral", "--data", "x"}, "berth: --ephemeral and --data exclude each other"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, stdout, stderr := run(tt.args...)
			if code != 2 || !strings.HasPrefix(stderr, tt.want) && !strings.Contains(stderr, tt.want) || stdout != "" {
				t.Errorf("berth %q = %d, stdout %q, stderr %q; want 2, none, %q", tt.args, code, stdout, stderr, tt.want)
			}
			if !strings.Contains(stderr, "--help") {
				t.Errorf("stderr %q does not say where to look", stderr)
			}
		})
	}
}

func TestWhatGoesWrongSaysWhatToDo(t *testing.T) {
	t.Parallel()
	_, known := serve(t, map[string]string{
		"GET /sandboxes/gone":     `404 {"code":404,"message":"sandbox assignment not found","error_code":"unknown_sandbox","requestId":"r1"}`,
		"GET /sandboxes/locked":   `401 {"code":401,"message":"unauthorized","error_code":"unauthenticated"}`,
		"GET /sandboxes/scoped":   `403 {"code":403,"message":"scope sandboxes:read required","error_code":"denied"}`,
		"GET /sandboxes/other":    `500 <html>not ours</html>`,
		"GET /sandboxes/confused": `200 <html>`,
		"GET /nodes":              `200 []`,
	})
	with := func(args ...string) []string { return append(args, known...) }
	tests := map[string]struct {
		args []string
		want string
	}{
		"an unknown sandbox": {
			with("sandbox", "get", "gone"),
			"berth: sandbox gone: the gateway answered 404: sandbox assignment not found (unknown_sandbox), request r1\n",
		},
		"a wrong key": {
			with("sandbox", "get", "locked"),
			"berth: sandbox locked: the gateway refuses the API key: unauthorized (unauthenticated); set BERTH_API_KEY (or --api-key) to a key of this cluster\n",
		},
		"a key without the scope": {
			with("sandbox", "get", "scoped"),
			"berth: sandbox scoped: the API key may not do this: scope sandboxes:read required (denied); use a key that has the scope\n",
		},
		"somebody else's server": {
			with("sandbox", "get", "other"),
			"berth: sandbox other: the gateway answered 500: not an answer of a Berth gateway; check BERTH_GATEWAY_URL (--gateway-url)\n",
		},
		"an unknown node": {
			with("node", "get", "n1"),
			"berth: node n1: observed node not found; \"berth node list\" shows those there are\n",
		},
		"an id that cannot be one": {
			with("sandbox", "get", "Not_One"),
			"an id is 1 to 57 of a-z, 0-9 and inner hyphens\n",
		},
		"no gateway": {
			[]string{"sandbox", "get", "x", "--gateway-url", refusing(t), "--api-key", "k"},
			"cannot be reached: connect: connection refused; start one (berth dev), or set BERTH_GATEWAY_URL (--gateway-url)\n",
		},
		"no scheduler": {
			[]string{"placement", "explain", "x", "--scheduler-url", refusing(t)},
			"connection refused; start one (berth dev), or set BERTH_SCHEDULER_URL (--scheduler-url)\n",
		},
		"no database": {
			[]string{"migrate", "status", "--database-url", "postgres://127.0.0.1:1/x"},
			"nothing listens there; start PostgreSQL, or correct host and port in the database URL",
		},
		"no URL": {
			[]string{"sandbox", "list", "--gateway-url", "127.0.0.1:8080", "--api-key", "k"},
			`berth: BERTH_GATEWAY_URL (--gateway-url) "127.0.0.1:8080": a URL like http://127.0.0.1:8080 is wanted` + "\n",
		},
		"no processes": {
			[]string{"dev", "--ephemeral", "--nodes", "0", "--gateways", "99"},
			"berth: --gateways 99: 1 to 16 are wanted\nberth: --nodes 0: 1 to 64 are wanted\n",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, _, stderr := run(tt.args...)
			if code != 1 || !strings.HasPrefix(stderr, "berth: ") || !strings.Contains(stderr, tt.want) {
				t.Errorf("berth %q = %d, stderr %q; want 1 and %q", tt.args, code, stderr, tt.want)
			}
		})
	}
}

func TestAnAnswerThatIsNoJSONIsAnErrorInBothFormats(t *testing.T) {
	t.Parallel()
	_, flags := serve(t, map[string]string{"GET /sandboxes/x": "200 <html>"})
	for _, format := range []string{"table", "json"} {
		code, stdout, stderr := run(append([]string{"sandbox", "get", "x", "-o", format}, flags...)...)
		if code != 1 || stdout != "" {
			t.Errorf("-o %s = %d, stdout %q, stderr %q; want 1 and nothing", format, code, stdout, stderr)
		}
	}
}

func TestWithoutAKeyTheVariableIsNamed(t *testing.T) {
	t.Setenv("BERTH_API_KEY", "")
	code, _, stderr := run("sandbox", "list")
	if code != 1 || !strings.HasPrefix(stderr, "berth: no API key: set BERTH_API_KEY") {
		t.Errorf("berth sandbox list = %d, stderr %q; want 1 and the variable", code, stderr)
	}
}

func TestVariablesStandInForFlags(t *testing.T) {
	g, flags := serve(t, map[string]string{"GET /nodes": "200 []"})
	t.Setenv("BERTH_GATEWAY_URL", flags[1])
	t.Setenv("BERTH_API_KEY", "e2b_from_env")
	if code, _, stderr := run("node", "list"); code != 0 {
		t.Fatalf("berth node list = %d, %s", code, stderr)
	}
	if key := g.header.Get("X-API-Key"); key != "e2b_from_env" {
		t.Errorf("key sent = %q, want the variable's", key)
	}
}

func TestCreateSendsWhatWasAskedAndPrintsTheID(t *testing.T) {
	t.Parallel()
	g, flags := serve(t, map[string]string{
		"POST /sandboxes": `201 {"sandboxID":"` + id + `","templateID":"echo","clientID":"n1","envdVersion":"0.6.4"}`,
	})
	code, stdout, stderr := run(append([]string{"sandbox", "create", "echo", "--timeout", "1m", "--metadata", "a=b=c", "--env", "X="}, flags...)...)
	if code != 0 || !strings.Contains(stdout, "Sandbox    "+id) {
		t.Errorf("create = %d, stdout %q, stderr %q; want 0 and the id", code, stdout, stderr)
	}
	want := []string{`POST /sandboxes {"envVars":{"X":""},"metadata":{"a":"b=c"},"templateID":"echo","timeout":60}`}
	if diff := cmp.Diff(want, g.asked); diff != "" {
		t.Errorf("asked (-want +got):\n%s", diff)
	}

	_, stdout, _ = run(append([]string{"sandbox", "create", "echo", "-o", "json"}, flags...)...)
	var made map[string]any
	if err := json.Unmarshal([]byte(stdout), &made); err != nil || made["clientID"] != "n1" {
		t.Errorf("-o json = %q, %v; want the whole answer", stdout, err)
	}
}

func TestListFollowsPagesAndAligns(t *testing.T) {
	t.Parallel()
	item := func(id, template string) string {
		return `{"sandboxID":"` + id + `","templateID":"` + template + `","state":"running","startedAt":"2026-01-02T03:04:05Z","endAt":"2026-01-02T03:09:05Z","metadata":{"b":"2","a":"1"}}`
	}
	g, flags := serve(t, map[string]string{
		"GET /v2/sandboxes?limit=100":                "200 [" + item("one", "echo") + "] next t1",
		"GET /v2/sandboxes?limit=100&nextToken=t1":   "200 [" + item("two-is-longer", "files") + "]",
		"GET /v2/sandboxes?limit=1&state=paused":     "200 [" + item("one", "echo") + "] next t1",
		"GET /v2/sandboxes?limit=100&metadata=a%3D1": "200 []",
	})
	code, stdout, stderr := run(append([]string{"sandbox", "list"}, flags...)...)
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	if code != 0 || len(lines) != 3 {
		t.Fatalf("list = %d, stdout %q, stderr %q; want a head and two lines", code, stdout, stderr)
	}
	column := strings.Index(lines[0], "TEMPLATE")
	for i, want := range []string{"echo", "files"} {
		if !strings.HasPrefix(lines[i+1][column:], want) || !strings.HasSuffix(lines[i+1], "a=1,b=2") {
			t.Errorf("line %q: want %q at column %d and the metadata at the end", lines[i+1], want, column)
		}
	}
	if _, stdout, _ := run(append([]string{"sandbox", "list", "--limit", "1", "--state", "paused", "-o", "json"}, flags...)...); strings.Count(stdout, "sandboxID") != 1 {
		t.Errorf("--limit 1 = %s, want one", stdout)
	}
	if _, stdout, _ := run(append([]string{"sandbox", "list", "--metadata", "a=1", "-o", "json"}, flags...)...); strings.TrimSpace(stdout) != "[]" {
		t.Errorf("no match = %q, want []", stdout)
	}
	if n := len(g.asked); n != 4 {
		t.Errorf("gateway was asked %d times, want 4: %q", n, g.asked)
	}
}

func TestRmTriesAllAndFailsIfOneFails(t *testing.T) {
	t.Parallel()
	_, flags := serve(t, map[string]string{"DELETE /sandboxes/a": "204 ", "DELETE /sandboxes/c": "204 "})
	code, stdout, stderr := run(append([]string{"sandbox", "rm", "a", "b", "c"}, flags...)...)
	if code != 1 || stdout != "a\nc\n" || !strings.HasPrefix(stderr, "berth: delete b: the gateway answered 404") {
		t.Errorf("rm a b c = %d, stdout %q, stderr %q; want 1, a and c, b's refusal", code, stdout, stderr)
	}
}

func TestURLIsMadeOfPortSandboxDomainAndTheGatewaysPort(t *testing.T) {
	t.Parallel()
	_, flags := serve(t, map[string]string{
		"GET /sandboxes/one": `200 {"sandboxID":"one"}`,
		"GET /sandboxes/two": `200 {"sandboxID":"two","domain":"box.test"}`,
	})
	port := flags[1][strings.LastIndexByte(flags[1], ':'):]
	for want, args := range map[string][]string{
		"http://3000-one.berth.localhost" + port + "/\n": {"one"},
		"http://8000-two.box.test" + port + "/\n":        {"two", "8000"},
		"http://3000-two.other.test" + port + "/\n":      {"two", "--domain", "other.test"},
	} {
		code, stdout, stderr := run(append(append([]string{"sandbox", "url"}, args...), flags...)...)
		if code != 0 || stdout != want {
			t.Errorf("url %q = %d, %q, %q; want %q", args, code, stdout, stderr, want)
		}
	}
}

func TestNodesAreShown(t *testing.T) {
	t.Parallel()
	_, flags := serve(t, map[string]string{"GET /nodes": `200 [{"id":"n1","status":"ready","version":"v1","sandboxCount":2,"sandboxStartingCount":1,"sandboxPausedCount":4,"clusterID":"c","metrics":{"allocatedCPU":3,"cpuCount":8,"memoryTotalBytes":1073741824,"allocatedMemoryBytes":536870912}}]`})
	code, stdout, _ := run(append([]string{"node", "list"}, flags...)...)
	if code != 0 || !strings.Contains(stdout, "n1     ready    3           4        3/8   512 MiB/1 GiB   v1") {
		t.Errorf("node list = %d\n%s", code, stdout)
	}
	code, stdout, _ = run(append([]string{"node", "get", "n1", "-o", "json"}, flags...)...)
	if code != 0 || !strings.Contains(stdout, `"clusterID": "c"`) {
		t.Errorf("node get -o json = %d\n%s", code, stdout)
	}
}

func TestTextOfOthersCannotBreakTheTerminal(t *testing.T) {
	t.Parallel()
	_, flags := serve(t, map[string]string{
		"GET /sandboxes/x": "404 " + `{"message":"\u001b[31mred\nline"}`,
	})
	_, _, stderr := run(append([]string{"sandbox", "get", "x"}, flags...)...)
	if strings.ContainsAny(strings.TrimSuffix(stderr, "\n"), "\x1b\n") {
		t.Errorf("stderr = %q, want one line without control characters", stderr)
	}
}

func TestEveryCommandHasHelpWithAnExample(t *testing.T) {
	t.Parallel()
	for _, path := range []string{
		"dev", "demo", "migrate up", "migrate down", "migrate status", "migrate new-epoch", "version",
		"sandbox create", "sandbox list", "sandbox get", "sandbox rm", "sandbox url", "node list", "node get",
		"node cordon", "node uncordon", "node drain", "node drains", "node orphans", "events", "placement explain", "quota get", "quota set", "quota list",
	} {
		code, stdout, stderr := run(append(strings.Fields(path), "--help")...)
		if code != 0 || !strings.Contains(stdout, "\nExamples:\n") || !strings.Contains(stdout, "berth "+path+" ") && !strings.Contains(stdout, "  berth "+path+"\n") || stderr != "" {
			t.Errorf("berth %s --help = %d, stderr %q, stdout:\n%s", path, code, stderr, stdout)
		}
	}
}

func TestVersionIsPrintedBothWays(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"version"}, {"--version"}} {
		if code, stdout, _ := run(args...); code != 0 || !strings.HasPrefix(stdout, "berth "+cli.Version) {
			t.Errorf("berth %q = %d, %q", args, code, stdout)
		}
	}
}

func TestCompletionScriptsAreMade(t *testing.T) {
	t.Parallel()
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if code, stdout, _ := run("completion", shell); code != 0 || !strings.Contains(stdout, "berth") {
			t.Errorf("berth completion %s = %d, %d bytes", shell, code, len(stdout))
		}
	}
}

// refusing returns the URL of an address at which nobody listens.
func refusing(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return "http://" + l.Addr().String()
}
