package telemetry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"berth/pkg/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newTelemetry(t *testing.T, cfg telemetry.Config) *telemetry.Telemetry {
	t.Helper()
	tel, err := telemetry.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tel.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return tel
}

func TestJSONIsTheFormatWhereThereIsNoTerminal(t *testing.T) {
	t.Parallel()
	for _, format := range []string{"", "auto", "json"} {
		var out bytes.Buffer
		tel := newTelemetry(t, telemetry.Config{Service: "scheduler", LogFormat: format, Output: &out})
		tel.Log.Info("sandbox placed", slog.String("node", "n1"))
		var got map[string]any
		if err := json.Unmarshal(out.Bytes(), &got); err != nil {
			t.Fatalf("format %q wrote %q: %v", format, out.String(), err)
		}
		delete(got, "time")
		want := map[string]any{"level": "INFO", "msg": "sandbox placed", "node": "n1", "service": "scheduler"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("format %q (-want +got):\n%s", format, diff)
		}
	}
}

func TestConsoleLinesReadBackAsOneRecordEach(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	tel := newTelemetry(t, telemetry.Config{Service: "scheduler", LogFormat: "console", Output: &out})
	tel.Log.With(slog.Int("attempt", 2)).WithGroup("roster").Warn("reconcile",
		slog.String("sandbox", "a b"), slog.Any("error", errors.New("line\nbreak")),
		slog.Group("took", slog.Duration("sql", time.Second)), slog.String("empty", ""))
	_, line, _ := strings.Cut(out.String(), " ")
	want := "WARN  reconcile attempt=2 roster.sandbox=\"a b\" roster.error=\"line\\nbreak\" roster.took.sql=1s roster.empty=\"\"\n"
	if line != want {
		t.Errorf("console line = %q, want %q", line, want)
	}
}

func TestALineCarriesTheTraceOfItsContext(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	tel := newTelemetry(t, telemetry.Config{LogFormat: "json", Output: &out})
	span := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}})
	tel.Log.InfoContext(trace.ContextWithSpanContext(t.Context(), span), "placed")
	if want := `"trace_id":"01000000000000000000000000000000","span_id":"0200000000000000"`; !strings.Contains(out.String(), want) {
		t.Errorf("line = %s, want one with %s", out.String(), want)
	}
}

func TestUnknownWordsAreRefusedAllAtOnce(t *testing.T) {
	t.Parallel()
	_, err := telemetry.New(t.Context(), telemetry.Config{LogLevel: "loud", LogFormat: "xml"})
	want := `BERTH_LOG_LEVEL="loud" (--log-level): debug, info, warn or error is wanted` + "\n" +
		`BERTH_LOG_FORMAT="xml" (--log-format): auto, console or json is wanted`
	if err == nil || err.Error() != want {
		t.Errorf("New = %v, want:\n%s", err, want)
	}
}

func TestUnknownTraceChoicesNameTheirVariable(t *testing.T) {
	tests := map[string]struct {
		env  map[string]string
		want string
	}{
		"exporter": {env: map[string]string{"OTEL_TRACES_EXPORTER": "zipkin"}, want: `OTEL_TRACES_EXPORTER="zipkin": otlp or none is wanted`},
		"protocol": {
			env:  map[string]string{"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
			want: `OTEL_EXPORTER_OTLP_PROTOCOL="http/json": grpc or http/protobuf is wanted`,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			for k, v := range tt.env {
				t.Setenv(k, v)
			}
			_, err := telemetry.New(t.Context(), telemetry.Config{Output: io.Discard})
			if err == nil || err.Error() != tt.want {
				t.Errorf("New = %v, want %q", err, tt.want)
			}
		})
	}
}

func TestTracesLeaveOnlyWhenTheEnvironmentAsks(t *testing.T) {
	received := make(chan string, 1)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		received <- r.URL.Path
		w.Header().Set("Content-Type", "application/x-protobuf")
	}))
	defer collector.Close()

	quiet := newTelemetry(t, telemetry.Config{Output: io.Discard})
	_, span := quiet.Tracers.Tracer("test").Start(t.Context(), "placement.reserve")
	if span.IsRecording() {
		t.Error("a span is recorded though nothing asked for traces")
	}
	span.End()

	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	tel, err := telemetry.New(t.Context(), telemetry.Config{Service: "scheduler", Output: io.Discard})
	if err != nil {
		t.Fatal(err)
	}
	_, span = tel.Tracers.Tracer("test").Start(t.Context(), "placement.reserve")
	span.End()
	if err := tel.Close(t.Context()); err != nil {
		t.Fatalf("Close: %v", err)
	}
	select {
	case path := <-received:
		if path != "/v1/traces" {
			t.Errorf("collector was asked at %q, want /v1/traces", path)
		}
	default:
		t.Error("Close returned and the collector has no span")
	}
}

func TestTheLogLevelChangesWhileTheProcessRuns(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	tel := newTelemetry(t, telemetry.Config{LogFormat: "json", LogLevel: "warn", Output: &out})
	admin := tel.Admin()
	call := func(method, body string) (int, string) {
		w := httptest.NewRecorder()
		admin.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, "/log-level", strings.NewReader(body)))
		return w.Code, strings.TrimSpace(w.Body.String())
	}
	steps := []struct {
		method, body string
		status       int
		want         string
	}{
		{"GET", "", 200, `{"level":"warn"}`},
		{"PUT", `{"level":"debug"}`, 200, `{"level":"debug"}`},
		{"PUT", "info\n", 200, `{"level":"info"}`},
		{"PUT", `{"level":"loud"}`, 400, `{"message":"level \"loud\": debug, info, warn or error is wanted"}`},
		{"PUT", "", 400, `{"message":"level: debug, info, warn or error is wanted"}`},
		{"GET", "", 200, `{"level":"info"}`},
	}
	for _, s := range steps {
		if status, got := call(s.method, s.body); status != s.status || got != s.want {
			t.Errorf("%s /log-level %q = %d %s, want %d %s", s.method, s.body, status, got, s.status, s.want)
		}
	}
	tel.Log.Info("now visible")
	if !strings.Contains(out.String(), "now visible") {
		t.Errorf("info line missing after PUT info: %s", out.String())
	}
}

func TestMetricsNameTheBuild(t *testing.T) {
	t.Parallel()
	tel := newTelemetry(t, telemetry.Config{Service: "gateway", Version: "v0.1.0", Output: io.Discard})
	w := httptest.NewRecorder()
	tel.Metrics().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	for _, want := range []string{`service="gateway",version="v0.1.0"`, "go_goroutines", "process_"} {
		if !strings.Contains(w.Body.String(), want) {
			t.Errorf("GET /metrics has no %s", want)
		}
	}
}

func TestProfilesAreServed(t *testing.T) {
	t.Parallel()
	tel := newTelemetry(t, telemetry.Config{Output: io.Discard})
	w := httptest.NewRecorder()
	tel.Admin().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/debug/pprof/goroutine?debug=1", nil))
	if w.Code != 200 || !strings.Contains(w.Body.String(), "goroutine profile") {
		t.Errorf("GET goroutine profile = %d %.40q, want 200 and the profile", w.Code, w.Body.String())
	}
}
