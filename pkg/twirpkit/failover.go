// Package twirpkit has what every Twirp call of Berth needs beside the generated code: clients that go
// on to the next replica, deadlines that travel as the time left, traces and limits.
package twirpkit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// TimeoutHeader carries the milliseconds a caller still waits. Never a time of day: clocks differ.
const TimeoutHeader = "X-Twirp-Timeout-Ms"

const (
	dialTimeout     = 2 * time.Second
	keepAlive       = 15 * time.Second
	idleConnTimeout = 90 * time.Second
	maxIdlePerHost  = 64
)

// FailoverOptions says how a Failover calls. The zero value works.
type FailoverOptions struct {
	Token      string                        // sent as "Authorization: Bearer"; empty: none
	Transport  http.RoundTripper             // nil: one with short dials and kept connections
	Tracers    trace.TracerProvider          // nil: no spans
	Propagator propagation.TextMapPropagator // nil: W3C trace context
}

// Failover is an HTTP client for equal replicas. A dial that fails sent nothing, so the same request
// with the same body goes to the next address; any other failure is the caller's, who alone knows
// whether the call may run twice, and says so with Repeatable. It remembers the address that worked
// last, and passes over one that let a deadline pass in silence. Redirects are not followed. It may be
// used at the same time, and satisfies the HTTPClient of generated Twirp code.
type Failover struct {
	bases  []*url.URL
	token  string
	client *http.Client
	idle   http.Client  // of the transport below the spans, which do not pass CloseIdleConnections on
	last   atomic.Int64 // index of the address that worked last
}

// NewFailover returns a client for urls, each with scheme http or https, a host and perhaps a path. All
// mistakes in them are told at once.
func NewFailover(urls []string, o FailoverOptions) (*Failover, error) {
	if len(urls) == 0 {
		return nil, errors.New("no address; give at least one URL like http://127.0.0.1:9091")
	}
	f := &Failover{token: o.Token}
	var errs []error
	for _, text := range urls {
		base, err := parseBase(text)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		f.bases = append(f.bases, base)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if o.Transport == nil {
		o.Transport = newTransport()
	}
	if o.Tracers == nil {
		o.Tracers = noop.NewTracerProvider()
	}
	if o.Propagator == nil {
		o.Propagator = propagation.TraceContext{}
	}
	f.idle.Transport = o.Transport
	f.client = &http.Client{
		Transport: otelhttp.NewTransport(o.Transport, otelhttp.WithTracerProvider(o.Tracers),
			otelhttp.WithPropagators(o.Propagator),
			otelhttp.WithSpanNameFormatter(func(_ string, r *http.Request) string { return spanName(r.URL.Path) })),
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return f, nil
}

func parseBase(text string) (*url.URL, error) {
	text = strings.TrimSpace(text)
	base, err := url.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("address %q: a URL like http://127.0.0.1:9091 is wanted", text)
	}
	if base.Scheme != "http" && base.Scheme != "https" || base.Host == "" || base.User != nil ||
		base.RawQuery != "" || base.Fragment != "" {
		return nil, fmt.Errorf("address %q: a URL like http://127.0.0.1:9091 is wanted", base.Redacted())
	}
	base.Path = strings.TrimSuffix(base.Path, "/")
	return base, nil
}

func newTransport() *http.Transport {
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: dialTimeout, KeepAlive: keepAlive}).DialContext,
		MaxIdleConnsPerHost: maxIdlePerHost,
		IdleConnTimeout:     idleConnTimeout,
		TLSHandshakeTimeout: dialTimeout,
		ForceAttemptHTTP2:   true,
	}
}

// Base is the base URL to give to a generated client. Do replaces it by the address it calls.
func (f *Failover) Base() string { return f.bases[0].String() }

type repeatableKey struct{}

// Repeatable marks the calls made with the returned context as harmless when they run twice, for they
// carry an id or change nothing. Such a call goes on, once more than there are addresses at most, also
// when a connection breaks before an answer has come, as it does when a replica is killed.
func Repeatable(ctx context.Context) context.Context {
	return context.WithValue(ctx, repeatableKey{}, true)
}

