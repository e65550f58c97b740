package gateway_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"berth/migrations"
	"berth/pkg/pglocal"
	"berth/pkg/pgtest"
	"berth/services/gateway/internal/gatewaytest"
)

// Case C-21.
func TestABrowserMayReadTheAPI(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"))
	cfg := s.config()
	cfg.CORSOrigins = []string{"https://console.example"}
	r := s.start(cfg)
	preflight := func(origin string) answer {
		return r.do(ask{method: "OPTIONS", path: "/v2/sandboxes", header: http.Header{
			"Origin": {origin}, "Access-Control-Request-Method": {"GET"},
			"Access-Control-Request-Headers": {"x-api-key,browser,lang,lang_version,package_version"},
		}})
	}
	a := preflight("https://console.example")
	if a.Status != 204 || a.Header.Get("Access-Control-Allow-Origin") != "https://console.example" ||
		a.Header.Get("Access-Control-Allow-Headers") != "x-api-key,browser,lang,lang_version,package_version" || a.Header.Get("Access-Control-Max-Age") != "600" {
		t.Errorf("preflight = %d %v", a.Status, a.Header)
	}
	if a := preflight("https://other.example"); a.Header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("preflight of another origin = %d %v", a.Status, a.Header)
	}
	for origin, allowed := range map[string]bool{"https://console.example": true, "https://other.example": false} {
		for _, path := range []string{"/v2/sandboxes", "/sandboxes/unknown"} {
			a := r.do(ask{method: "GET", path: path, header: http.Header{"X-Api-Key": {apiKey}, "Origin": {origin}}})
			got := strings.Contains(strings.ToLower(a.Header.Get("Access-Control-Expose-Headers")), "x-next-token") &&
				a.Header.Get("Access-Control-Allow-Origin") == origin && a.Header.Get("Access-Control-Allow-Credentials") == ""
			if got != allowed {
				t.Errorf("GET %s of %s = %v, want allowed %t", path, origin, a.Header, allowed)
			}
		}
	}
	if a := r.do(ask{method: "OPTIONS", path: "/x", header: http.Header{}}); a.Status != 401 {
		t.Errorf("an OPTIONS that is no preflight = %d, want 401", a.Status)
	}
}

func TestTheAccessLogHasNoSecrets(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"))
	r := s.start(s.config())
	id := r.create()
	r.do(ask{method: "GET", path: "/sandboxes/" + id + "?token=secret-query", header: http.Header{
		"X-Api-Key": {apiKey}, "Cookie": {"c=secret-cookie"}, "Authorization": {"Bearer secret-bearer"}, "X-Request-Id": {"req-7"},
	}})
	r.do(ask{method: "GET", path: "/data?token=secret-query", header: http.Header{
		"E2b-Sandbox-Id": {id}, "E2b-Sandbox-Port": {"3000"}, "X-Access-Token": {"secret-token"},
	}})
	r.do(ask{method: "GET", path: "/nodes", header: http.Header{"X-Api-Key": {"secret-key-0123456789-0123456789-0123456789"}}})
	r.do(ask{method: "GET", path: "/health", header: http.Header{}})
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	text := r.Access.String()
	if strings.Contains(text, "secret") || strings.Contains(text, apiKey) || strings.Contains(text, gatewaytest.NodeKey) {
		t.Errorf("a secret is in the log:\n%s", text)
	}
	var lines []map[string]any
	for line := range strings.Lines(text) {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatalf("no JSON: %s", line)
		}
		lines = append(lines, fields)
	}
	if len(lines) != 4 {
		t.Fatalf("%d lines, want 4: health is not logged\n%s", len(lines), text)
	}
	for i, want := range []map[string]any{
		{"plane": "control", "source": "schedule", "method": "POST", "path": "/v2/sandboxes", "status": 201.0, "sandbox": id, "node": "n1", "tenant": "default", "key": "bootstrap", "client": "127.0.0.1"},
		{"plane": "control", "source": "path", "method": "GET", "path": "/sandboxes/" + id, "status": 200.0, "request": "req-7", "node": "n1"},
		{"plane": "data", "source": "header", "method": "GET", "path": "/data", "status": 200.0, "sandbox": id, "port": 3000.0, "node": "n1", "attempts": 1.0},
		{"plane": "control", "method": "GET", "path": "/nodes", "status": 401.0, "error": "unauthenticated"},
	} {
		for name, value := range want {
			if lines[i][name] != value {
				t.Errorf("line %d: %s = %v, want %v", i, name, lines[i][name], value)
			}
		}
		if took, ok := lines[i]["took"].(float64); !ok || took <= 0 {
			t.Errorf("line %d: took %v", i, lines[i]["took"])
		}
	}
}

