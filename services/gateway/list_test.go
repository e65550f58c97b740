package gateway_test

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/services/gateway/internal/gatewaytest"
	"berth/services/internal/sandbox"
)

// place puts n sandboxes on nodes, bound to the default tenant, started a second apart, the last first
// in a list.
func (s *stand) place(n int) (newestFirst []string) {
	s.t.Helper()
	started := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for i := range n {
		id := fmt.Sprintf("s%03d", i)
		home := s.nodes[i%len(s.nodes)]
		home.Add(sandbox.ID(id), started.Add(time.Duration(i/2)*time.Second)) // two at a time
		if _, err := s.bind(s.t.Context(), id, string(home.ID), "default"); err != nil {
			s.t.Fatal(err)
		}
	}
	for pair := (n - 1) / 2; pair >= 0; pair-- {
		for i := pair * 2; i < min(n, pair*2+2); i++ {
			newestFirst = append(newestFirst, fmt.Sprintf("s%03d", i))
		}
	}
	return newestFirst
}

func TestAListIsOneOrderOverAllNodes(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"), berthNode(t, "n2"))
	r := s.start(s.config())
	want := s.place(25)
	if diff := cmp.Diff(want, r.list("/sandboxes", nil)); diff != "" {
		t.Errorf("GET /sandboxes (-want +got):\n%s", diff)
	}
	var paged []string
	token, pages := "", 0
	for {
		path := "/v2/sandboxes?limit=7&state=running&metadata=a%2520b%3Dc&nextToken=" + url.QueryEscape(token)
		a := r.do(ask{method: "GET", path: path})
		if a.Status != 200 {
			t.Fatalf("GET %s = %d %s", path, a.Status, a.Body)
		}
		paged = append(paged, ids(t, a)...)
		pages++
		if token = a.Header.Get("X-Next-Token"); token == "" {
			break
		}
	}
	if diff := cmp.Diff(want, paged); diff != "" || pages != 4 {
		t.Errorf("%d pages, want 4 (-want +got):\n%s", pages, diff)
	}
	for _, n := range s.nodes {
		seen := n.Seen()
		if last := seen[len(seen)-1].Target; last != "/v2/sandboxes?state=running&metadata=a%2520b%3Dc" {
			t.Errorf("node saw %s, want the filters byte for byte and nothing else", last)
		}
	}
	ascending := r.list("/v2/sandboxes?order=asc&limit=2", nil)
	if diff := cmp.Diff([]string{"s001", "s000"}, ascending); diff != "" {
		t.Errorf("the oldest two (-want +got):\n%s", diff)
	}
	after := r.list("/v2/sandboxes?startedAfter=2026-01-02T03%3A04%3A17Z", nil)
	if diff := cmp.Diff([]string{"s024"}, after); diff != "" {
		t.Errorf("the youngest (-want +got):\n%s", diff)
	}
	if got := r.list("/v2/sandboxes?template=other", nil); len(got) != 0 {
		t.Errorf("of another template: %v", got)
	}
	if got := r.list("/v2/sandboxes?template=echo", nil); len(got) != 25 {
		t.Errorf("of their template: %d", len(got))
	}
}

func TestAForeignTokenIsRefused(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"))
	r := s.start(s.config())
	s.place(5)
	token := r.do(ask{method: "GET", path: "/v2/sandboxes?limit=2"}).Header.Get("X-Next-Token")
	if token == "" {
		t.Fatal("no token")
	}
	other := s.addKey(1, "other", "sandboxes:read")
	altered := token[:10] + string(token[10]^1) + token[11:]
	for name, a := range map[string]ask{
		"altered":            {path: "/v2/sandboxes?nextToken=" + url.QueryEscape(altered)},
		"cut":                {path: "/v2/sandboxes?nextToken=" + token[:20]},
		"no token of ours":   {path: "/v2/sandboxes?nextToken=abc"},
		"another tenant's":   {path: "/v2/sandboxes?nextToken=" + token, header: other},
		"with other filters": {path: "/v2/sandboxes?state=paused&nextToken=" + token},
		"in another order":   {path: "/v2/sandboxes?order=asc&nextToken=" + token},
		"limit 0":            {path: "/v2/sandboxes?limit=0"},
		"limit 101":          {path: "/v2/sandboxes?limit=101"},
		"limit x":            {path: "/v2/sandboxes?limit=x"},
		"order x":            {path: "/v2/sandboxes?order=x"},
		"no time":            {path: "/v2/sandboxes?startedAfter=yesterday"},
	} {
		a.method = "GET"
		got := r.do(a)
		message, _ := got.field(t, "message").(string)
		if got.Status != 400 || !strings.HasPrefix(message, "invalid ") {
			t.Errorf("%s: %d %s, want 400 invalid …", name, got.Status, got.Body)
		}
	}
}