// Do sends req to the address that worked last and, as long as dials fail, to the others in turn. It
// adds the token and the time left of req's context, a little less than that, so that the server can
// still say what it was doing. The error is that of the last address tried.
func (f *Failover) Do(req *http.Request) (*http.Response, error) {
	if err := bufferBody(req); err != nil {
		return nil, err
	}
	first, tries := f.last.Load(), len(f.bases)
	repeatable := req.Context().Value(repeatableKey{}) != nil
	if repeatable {
		tries++ // the first may have met a kept connection that had just died
	}
	var lastErr error
	for i := range tries {
		index := (first + int64(i)) % int64(len(f.bases))
		try, err := f.attempt(req, f.bases[index])
		if err != nil {
			return nil, err
		}
		resp, err := f.client.Do(try)
		if err == nil {
			f.last.Store(index)
			return resp, nil
		}
		lastErr = err
		if errors.Is(req.Context().Err(), context.DeadlineExceeded) {
			// It is there and silent. The others are its equals: the next call begins with one of them.
			f.last.CompareAndSwap(index, (index+1)%int64(len(f.bases)))
		}
		if req.Context().Err() != nil || !Unsent(err) && !repeatable {
			return nil, err
		}
	}
	if len(f.bases) > 1 {
		return nil, fmt.Errorf("none of %d addresses answers: %w", len(f.bases), lastErr)
	}
	return nil, lastErr
}

// CloseIdleConnections closes the connections that no call uses.
func (f *Failover) CloseIdleConnections() { f.idle.CloseIdleConnections() }

// attempt returns req for one address, with a body of its own.
func (f *Failover) attempt(req *http.Request, base *url.URL) (*http.Request, error) {
	try := req.Clone(req.Context())
	try.URL.Scheme, try.URL.Host, try.Host = base.Scheme, base.Host, ""
	if own := f.bases[0].Path; own != base.Path {
		try.URL.Path = base.Path + strings.TrimPrefix(try.URL.Path, own)
		try.URL.RawPath = ""
	}
	if req.GetBody != nil {
		body, err := req.GetBody()
		if err != nil {
			return nil, fmt.Errorf("read request body again: %w", err)
		}
		try.Body = body
	}
	if f.token != "" && try.Header.Get("Authorization") == "" {
		try.Header.Set("Authorization", "Bearer "+f.token)
	}
	if left, ok := timeLeft(req.Context()); ok && try.Header.Get(TimeoutHeader) == "" {
		try.Header.Set(TimeoutHeader, strconv.FormatInt(max(1, left.Milliseconds()), 10))
	}
	return try, nil
}

// bufferBody gives req a body of known length that can be read again. Known, because the transport then
// writes head and body at once, and a connection that died before it is noticed as nothing written.
func bufferBody(req *http.Request) error {
	if req.Body == nil || req.Body == http.NoBody || req.GetBody != nil {
		return nil
	}
	text, err := io.ReadAll(req.Body)
	if err != nil {
		return fmt.Errorf("read request body: %w", err)
	}
	if err := req.Body.Close(); err != nil {
		return fmt.Errorf("close request body: %w", err)
	}
	req.ContentLength = int64(len(text))
	req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(text)), nil }
	return nil
}

// timeLeft is what a call may tell its server: the time left, less a tenth and at most 50 ms.
func timeLeft(ctx context.Context) (time.Duration, bool) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return 0, false
	}
	left := time.Until(deadline)
	return left - min(left/10, 50*time.Millisecond), true
}

// Unsent reports whether err came from a dial, so that no byte of the request has left.
func Unsent(err error) bool {
	opErr, ok := errors.AsType[*net.OpError](err)
	return ok && opErr.Op == "dial"
}

// spanName is "scheduler.v1.Scheduler/Schedule" for its Twirp path.
func spanName(path string) string {
	if _, name, ok := strings.Cut(path, "/twirp/"); ok {
		return name
	}
	return strings.TrimPrefix(path, "/")
}
