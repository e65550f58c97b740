package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// Standard variables: opentelemetry.io, "Environment Variable Specification". The exporters read the
// rest (endpoint, headers, certificates), the SDK reads sampler, limits and OTEL_RESOURCE_ATTRIBUTES.
const (
	exporterVariable       = "OTEL_TRACES_EXPORTER"
	disabledVariable       = "OTEL_SDK_DISABLED"
	endpointVariable       = "OTEL_EXPORTER_OTLP_ENDPOINT"
	tracesEndpointVariable = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
	protocolVariable       = "OTEL_EXPORTER_OTLP_PROTOCOL"
	tracesProtocolVariable = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
)

// lookup reads OpenTelemetry's own variables, which are its contract with operators and no flags of Berth.
var lookup = os.LookupEnv //nolint:forbidigo // the exporters and the SDK read the rest of them

// newTracers returns a provider that exports by OTLP if the environment asks for that, else one that
// makes nothing, and what flushes it.
func newTracers(ctx context.Context, cfg Config, log *slog.Logger) (trace.TracerProvider, func(context.Context) error, error) {
	none := func(context.Context) error { return nil }
	wanted, err := tracesWanted()
	if err != nil {
		return nil, nil, err
	}
	if !wanted {
		return noop.NewTracerProvider(), none, nil
	}
	exporter, err := newExporter(ctx)
	if err != nil {
		return nil, nil, err
	}
	described, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "berth-"+cfg.Service), attribute.String("service.version", cfg.Version)),
		resource.WithFromEnv(), resource.WithProcessPID(), resource.WithHost())
	if err != nil {
		// A partial description is better than none.
		log.WarnContext(ctx, "describe process for traces", slog.Any("error", err))
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(loggedExporter{exporter, log}), sdktrace.WithResource(described))
	return provider, provider.Shutdown, nil
}

func tracesWanted() (bool, error) {
	if disabled, _ := lookup(disabledVariable); strings.EqualFold(disabled, "true") {
		return false, nil
	}
	switch exporter, _ := lookup(exporterVariable); exporter {
	case "none":
		return false, nil
	case "otlp":
		return true, nil
	case "":
		return first(tracesEndpointVariable, endpointVariable) != "", nil
	default:
		return false, fmt.Errorf("%s=%q: otlp or none is wanted", exporterVariable, exporter)
	}
}

func newExporter(ctx context.Context) (sdktrace.SpanExporter, error) {
	var client otlptrace.Client
	switch protocol := first(tracesProtocolVariable, protocolVariable); protocol {
	case "grpc":
		client = otlptracegrpc.NewClient()
	case "http/protobuf", "":
		client = otlptracehttp.NewClient()
	default:
		return nil, fmt.Errorf("%s=%q: grpc or http/protobuf is wanted", protocolVariable, protocol)
	}
	exporter, err := otlptrace.New(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("prepare OTLP export: %w; check the OTEL_EXPORTER_OTLP_* variables", err)
	}
	return exporter, nil
}

func first(names ...string) string {
	for _, name := range names {
		if value, ok := lookup(name); ok && value != "" {
			return value
		}
	}
	return ""
}

// loggedExporter logs lost spans here, where they are handled, in place of OpenTelemetry's global log.
type loggedExporter struct {
	sdktrace.SpanExporter
	log *slog.Logger
}

func (e loggedExporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	if err := e.SpanExporter.ExportSpans(ctx, spans); err != nil && !errors.Is(err, context.Canceled) {
		e.log.WarnContext(ctx, "spans lost", slog.Int("spans", len(spans)), slog.Any("error", err))
	}
	return nil
}
