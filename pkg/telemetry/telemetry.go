// Package telemetry makes the logs, traces and metrics of one process.
//
// Logs are slog: lines for people on a terminal, JSON otherwise. Traces leave the process only when a
// standard OTEL_* variable asks for it. Metrics are a Prometheus registry of the process's own; nothing
// is registered globally, so two in one test do not meet.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// Config says what New makes.
type Config struct {
	Service   string    // the name in logs and traces, such as "scheduler"
	Version   string    // of the build
	LogLevel  string    // debug, info, warn, error; empty: info
	LogFormat string    // auto, console, json; empty: auto, which is console on a terminal
	Output    io.Writer // nil: standard error
}

// Telemetry is what a process reports with. Its fields may be used at the same time, until Close.
type Telemetry struct {
	Log        *slog.Logger
	Level      *slog.LevelVar // of Log; PUT /log-level sets it
	Registry   *prometheus.Registry
	Tracers    trace.TracerProvider // makes nothing unless OTEL_* asked for traces
	Propagator propagation.TextMapPropagator

	closeTraces func(context.Context) error
}

// New returns the telemetry of one process. An unknown level, format or OTEL_* choice is an error that
// names variable and value; all such mistakes are told at once. It reaches nobody: an exporter that
// cannot send loses spans and says so in the log.
func New(ctx context.Context, cfg Config) (*Telemetry, error) {
	level, levelErr := parseLevel(cfg.LogLevel)
	format, formatErr := parseFormat(cfg.LogFormat)
	if cfg.Output == nil {
		cfg.Output = os.Stderr
	}
	levelVar := new(slog.LevelVar)
	levelVar.Set(level)
	log := slog.New(withTrace{newHandler(cfg.Output, format, levelVar)})
	if format != formatConsole {
		log = log.With(slog.String("service", cfg.Service))
	}

	tracers, closeTraces, traceErr := newTracers(ctx, cfg, log)
	if err := errors.Join(levelErr, formatErr, traceErr); err != nil {
		return nil, err
	}
	registry := prometheus.NewRegistry()
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "berth_build_info",
		Help:        "Always 1; the labels say which build runs.",
		ConstLabels: prometheus.Labels{"service": cfg.Service, "version": cfg.Version, "go": runtime.Version()},
	})
	build.Set(1)
	registry.MustRegister(build, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return &Telemetry{
		Log: log, Level: levelVar, Registry: registry, Tracers: tracers,
		Propagator:  propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}),
		closeTraces: closeTraces,
	}, nil
}

// Metrics serves the registry in Prometheus' text format.
func (t *Telemetry) Metrics() http.Handler {
	return promhttp.HandlerFor(t.Registry, promhttp.HandlerOpts{Registry: t.Registry})
}

// Close sends what is left of the traces. It returns within ctx.
func (t *Telemetry) Close(ctx context.Context) error {
	if err := t.closeTraces(ctx); err != nil {
		return fmt.Errorf("flush traces: %w", err)
	}
	return nil
}
