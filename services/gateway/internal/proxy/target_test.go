package proxy

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// request is a request as the server parses it, with a raw target.
func request(method, host, target string, header map[string][]string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.Method, r.Host, r.RequestURI, r.URL = method, host, target, &url.URL{Path: target}
	for name, values := range header {
		for _, value := range values {
			r.Header.Add(name, value)
		}
	}
	return r
}

func TestWhereARequestGoes(t *testing.T) {
	t.Parallel()
	domains, err := ParseDomains("test, sbx.test, sbx.test., B.SBX.test")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Domains{"b.sbx.test", "sbx.test", "test"}, domains); diff != "" {
		t.Fatalf("domains (-want +got):\n%s", diff)
	}
	id57 := strings.Repeat("a", 57)
	pair := map[string][]string{"e2b-sandbox-id": {"s1"}, "e2b-sandbox-port": {"3000"}}
	with := func(id, port string) map[string][]string {
		return map[string][]string{"e2b-sandbox-id": {id}, "e2b-sandbox-port": {port}}
	}
	preflight := map[string][]string{"Origin": {"https://c.example"}, "Access-Control-Request-Method": {"GET"}}
	const bad = "invalid sandbox data-plane host: "
	tests := map[string]struct {
		method, host, target string
		header               map[string][]string
		want                 string // kind, source, what it names; or an error
	}{
		// 1.1, each row with what a later one would say.
		"1 a host decides, whatever the path":            {"GET", "3000-s1.sbx.test", "/sandboxes/other?x", nil, "data host s1:3000 /proxy/sandboxes/other?x"},
		"1 a host beats the pair":                        {"GET", "3000-s1.sbx.test", "/", with("s2", "1"), "data host s1:3000 /proxy/"},
		"1 a host beats /health":                         {"GET", "3000-s1.sbx.test", "/health", nil, "data host s1:3000 /proxy/health"},
		"1 the longest domain wins":                      {"GET", "3000-s1.b.sbx.test", "/", nil, "data host s1:3000 /proxy/"},
		"2 /proxy needs the pair":                        {"GET", "gw", "/proxy/x", nil, "400 sandbox id header required"},
		"2 /proxy with the pair is kept":                 {"GET", "gw", "/proxy/x?y", pair, "data header s1:3000 /proxy/x?y"},
		"2 /proxy with half a pair":                      {"GET", "gw", "/proxy", map[string][]string{"e2b-sandbox-id": {"s1"}}, "400 target port header required"},
		"2 /proxyfoo is not /proxy":                      {"GET", "gw", "/proxyfoo", nil, "unknown"},
		"3 /health is ours":                              {"POST", "gw", "/health", nil, "health gateway"},
		"3 /health with the pair is the sandbox's":       {"GET", "gw", "/health", pair, "data header s1:3000 /proxy/health"},
		"3 /health with half a pair":                     {"GET", "gw", "/health", map[string][]string{"e2b-sandbox-port": {"1"}}, "400 sandbox id header required"},
		"3 blank headers are absent":                     {"GET", "gw", "/health", with(" ", ""), "health gateway"},
		"3 /metrics is not served":                       {"GET", "gw", "/metrics", nil, "metrics gateway"},
		"4 an id row beats the pair":                     {"DELETE", "gw", "/sandboxes/s2", pair, "sandbox path s2 /sandboxes/s2 sandboxes:write"},
		"4 an id row with a bad pair":                    {"GET", "gw", "/sandboxes/s2", with("s1", "x"), "sandbox path s2 /sandboxes/s2 sandboxes:read"},
		"4 an escaped id is decoded once":                {"POST", "gw", "/sandboxes/%732/pause?a=%2F", nil, "sandbox path s2 /sandboxes/%732/pause?a=%2F sandboxes:write"},
		"4 the second generation":                        {"POST", "gw", "/v2/sandboxes/s2/connect", nil, "sandbox path s2 /v2/sandboxes/s2/connect sandboxes:write"},
		"5 the pair reaches an application's own /nodes": {"GET", "gw", "/nodes", pair, "data header s1:3000 /proxy/nodes"},
		"5 and its /templates and /twirp":                {"POST", "gw", "/twirp/a/b", pair, "data header s1:3000 /proxy/twirp/a/b"},
		"5 and a create of its own":                      {"POST", "gw", "/sandboxes", pair, "data header s1:3000 /proxy/sandboxes"},
		"6 half a pair anywhere else":                    {"GET", "gw", "/nodes", map[string][]string{"e2b-sandbox-id": {"s1"}}, "400 target port header required"},
		"7 creates":                                      {"POST", "gw", "/v2/sandboxes", nil, "place schedule"},
		"7 lists":                                        {"GET", "gw", "/sandboxes?limit=1", nil, "fan gateway"},
		"7 nodes":                                        {"GET", "gw", "/nodes", nil, "nodes gateway"},
		"7 one node":                                     {"GET", "gw", "/nodes/n1.rack", nil, "node schedule n1.rack"},
		"7 templates, any method and depth":              {"DELETE", "gw", "/v3/templates/team%2Fsnap%3Av1", nil, "any schedule [team%2Fsnap%3Av1] templates:write"},
		"7 templates alone":                              {"GET", "gw", "/templates", nil, "any schedule [] templates:read"},
		"7 Twirp":                                        {"POST", "gw", "/twirp/scheduler.v1.Scheduler/GetNode", nil, "twirp gateway [scheduler.v1.Scheduler GetNode]"},
		"8 no such path":                                 {"GET", "gw", "/nope", nil, "unknown"},
		"8 a known path by another method":               {"PATCH", "gw", "/sandboxes", nil, "unknown POST, GET"},
		"8 an id path by another method":                 {"PUT", "gw", "/sandboxes/s1", nil, "unknown GET, DELETE"},
		"CONNECT is nobody's":                            {"CONNECT", "gw:443", "gw:443", nil, "405 method not allowed"},
		"TRACE is nobody's":                              {"TRACE", "3000-s1.sbx.test", "/", nil, "405 method not allowed"},
		"OPTIONS *":                                      {"OPTIONS", "gw", "*", nil, "options gateway"},
		"no other method has *":                          {"GET", "gw", "*", pair, "400 invalid request target"},
		"a scheme without authority":                     {"GET", "gw", "foo:bar?x://y/z", pair, "400 invalid request target"},
		"a preflight of an API path":                     {"OPTIONS", "gw", "/v2/sandboxes", preflight, "preflight gateway"},
		"a preflight of an application":                  {"OPTIONS", "3000-s1.sbx.test", "/v2/sandboxes", preflight, "data host s1:3000 /proxy/v2/sandboxes"},
		"OPTIONS that is no preflight":                   {"OPTIONS", "gw", "/v2/sandboxes", nil, "unknown POST, GET"},
		"a target that is none":                          {"GET", "gw", "/a#b", nil, "400 invalid request target"},

		// C-10: an encoded slash never selects another sandbox.
		"C-10 a/b":              {"POST", "gw", "/sandboxes/a%2Fb/pause", nil, "unknown"},
		"C-10 a/":               {"DELETE", "gw", "/sandboxes/a%2F", nil, "unknown"},
		"C-10 a/../b":           {"GET", "gw", "/sandboxes/a%2f..%2fb", nil, "unknown"},
		"C-10 ../../nodes":      {"GET", "gw", "/sandboxes/..%2f..%2fnodes", nil, "unknown"},
		"C-10 a and NUL":        {"GET", "gw", "/sandboxes/%61%00", nil, "unknown"},
		"C-10 nothing":          {"GET", "gw", "/sandboxes/", nil, "unknown"},
		"C-10 escaped literal":  {"GET", "gw", "/%73andboxes/a", nil, "unknown"},
		"C-10 empty segment":    {"POST", "gw", "/sandboxes//a/pause", nil, "unknown"},
		"C-10 trailing slash":   {"POST", "gw", "/sandboxes/a/pause/", nil, "unknown"},
		"C-10 dots in a family": {"GET", "gw", "/templates/../sandboxes/a", nil, "unknown"},
		"C-10 escaped dots":     {"GET", "gw", "/templates/x%2F..%2f..%5csandboxes", nil, "unknown"},

		// C-17: hosts that are no sandbox hosts route by pair.
		"C-17 an address":        {"GET", "10.0.0.5:3002", "/x", pair, "data header s1:3000 /proxy/x"},
		"C-17 IPv6":              {"GET", "[::1]:3002", "/x", pair, "data header s1:3000 /proxy/x"},
		"C-17 IPv6 with a zone":  {"GET", "[::1%25lo]:3002", "/x", pair, "data header s1:3000 /proxy/x"},
		"C-17 bare IPv6":         {"GET", "::1", "/x", pair, "data header s1:3000 /proxy/x"},
		"C-17 localhost":         {"GET", "LOCALHOST", "/x", pair, "data header s1:3000 /proxy/x"},
		"C-17 the bare domain":   {"GET", "sbx.test", "/x", pair, "data header s1:3000 /proxy/x"},
		"C-17 label, no hyphen":  {"GET", "sandbox.sbx.test", "/x", pair, "data header s1:3000 /proxy/x"},
		"C-23 a deeper name":     {"GET", "3000-s1.x.sbx.test", "/x", pair, "data header s1:3000 /proxy/x"},
		"C-23 a foreign domain":  {"GET", "3000-s1.other.example", "/x", pair, "data header s1:3000 /proxy/x"},
		"C-18 57 characters":     {"GET", "65535-" + id57 + ".sbx.test", "/", nil, "data host " + id57 + ":65535 /proxy/"},
		"C-18 capitals in hosts": {"GET", "3000-S1.SBX.TEST", "/", nil, "data host s1:3000 /proxy/"},
		"C-23 a trailing dot":    {"GET", "3000-s1.sbx.test.", "/", nil, "data host s1:3000 /proxy/"},
		"C-23 a port":            {"GET", "3000-s1.sbx.test:8080", "/", nil, "data host s1:3000 /proxy/"},
		"C-23 id with hyphens":   {"GET", "3000-a-b.sbx.test", "/", nil, "data host a-b:3000 /proxy/"},

		// 1.3: the errors in their order, each with what a later one would say.
		"label too long":              {"GET", "x-" + strings.Repeat("A_", 31) + ".sbx.test", "/", nil, "400 " + bad + "label too long"},
		"id empty":                    {"GET", "x-.sbx.test", "/", nil, "400 " + bad + "sandbox id is empty"},
		"id invalid":                  {"GET", "x-a_b.sbx.test", "/", nil, "400 " + bad + "sandbox id is invalid"},
		"C-23 3000--":                 {"GET", "3000--.sbx.test", "/", nil, "400 " + bad + "sandbox id is invalid"},
		"port not numeric":            {"GET", "a-s1.sbx.test", "/", nil, "400 " + bad + "port is not numeric"},
		"port empty":                  {"GET", "-s1.sbx.test", "/", nil, "400 " + bad + "port is not numeric"},
		"port signed":                 {"GET", "+3000-s1.sbx.test", "/", nil, "400 " + bad + "port is not numeric"},
		"port with a leading zero":    {"GET", "03000-s1.sbx.test", "/", nil, "400 " + bad + "port is not numeric"},
		"port 0":                      {"GET", "0-s1.sbx.test", "/", nil, "400 " + bad + "port out of range"},
		"port 70000":                  {"GET", "70000-s1.sbx.test", "/", nil, "400 " + bad + "port out of range"},
		"port of more than 64 bits":   {"GET", "99999999999999999999-s1.sbx.test", "/", nil, "400 " + bad + "port out of range"},
		"C-22 blanks are cut":         {"GET", "gw", "/x", with(" s1 ", " 65535 "), "data header s1:65535 /proxy/x"},
		"C-24 two ids":                {"GET", "gw", "/x", map[string][]string{"e2b-sandbox-id": {"s1", "s2"}, "e2b-sandbox-port": {"1"}}, "400 conflicting sandbox id headers"},
		"C-24 a list of ids":          {"GET", "gw", "/x", with("s1, s2", "1"), "400 sandbox id header invalid"},
		"C-24 two ports":              {"GET", "gw", "/x", map[string][]string{"e2b-sandbox-id": {"s1"}, "e2b-sandbox-port": {"1", "2"}}, "400 conflicting target port headers"},
		"C-24 the other vocabulary":   {"GET", "gw", "/x", map[string][]string{"e2b-sandbox-id": {"s1"}, "e2b-sandbox-port": {"1"}, "x-agentenv-sandbox-id": {"s2"}}, "400 conflicting sandbox id headers"},
		"equal ones are one":          {"GET", "gw", "/x", map[string][]string{"e2b-sandbox-id": {"s1", "s1"}, "e2b-sandbox-port": {"1"}, "x-agentenv-sandbox-id": {"s1"}, "x-agentenv-target-port": {"1"}}, "data header s1:1 /proxy/x"},
		"each may be of another name": {"GET", "gw", "/x", map[string][]string{"e2b-sandbox-id": {"s1"}, "x-agentenv-target-port": {"1"}}, "data header s1:1 /proxy/x"},
		"an id of another alphabet":   {"GET", "gw", "/x", with("Abc", "1"), "400 sandbox id header invalid"},
	}
	for _, port := range []string{"0", "65536", "70000", "-1", "+3000", "abc", "3000.5", "0x0bb8", "03000", "3000,3001", "3 000", "99999999999999999999"} {
		tests["C-22 port "+port] = struct {
			method, host, target string
			header               map[string][]string
			want                 string
		}{"GET", "gw", "/x", with("s1", port), "400 target port header invalid"}
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := describeTarget(ParseTarget(request(tt.method, tt.host, tt.target, tt.header), domains)); got != tt.want {
				t.Errorf("%s %s %s %v goes to %q, want %q", tt.method, tt.host, tt.target, tt.header, got, tt.want)
			}
		})
	}
}

