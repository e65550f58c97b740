package twirpkit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/twitchtv/twirp"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

const (
	maxBodyBytes          = 4 << 20
	defaultRequestTimeout = 10 * time.Second
	maxRequestTimeout     = 5 * time.Minute
)

// ServerOptions says how Server treats calls. The zero value works.
type ServerOptions struct {
	Log            *slog.Logger                  // nil: nothing is logged
	Tracers        trace.TracerProvider          // nil: no spans
	Propagator     propagation.TextMapPropagator // nil: W3C trace context
	DefaultTimeout time.Duration                 // of a call that names none; zero: 10 s
}

// Server returns h, which serves Twirp paths, behind the limits of every Berth listener: a body of
// 4 MiB, a deadline from the caller's X-Twirp-Timeout-Ms (at most 5 min) or DefaultTimeout, a server
// span, and a log line at debug. What it refuses is a Twirp error in JSON: an oversized body is
// resource_exhausted, a body that cannot be read or a bad timeout is malformed. Bodies are read whole
// before h is called, so a slow client costs memory and no work.
func Server(h http.Handler, o ServerOptions) http.Handler {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Tracers == nil {
		o.Tracers = noop.NewTracerProvider()
	}
	if o.Propagator == nil {
		o.Propagator = propagation.TraceContext{}
	}
	if o.DefaultTimeout <= 0 {
		o.DefaultTimeout = defaultRequestTimeout
	}
	limited := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begun := time.Now()
		recorded := &statusWriter{ResponseWriter: w, status: http.StatusOK}
		serveLimited(recorded, r, h, o)
		o.Log.DebugContext(r.Context(), "call served", slog.String("rpc", spanName(r.URL.Path)),
			slog.Int("status", recorded.status), slog.Duration("took", time.Since(begun)))
	})
	return otelhttp.NewHandler(limited, "twirp", otelhttp.WithTracerProvider(o.Tracers),
		otelhttp.WithPropagators(o.Propagator),
		otelhttp.WithSpanNameFormatter(func(_ string, r *http.Request) string { return spanName(r.URL.Path) }))
}

func serveLimited(w http.ResponseWriter, r *http.Request, h http.Handler, o ServerOptions) {
	timeout, err := requestTimeout(r.Header.Get(TimeoutHeader), o.DefaultTimeout)
	if err != nil {
		refuse(w, twirp.NewError(twirp.Malformed, err.Error()))
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBodyBytes))
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		refuse(w, twirp.NewError(twirp.ResourceExhausted, fmt.Sprintf("request body is larger than %d bytes", maxBodyBytes)))
		return
	}
	if err != nil {
		refuse(w, twirp.NewError(twirp.Malformed, "request body could not be read"))
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	defer cancel()
	r = r.WithContext(ctx)
	r.Body = io.NopCloser(bytes.NewReader(body))
	h.ServeHTTP(w, r)
}

// requestTimeout returns the time a call may take: what text says in milliseconds, cut to 5 min, or
// fallback where it is empty.
func requestTimeout(text string, fallback time.Duration) (time.Duration, error) {
	if text == "" {
		return fallback, nil
	}
	ms, err := strconv.ParseUint(text, 10, 63)
	if err != nil || ms == 0 {
		return 0, fmt.Errorf("%s: a whole number of milliseconds from 1 is wanted", TimeoutHeader)
	}
	if ms > uint64(maxRequestTimeout.Milliseconds()) {
		return maxRequestTimeout, nil
	}
	return time.Duration(ms) * time.Millisecond, nil
}

func refuse(w http.ResponseWriter, err twirp.Error) {
	// The only error is that of a client that left.
	_ = twirp.WriteError(w, err)
}

// statusWriter remembers the status for the log line.
type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