func TestErrorsOfTheDataPlaneAreLoggedAndTheRestIsNot(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"))
	cfg := s.config()
	cfg.AccessLog = "errors"
	r := s.start(cfg)
	id := r.create()
	for _, sandbox := range []string{id, "unknown"} {
		r.do(ask{method: "GET", path: "/data", header: http.Header{"E2b-Sandbox-Id": {sandbox}, "E2b-Sandbox-Port": {"3000"}}})
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	text := r.Access.String()
	if strings.Count(text, `"path":"/data"`) != 1 || !strings.Contains(text, `"error":"unknown_sandbox"`) {
		t.Errorf("access log:\n%s", text)
	}
}

func TestMetricsKeepAgentENVsNames(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"))
	r := s.start(s.config())
	id := r.create()
	r.do(ask{method: "GET", path: "/sandboxes/" + id})
	r.do(ask{method: "GET", path: "/x", header: http.Header{"E2b-Sandbox-Id": {id}, "E2b-Sandbox-Port": {"3000"}}})
	r.do(ask{method: "GET", path: "/no/such"})
	r.do(ask{method: "GET", path: "/health"})
	text := r.metrics()
	for _, want := range []string{
		`agentenv_gateway_http_request_duration_seconds_count{method="POST",route="/v2/sandboxes",route_source="schedule",status="2xx"} 1`,
		`agentenv_gateway_http_request_duration_seconds_count{method="GET",route="/sandboxes/{sandbox_id}",route_source="path",status="2xx"} 1`,
		`agentenv_gateway_http_request_duration_seconds_count{method="GET",route="/proxy/*",route_source="header",status="2xx"} 1`,
		`agentenv_gateway_http_request_duration_seconds_count{method="GET",route="unmatched",route_source="unknown",status="4xx"} 1`,
		`agentenv_gateway_scheduler_rpc_duration_seconds_count{rpc="Schedule",status="ok"} 1`,
		`agentenv_gateway_scheduler_rpc_duration_seconds_bucket{rpc="RecordAssignment",status="ok",le="1800"} 1`,
		`berth_gateway_creates_total{outcome="created"} 1`,
		`berth_gateway_create_attempts_total{reason="created"} 1`,
		`berth_gateway_log_lines_lost_total 0`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	for _, never := range []string{id, "/health", apiKey} {
		if strings.Contains(text, never) {
			t.Errorf("metrics have %s", never)
		}
	}
}

func TestOneTraceGoesThroughGatewaySchedulerAndNode(t *testing.T) {
	t.Parallel()
	n := berthNode(t, "n1")
	s := newStand(t, n)
	spans := tracetest.NewInMemoryExporter()
	tracers := trace.NewTracerProvider(trace.WithSyncer(spans))
	t.Cleanup(func() { _ = tracers.Shutdown(context.WithoutCancel(t.Context())) })
	tel := quiet(t)
	tel.Tracers = tracers
	r := s.startWith(s.config(), tel)
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	header := http.Header{"X-Api-Key": {apiKey}, "Traceparent": {parent}}
	a := r.do(ask{method: "POST", path: "/sandboxes", body: `{"templateID":"echo"}`, header: header})
	if a.Status != 201 {
		t.Fatalf("create = %d %s", a.Status, a.Body)
	}
	id, _ := a.field(t, "sandboxID").(string)
	r.do(ask{method: "GET", path: "/sandboxes/" + id, header: header})
	const traceID = "0af7651916cd43dd8448eb211c80319c"
	for _, seen := range n.Seen() {
		got := seen.Header.Get("Traceparent")
		if !strings.HasPrefix(got, "00-"+traceID+"-") || got == parent {
			t.Errorf("%s: the node saw %q, want the client's trace and a span of ours", seen.Method, got)
		}
	}
	names := map[string]bool{}
	for _, span := range spans.GetSpans() {
		if span.SpanContext.TraceID().String() == traceID {
			names[span.Name] = true
		}
	}
	for _, want := range []string{"sandbox.create", "sandbox.get", "node.call", "scheduler.v1.Scheduler/Schedule", "scheduler.v1.Scheduler/RecordAssignment"} {
		if !names[want] {
			t.Errorf("the trace has %v, and lacks %s", names, want)
		}
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(r.Access.String(), `"trace":"`+traceID+`"`) {
		t.Errorf("access log: %s", r.Access)
	}
}

// Case C-19, on the control plane.
func TestTheHeadOfARequestHasALimit(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"))
	r := s.start(s.config())
	for size, want := range map[int]int{8 << 10: 200, 64 << 10: 200, 256 << 10: 431, 2 << 20: 431} {
		a, err := r.try(ask{method: "GET", path: "/nodes", header: http.Header{"X-Api-Key": {apiKey}, "Cookie": {strings.Repeat("c", size)}}})
		if err != nil && want == 431 {
			continue // the connection was closed while the client still sent
		}
		if err != nil || a.Status != want {
			t.Errorf("a cookie of %d bytes = %d %v, want %d", size, a.Status, err, want)
		}
	}
}

// Case C-29, on the control plane.
func TestHTTP2WithoutTLSIsServed(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"))
	r := s.start(s.config())
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.URL+"/v2/sandboxes", io.MultiReader(strings.NewReader(`{"templateID":"echo"}`)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Api-Key", apiKey)
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.ProtoMajor != 2 || resp.StatusCode != 201 {
		t.Errorf("create by HTTP/2 = %s %d", resp.Proto, resp.StatusCode)
	}
}

// What is known is served, what is not is 503: absence cannot be told from ignorance.
func TestWithoutPostgreSQLAWarmGatewayGoesOn(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, nil)
	n := berthNode(t, "n1")
	s := &stand{t: t, db: server.New(migrations.FS), scheduler: gatewaytest.NewScheduler(n), nodes: []*gatewaytest.Node{n}}
	s.addNode(n)
	s.scheduler.OnRecord, s.scheduler.OnEnd = s.record, s.end
	r := s.start(s.config())
	id := r.create()
	key := s.addKey(1, "default", "sandboxes:write")
	// The feed's word about the key makes the gateway forget it, so it must have passed.
	for !strings.Contains(r.metrics(), `berth_gateway_route_feed_rows_total{kind="key"} 1`) {
		if t.Context().Err() != nil {
			t.Fatal("the feed said nothing")
		}
	}
	if a := r.do(ask{method: "GET", path: "/sandboxes/" + id, header: key}); a.Status != 200 {
		t.Fatalf("with the database = %d %s", a.Status, a.Body)
	}
	server.Stop(pglocal.Immediate)
	for name, header := range map[string]http.Header{"the bootstrap key": nil, "a known key": key} {
		if a := r.do(ask{method: "GET", path: "/sandboxes/" + id, header: header}); a.Status != 200 {
			t.Errorf("a known sandbox by %s = %d %s, want 200", name, a.Status, a.Body)
		}
	}
	pair := http.Header{"E2b-Sandbox-Id": {id}, "E2b-Sandbox-Port": {"3000"}}
	if a := r.do(ask{method: "GET", path: "/x", header: pair}); a.Status != 200 {
		t.Errorf("its traffic = %d %s, want 200", a.Status, a.Body)
	}
	unknown := http.Header{"X-Api-Key": {"e2b_" + strings.Repeat("f", 60)}}
	for name, call := range map[string]ask{
		"an unknown key":             {method: "GET", path: "/sandboxes/" + id, header: unknown},
		"an unknown sandbox":         {method: "GET", path: "/sandboxes/unknown"},
		"traffic of one":             {method: "GET", path: "/x", header: http.Header{"E2b-Sandbox-Id": {"unknown"}, "E2b-Sandbox-Port": {"1"}}},
		"a list, for whose is what?": {method: "GET", path: "/v2/sandboxes"},
		"the nodes":                  {method: "GET", path: "/nodes"},
	} {
		if a := r.do(call); a.Status != 503 || a.Header.Get("Retry-After") != "1" || a.field(t, "error_code") != "routes_unavailable" {
			t.Errorf("%s = %d %v %s, want 503 routes_unavailable", name, a.Status, a.Header, a.Body)
		}
	}
	if got := r.status(r.Ops + "/readyz"); got != 200 {
		t.Errorf("/readyz = %d: all replicas would leave the balancer together", got)
	}
	server.Start()
	deadline := time.Now().Add(20 * time.Second)
	for r.do(ask{method: "GET", path: "/sandboxes/unknown"}).Status != 404 {
		if time.Now().After(deadline) {
			t.Fatal("not back to normal")
		}
	}
}

func TestSwitchesForAgentENVsClients(t *testing.T) {
	t.Parallel()
	n := berthNode(t, "n1")
	s := newStand(t, n)
	cfg := s.config()
	cfg.UnknownSandboxStatus, cfg.ProxyPrefix, cfg.Debug = 404, "keep", true
	r := s.start(cfg)
	pair := http.Header{"E2b-Sandbox-Id": {"unknown"}, "E2b-Sandbox-Port": {"3000"}}
	if a := r.do(ask{method: "GET", path: "/x", header: pair}); a.Status != 404 {
		t.Errorf("unknown sandbox = %d, want 404", a.Status)
	}
	id := r.create()
	pair.Set("E2b-Sandbox-Id", id)
	if a := r.do(ask{method: "GET", path: "/proxy/x", header: pair}); a.Body != "app saw GET /proxy/x" || a.Header.Get("X-Agentenv-Node-Id") != "n1" {
		t.Errorf("kept prefix = %q %v", a.Body, a.Header)
	}
	if a := r.do(ask{method: "GET", path: "/x", header: pair}); a.Body != "app saw GET /x" {
		t.Errorf("without a prefix = %q", a.Body)
	}
	plain := s.start(s.config())
	if a := plain.do(ask{method: "GET", path: "/proxy/x", header: pair}); a.Body != "app saw GET /x" {
		t.Errorf("stripped prefix = %q", a.Body)
	}
}