// Case C-31.
func TestAMissingNodeIsNamedAndBlindsNobody(t *testing.T) {
	t.Parallel()
	for reason, spoil := range map[string]func(*testing.T, *gatewaytest.Node){
		"dial":   func(t *testing.T, n *gatewaytest.Node) { n.URL = gatewaytest.Refusing(t) },
		"status": func(_ *testing.T, n *gatewaytest.Node) { n.Script = says(500, `{}`) },
		"answer": func(_ *testing.T, n *gatewaytest.Node) { n.Script = says(200, `[{"sandboxID":"x"}]`) },
	} {
		t.Run(reason, func(t *testing.T) {
			t.Parallel()
			good, bad := berthNode(t, "good"), berthNode(t, "bad")
			spoil(t, bad)
			s := newStand(t, good, bad)
			r := s.start(s.config())
			s.place(4)
			a := r.do(ask{method: "GET", path: "/v2/sandboxes"})
			if a.Status != 200 || a.Header.Get("Berth-Missing-Nodes") != "bad;reason="+reason {
				t.Fatalf("list = %d %q %s", a.Status, a.Header.Get("Berth-Missing-Nodes"), a.Body)
			}
			if diff := cmp.Diff([]string{"s002", "s000"}, ids(t, a)); diff != "" {
				t.Errorf("what is known (-want +got):\n%s", diff)
			}
			strict := r.do(ask{method: "GET", path: "/v2/sandboxes?strict=true"})
			if strict.Status != 502 || strict.field(t, "error_code") != "list_unavailable" || !strings.Contains(strict.Body, `"node":"bad"`) {
				t.Errorf("strict = %d %s, want 502 naming bad", strict.Status, strict.Body)
			}
			good.Script = says(302, ``)
			if all := r.do(ask{method: "GET", path: "/v2/sandboxes"}); all.Status != 502 {
				t.Errorf("nobody answered: %d %s, want 502", all.Status, all.Body)
			}
			good.Script = says(400, `{"code":400,"message":"invalid state: x"}`)
			if refused := r.do(ask{method: "GET", path: "/v2/sandboxes?state=x"}); refused.Status != 400 || refused.field(t, "message") != "invalid state: x" {
				t.Errorf("a node's 400 = %d %s", refused.Status, refused.Body)
			}
		})
	}
}

func says(status int, body string) func(http.ResponseWriter, gatewaytest.Seen) bool {
	return func(w http.ResponseWriter, _ gatewaytest.Seen) bool {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
		return true
	}
}

func TestNodesAreShownWithoutTheirAddresses(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n2"), berthNode(t, "n1"), berthNode(t, "n3"))
	r := s.start(s.config())
	s.exec(`UPDATE nodes SET cordoned = true WHERE node_id = 'n2'`)
	s.exec(`UPDATE node_leases SET expires_at = clock_timestamp() - interval '1 s' WHERE node_id = 'n3'`)
	a := r.do(ask{method: "GET", path: "/nodes"})
	if a.Status != 200 || strings.Contains(a.Body, "127.0.0.1") || strings.Contains(a.Body, "http") {
		t.Fatalf("GET /nodes = %d %s", a.Status, a.Body)
	}
	for _, part := range []string{
		`[{"id":"n1","serviceInstanceID":"i-n1","clusterID":"","version":"v1","commit":"","status":"ready"`,
		`"id":"n2","serviceInstanceID":"i-n2","clusterID":"","version":"v1","commit":"","status":"draining"`,
		`"id":"n3","serviceInstanceID":"i-n3","clusterID":"","version":"v1","commit":"","status":"unhealthy"`,
		`"cpuArchitecture":"amd64"`, `"memoryTotalBytes":16000000000`,
		`"disks":[{"mountPoint":"/","device":"","filesystemType":"","usedBytes":1,"totalBytes":2}]`,
	} {
		if !strings.Contains(a.Body, part) {
			t.Errorf("GET /nodes lacks %s:\n%s", part, a.Body)
		}
	}
	if one := r.do(ask{method: "GET", path: "/nodes/n1"}); one.Status != 200 || one.field(t, "id") != "n1" {
		t.Errorf("GET /nodes/n1 = %d %s", one.Status, one.Body)
	}
	for _, path := range []string{"/nodes/stranger", "/nodes/n1?clusterID=other"} {
		if a := r.do(ask{method: "GET", path: path}); a.Status != 404 || a.field(t, "message") != "observed node not found" {
			t.Errorf("GET %s = %d %s", path, a.Status, a.Body)
		}
	}
	if a := r.do(ask{method: "GET", path: "/nodes?clusterID=other"}); a.Status != 200 || a.Body != "[]" {
		t.Errorf("nodes of no cluster = %d %s, want []", a.Status, a.Body)
	}
}
