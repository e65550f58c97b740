package proxy

import (
	"encoding/binary"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func TestWriteErrorInTheFormItsCallerReads(t *testing.T) {
	t.Parallel()
	busy := Error{Status: 503, Code: "routes_unavailable", Message: "binding store unavailable", RetryAfter: 1500 * time.Millisecond, Sandbox: "s1", Port: 3000}
	const chrome = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
	tests := map[string]struct {
		method string
		header map[string]string
		plane  Plane
		err    Error
		status int
		want   map[string]string // of the answer's header
		body   string            // is in it
	}{
		"programs get JSON with id and port": {
			"GET", nil, Data, busy, 503,
			map[string]string{"Content-Type": "application/json", "Berth-Error": "routes_unavailable", "Retry-After": "2", "Cache-Control": "no-store"},
			`{"code":503,"message":"binding store unavailable","error_code":"routes_unavailable","requestId":"r-1","sandboxId":"s1","port":3000}`,
		},
		"on the control plane without them": {
			"GET", nil, Control, busy, 503, nil,
			`{"code":503,"message":"binding store unavailable","error_code":"routes_unavailable","requestId":"r-1"}`,
		},
		"a 401 says how": {
			"GET", nil, Control,
			Error{Status: 401, Code: "unauthenticated", Message: "unauthorized"},
			401,
			map[string]string{"Www-Authenticate": "ApiKey"},
			`"message":"unauthorized"`,
		},
		"a 405 says what": {
			"PUT", nil, Control,
			Error{Status: 405, Code: "wrong_method", Message: "method not allowed", Allow: "GET"},
			405,
			map[string]string{"Allow": "GET"},
			"",
		},
		"gRPC gets trailers only": {
			"POST",
			map[string]string{"Content-Type": "application/grpc+proto"},
			Data, busy, 200,
			map[string]string{"Content-Type": "application/grpc+proto", "Grpc-Status": "14", "Grpc-Message": "binding store unavailable"},
			"",
		},
		"gRPC of an unknown sandbox is NotFound": {
			"POST",
			map[string]string{"Content-Type": "application/grpc"},
			Data, UnknownSandbox(Data), 200,
			map[string]string{"Grpc-Status": "5"},
			"",
		},
		"Connect unary keeps its status": {
			"POST",
			map[string]string{"Content-Type": "application/json", "Connect-Protocol-Version": "1"},
			Data, busy, 503,
			map[string]string{"Content-Type": "application/json"},
			`{"code":"aborted","message":"binding store unavailable"}`,
		},
		"Connect unary reads 502 as it is": {
			"POST",
			map[string]string{"Content-Type": "application/json", "Connect-Protocol-Version": "1"},
			Data, UnknownSandbox(Data), 502,
			nil, `"error_code":"unknown_sandbox"`,
		},
		"Connect on the control plane is nothing special": {"POST", map[string]string{"Connect-Protocol-Version": "1"}, Control, busy, 503, nil, `"error_code":"routes_unavailable"`},
		"a browser's page":           {"GET", map[string]string{"Accept": chrome, "Sec-Fetch-Mode": "navigate"}, Data, busy, 503, map[string]string{"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}, "<code>s1</code>"},
		"not for a script's fetch":   {"GET", map[string]string{"Accept": chrome, "Sec-Fetch-Mode": "cors"}, Data, busy, 503, map[string]string{"Content-Type": "application/json"}, ""},
		"not for who prefers JSON":   {"GET", map[string]string{"Accept": "application/json, text/html;q=0.9"}, Data, busy, 503, map[string]string{"Content-Type": "application/json"}, ""},
		"not for who takes anything": {"GET", map[string]string{"Accept": "*/*"}, Data, busy, 503, map[string]string{"Content-Type": "application/json"}, ""},
		"not on the control plane":   {"GET", map[string]string{"Accept": chrome}, Control, busy, 503, map[string]string{"Content-Type": "application/json"}, ""},
		"not for a POST":             {"POST", map[string]string{"Accept": chrome}, Data, busy, 503, map[string]string{"Content-Type": "application/json"}, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := httptest.NewRequest(tt.method, "/<script>", nil)
			r.Header.Set("X-Request-Id", "r-1")
			for k, v := range tt.header {
				r.Header.Set(k, v)
			}
			w := httptest.NewRecorder()
			WriteError(w, r, tt.plane, tt.err)
			if w.Code != tt.status || !strings.Contains(w.Body.String(), tt.body) || w.Header().Get("X-Request-Id") != "r-1" {
				t.Errorf("got %d %q, want %d with %q", w.Code, w.Body, tt.status, tt.body)
			}
			for k, v := range tt.want {
				if w.Header().Get(k) != v {
					t.Errorf("%s: %q, want %q", k, w.Header().Get(k), v)
				}
			}
			if strings.Contains(w.Body.String(), "script") {
				t.Error("the request's own text is shown")
			}
		})
	}
}

func TestConnectStreamsEndInOneEnvelope(t *testing.T) {
	t.Parallel()
	for status, code := range map[int]string{429: "resource_exhausted", 503: "aborted", 504: "deadline_exceeded"} {
		r := httptest.NewRequest(http.MethodPost, "/process.Process/Start", nil)
		r.Header.Set("Content-Type", "application/connect+json; charset=utf-8")
		w := httptest.NewRecorder()
		WriteError(w, r, Data, Error{Status: status, Code: "x", Message: "m"})
		b := w.Body.Bytes()
		if w.Code != 200 || w.Header().Get("Content-Type") != "application/connect+json" || len(b) < 5 || b[0] != 2 ||
			int(binary.BigEndian.Uint32(b[1:5])) != len(b)-5 || string(b[5:]) != `{"error":{"code":"`+code+`","message":"m"}}` {
			t.Errorf("%d: %d %v %q", status, w.Code, w.Header(), b)
		}
	}
	r := httptest.NewRequest(http.MethodPost, "/process.Process/Start", nil)
	r.Header.Set("Content-Type", "application/connect+json")
	w := httptest.NewRecorder()
	if WriteError(w, r, Data, UnknownSandbox(Data)); w.Code != 502 {
		t.Errorf("an unknown sandbox is %d to a stream, want plain 502", w.Code)
	}
}

func TestRequestID(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		values []string
		kept   bool
	}{
		"a good one is kept":    {[]string{"Ab-1_2.3"}, true},
		"128 characters":        {[]string{strings.Repeat("a", 128)}, true},
		"129 are too many":      {[]string{strings.Repeat("a", 129)}, false},
		"none":                  {nil, false},
		"an empty one":          {[]string{""}, false},
		"two":                   {[]string{"a", "b"}, false},
		"a line break in it":    {[]string{"a\nb"}, false},
		"letters beyond ASCII":  {[]string{"ä"}, false},
		"a blank in the middle": {[]string{"a b"}, false},
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		if tt.values != nil {
			r.Header["X-Request-Id"] = tt.values
		}
		id := RequestID(r)
		if tt.kept != (len(tt.values) > 0 && id == tt.values[0]) || !validRequestID(id) || RequestID(r) != id {
			t.Errorf("%s: RequestID(%q) = %q", name, tt.values, id)
		}
	}
}
