package gateway_test

import (
	"net/http"
	"strings"
	"testing"
)

func TestASandboxIsCreatedUsedAndDeletedThroughTwoGateways(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"), berthNode(t, "n2"))
	one, two := s.start(s.config()), s.start(s.config())
	for range 4 {
		id := one.create()
		// The binding is committed before the answer, so the other gateway knows it at once.
		if a := two.do(ask{method: "GET", path: "/sandboxes/" + id}); a.Status != http.StatusOK || a.field(t, "sandboxID") != id {
			t.Fatalf("get through the other gateway = %d %s", a.Status, a.Body)
		}
		pair := http.Header{"E2b-Sandbox-Id": {id}, "E2b-Sandbox-Port": {"3000"}}
		if a := two.do(ask{method: "GET", path: "/x?y=%2f", header: pair}); a.Status != http.StatusOK || a.Body != "app saw GET /x?y=%2f" {
			t.Errorf("use by header pair = %d %s", a.Status, a.Body)
		}
		if a := one.do(ask{method: "GET", path: "/x", header: http.Header{}, host: "3000-" + id + "." + domain}); a.Status != http.StatusOK || a.Header.Get("X-App") != "1" {
			t.Errorf("use by host name = %d %s", a.Status, a.Body)
		}
		if a := two.do(ask{method: "DELETE", path: "/sandboxes/" + id}); a.Status != http.StatusNoContent {
			t.Fatalf("delete = %d %s", a.Status, a.Body)
		}
		for name, r := range map[string]*replica{"deleting": two} {
			if a := r.do(ask{method: "GET", path: "/sandboxes/" + id}); a.Status != http.StatusNotFound || a.field(t, "error_code") != "unknown_sandbox" {
				t.Errorf("get through the %s gateway after the delete = %d %s", name, a.Status, a.Body)
			}
			if a := r.do(ask{method: "GET", path: "/x", header: pair}); a.Status != http.StatusBadGateway {
				t.Errorf("use after the delete = %d %s, want 502", a.Status, a.Body)
			}
		}
		if a := one.do(ask{method: "DELETE", path: "/sandboxes/" + id}); a.Status != http.StatusNotFound {
			t.Errorf("second delete = %d %s, want 404", a.Status, a.Body)
		}
	}
	if s.scheduler.Open() != 0 {
		t.Errorf("%d reservations left", s.scheduler.Open())
	}
}

func TestNoKeyNoWord(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"))
	r := s.start(s.config())
	for name, header := range map[string]http.Header{
		"no key":          {},
		"a wrong key":     {"X-Api-Key": {strings.Repeat("k", 40)}},
		"two good keys":   {"X-Api-Key": {apiKey, apiKey}},
		"a bearer token":  {"Authorization": {"Bearer " + apiKey}},
		"the node's key":  {"X-Api-Key": {"node-key-0123456789-0123456789-0123456789"}},
		"a sandbox token": {"X-Access-Token": {apiKey}},
	} {
		for _, path := range []string{"/sandboxes/abc", "/v2/sandboxes", "/nodes", "/no/such/path"} {
			a := r.do(ask{method: "GET", path: path, header: header})
			if a.Status != http.StatusUnauthorized || a.field(t, "message") != "unauthorized" || a.Header.Get("WWW-Authenticate") != "ApiKey" {
				t.Errorf("%s: GET %s = %d %v %s, want 401 unauthorized", name, path, a.Status, a.Header, a.Body)
			}
		}
	}
	if len(s.nodes[0].Seen()) != 0 || len(s.scheduler.Calls()) != 0 {
		t.Error("something was sent")
	}
}
