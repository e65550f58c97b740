package api

import (
	"testing"

	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/scheduler/internal/placement"
)

func TestEachTransportMakesAServerSpan(t *testing.T) {
	t.Parallel()
	spans := tracetest.NewInMemoryExporter()
	tracers := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
	t.Cleanup(func() { _ = tracers.Shutdown(t.Context()) })
	h := newHarness(t, allTokens(), placement.Limits{}, func(d *Deps) {
		d.Tracers, d.Propagator = tracers, propagation.TraceContext{}
	})
	for _, transport := range transports {
		spans.Reset()
		if got := h.call(t, transport, scheduler+"ListNodes", "", &schedulerv1.ListNodesRequest{}, &schedulerv1.ListNodesResponse{}); got.Code != "ok" {
			t.Fatalf("ListNodes over %s = %+v", transport, got)
		}
		// The span of gRPC ends after its answer has left.
		for len(spans.GetSpans()) == 0 && t.Context().Err() == nil {
			if err := tracers.ForceFlush(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		found := spans.GetSpans()
		if len(found) != 1 || found[0].SpanKind != trace.SpanKindServer {
			t.Errorf("over %s: %d spans, want one of a server: %v", transport, len(found), found.Snapshots())
		}
	}
}