func describeTarget(target Target, err error) string {
	if told, ok := errors.AsType[*Error](err); ok {
		return strconv.Itoa(told.Status) + " " + told.Message
	}
	names := map[Kind]string{
		KindUnknown: "unknown", KindData: "data", KindHealth: "health", KindMetrics: "metrics", KindOptions: "options",
		KindPreflight: "preflight", KindSandbox: "sandbox", KindPlace: "place", KindFan: "fan", KindNodes: "nodes",
		KindNode: "node", KindAny: "any", KindEvents: "events", KindTwirp: "twirp",
	}
	words := []string{names[target.Kind]}
	add := func(s string) { words = append(words, s) }
	if target.Kind != KindUnknown {
		add(string(target.Source))
	}
	switch target.Kind {
	case KindUnknown:
		if target.Allow != "" {
			add(target.Allow)
		}
	case KindData:
		add(string(target.Sandbox) + ":" + strconv.Itoa(int(target.Port)))
		add(target.Send())
	case KindSandbox:
		add(string(target.Sandbox))
		add(target.Send())
		add(target.Scope)
	case KindNode:
		add(string(target.Node))
	case KindAny:
		add("[" + strings.Join(target.Rest, " ") + "]")
		add(target.Scope)
	case KindTwirp:
		add("[" + strings.Join(target.Rest, " ") + "]")
	default:
	}
	return strings.Join(words, " ")
}

func TestParseDomainsNamesTheBadOne(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"a..b", "-a.test", "a_b.test", "a.test:80", "*.test", strings.Repeat("a", 64) + ".test", strings.Repeat("a.", 127) + "aa"} {
		if _, err := ParseDomains("ok.test," + bad); err == nil || !strings.Contains(err.Error(), bad) {
			t.Errorf("ParseDomains(%q) = %v", bad, err)
		}
	}
	if d, err := ParseDomains(" , "); err != nil || len(d) != 0 {
		t.Errorf("no domains: %v, %v", d, err)
	}
}
