package gateway_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// addKey makes an API key and tells the gateways, as berth key create will.
func (s *stand) addKey(n int, tenant string, scopes ...string) http.Header {
	s.t.Helper()
	public := fmt.Sprintf("%012x", n)
	key := "e2b_" + public + strings.Repeat("0b", 24)
	digest := sha256.Sum256([]byte(key))
	s.exec(`INSERT INTO principals (principal_id, tenant_id, key_sha256, public_id, scopes, role) VALUES ($1, $2, $3, $1, $4, 'client')`,
		public, tenant, digest[:], append([]string{}, scopes...))
	s.exec(`SELECT feed_key($1)`, public)
	return http.Header{"X-Api-Key": {key}}
}

func TestAnotherTenantsSandboxDoesNotExist(t *testing.T) {
	t.Parallel()
	n := berthNode(t, "n1")
	s := newStand(t, n)
	r := s.start(s.config())
	a, b := s.addKey(1, "a", "sandboxes:write"), s.addKey(2, "b", "sandboxes:write")
	made := r.do(ask{method: "POST", path: "/sandboxes", body: `{"templateID":"echo"}`, header: a})
	id, ok := made.field(t, "sandboxID").(string)
	if made.Status != 201 || !ok {
		t.Fatalf("create = %d %s", made.Status, made.Body)
	}
	before := len(n.Seen())
	for _, call := range []ask{
		{method: "GET", path: "/sandboxes/" + id},
		{method: "DELETE", path: "/sandboxes/" + id},
		{method: "POST", path: "/sandboxes/" + id + "/pause"},
		{method: "POST", path: "/v2/sandboxes/" + id + "/connect"},
		{method: "POST", path: "/sandboxes/" + id + "/timeout", body: `{"timeout":1}`},
	} {
		call.header = b
		if got := r.do(call); got.Status != 404 || got.field(t, "message") != "sandbox assignment not found" {
			t.Errorf("%s %s by the other tenant = %d %s, want 404", call.method, call.path, got.Status, got.Body)
		}
	}
	if len(n.Seen()) != before {
		t.Error("the node was asked")
	}
	if got := r.do(ask{method: "GET", path: "/sandboxes/" + id, header: a}); got.Status != 200 {
		t.Errorf("by its own tenant = %d", got.Status)
	}
	if got := r.do(ask{method: "GET", path: "/sandboxes/" + id}); got.Status != 200 {
		t.Errorf("by the administrator = %d", got.Status)
	}
	for name, tt := range map[string]struct {
		header http.Header
		want   []string
	}{"its own tenant": {a, []string{id}}, "the other": {b, []string{}}, "the administrator": {nil, []string{id}}} {
		if diff := cmp.Diff(tt.want, r.list("/v2/sandboxes", tt.header)); diff != "" {
			t.Errorf("list by %s (-want +got):\n%s", name, diff)
		}
	}
}

// list returns the ids of a list in its order.
func (r *replica) list(path string, header http.Header) []string {
	r.t.Helper()
	a := r.do(ask{method: "GET", path: path, header: header})
	if a.Status != 200 {
		r.t.Fatalf("GET %s = %d %s", path, a.Status, a.Body)
	}
	return ids(r.t, a)
}

func ids(t *testing.T, a answer) []string {
	t.Helper()
	var items []struct {
		SandboxID string `json:"sandboxID"`
	}
	if err := json.Unmarshal([]byte(a.Body), &items); err != nil {
		t.Fatalf("no list: %s", a.Body)
	}
	found := []string{}
	for _, item := range items {
		found = append(found, item.SandboxID)
	}
	return found
}

func TestScopesAreNamed(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"))
	r := s.start(s.config())
	reader, none := s.addKey(1, "a", "sandboxes:read"), s.addKey(2, "a")
	for name, tt := range map[string]struct {
		ask
		scope string
	}{
		"a reader makes nothing":   {ask{method: "POST", path: "/sandboxes", body: `{"templateID":"echo"}`, header: reader}, "sandboxes:write"},
		"a reader ends nothing":    {ask{method: "DELETE", path: "/sandboxes/abc", header: reader}, "sandboxes:write"},
		"a reader sees no nodes":   {ask{method: "GET", path: "/nodes", header: reader}, "nodes:read"},
		"without scopes, no lists": {ask{method: "GET", path: "/v2/sandboxes", header: none}, "sandboxes:read"},
	} {
		a := r.do(tt.ask)
		if a.Status != 403 || a.field(t, "message") != "scope "+tt.scope+" required" || a.field(t, "error_code") != "denied" {
			t.Errorf("%s = %d %s, want 403 naming %s", name, a.Status, a.Body, tt.scope)
		}
	}
	if a := r.do(ask{method: "GET", path: "/v2/sandboxes", header: reader}); a.Status != 200 {
		t.Errorf("a reader's list = %d %s", a.Status, a.Body)
	}
}

func TestARevokedKeyEndsOnEveryGateway(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"))
	one, two := s.start(s.config()), s.start(s.config())
	key := s.addKey(1, "a", "sandboxes:read")
	for _, r := range []*replica{one, two} {
		if a := r.do(ask{method: "GET", path: "/v2/sandboxes", header: key}); a.Status != 200 {
			t.Fatalf("before = %d %s", a.Status, a.Body)
		}
	}
	s.exec(`UPDATE principals SET disabled_at = clock_timestamp()`)
	s.exec(`SELECT feed_key($1)`, fmt.Sprintf("%012x", 1))
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for _, r := range []*replica{one, two} {
		for r.do(ask{method: "GET", path: "/v2/sandboxes", header: key}).Status != 401 {
			select {
			case <-ctx.Done():
				t.Fatal("the key still works")
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
	t.Logf("both refused it after %s", time.Since(began))
}
