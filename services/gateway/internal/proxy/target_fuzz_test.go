package proxy

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"berth/services/internal/sandbox"
)

// FuzzParseTarget states what holds for every request: an error is one of ours; what is forwarded
// names a sandbox and port that are valid; the bytes of the target are the client's.
func FuzzParseTarget(f *testing.F) {
	for _, seed := range [][5]string{
		{"GET", "3000-s1.sbx.test", "/a%2Fb?c", "", ""},
		{"GET", "gw", "/proxy/x", "s1", "1"},
		{"DELETE", "gw", "/sandboxes/a%2F", "", ""},
		{"POST", "[::1]:80", "http://h?x", "s1", "65536"},
		{"OPTIONS", "gw", "*", "", ""},
		{"GET", "gw", "/templates/%2e%2e/x", "", ""},
	} {
		f.Add(seed[0], seed[1], seed[2], seed[3], seed[4])
	}
	domains := Domains{"sbx.test", "test"}
	f.Fuzz(func(t *testing.T, method, host, target, id, port string) {
		r := request(method, host, target, map[string][]string{"e2b-sandbox-id": {id}, "x-agentenv-target-port": {port}})
		got, err := ParseTarget(r, domains)
		if err != nil {
			if told, ok := errors.AsType[*Error](err); !ok || told.Status/100 != 4 || told.Code == "" || told.Message == "" {
				t.Fatalf("error %v is none of ours", err)
			}
			return
		}
		if got.Kind == KindOptions {
			return
		}
		if !strings.HasSuffix(target, got.Raw) && got.Raw != "/" && !strings.HasSuffix(target, got.Raw[1:]) {
			t.Fatalf("target %q became %q", target, got.Raw)
		}
		if got.Raw[0] != '/' || strings.ContainsAny(got.Raw, " #\r\n\x00\x7f") {
			t.Fatalf("target %q would not survive a request line", got.Raw)
		}
		switch got.Kind {
		case KindData:
			if _, err := sandbox.ParseID(string(got.Sandbox)); err != nil || got.Port == 0 || got.Plane != Data {
				t.Fatalf("forwarded to %q:%d on plane %s", got.Sandbox, got.Port, got.Plane)
			}
			if !strings.HasPrefix(got.Send(), "/proxy") {
				t.Fatalf("the node would get %q", got.Send())
			}
		case KindSandbox:
			if _, err := sandbox.ParseID(string(got.Sandbox)); err != nil || got.Send() != got.Raw {
				t.Fatalf("control plane of %q with %q", got.Sandbox, got.Send())
			}
		case KindAny:
			if strings.Contains(strings.ToLower(got.Path), "..") && strings.Contains(got.Path, "/../") {
				t.Fatalf("path %q climbs out of its family", got.Path)
			}
		case KindUnknown:
			if e := got.Refusal(method); e.Status != http.StatusNotFound && e.Status != http.StatusMethodNotAllowed {
				t.Fatalf("refused with %d", e.Status)
			}
		default:
		}
	})
}
