package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/services/gateway/internal/routecache"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// resolver says where a sandbox is.
type resolver interface {
	Lookup(ctx context.Context, id sandbox.ID) (routecache.Found, error)
	Suspect(ctx context.Context, f routecache.Found) (now routecache.Found, lost bool, err error)
	Recheck(ctx context.Context, id sandbox.ID, atLeast sandbox.Revision) (routecache.Found, error)
	Trusted(address string) bool
}

// Config is how a Forwarder behaves.
type Config struct {
	Limits
	DialTimeout    time.Duration
	LookupTimeout  time.Duration // a route is found, or found again, within this
	TrustedProxies []netip.Prefix
	UnknownStatus  int   // of an unknown sandbox on the data plane; 0: 502
	MaxControlBody int64 // of a streamed body on the control plane
	Debug          bool  // answers say which node and route they came by
	KeepPrefix     bool  // the application sees /proxy of a path that was routed by header
}

// DefaultConfig returns the limits of the design.
func DefaultConfig() Config {
	return Config{
		Limits:      Limits{FirstByte: 600 * time.Second, Idle: 600 * time.Second},
		DialTimeout: defaultDialWithin, LookupTimeout: 2 * time.Second,
		UnknownStatus: http.StatusBadGateway, MaxControlBody: 16 << 20,
	}
}

// Deps is what a Forwarder needs.
type Deps struct {
	Routes   resolver
	Guard    *route.Guard
	NodeKeys []string                                   // the first is sent; a node that refuses it is asked with the next
	IsKey    func(ctx context.Context, key string) bool // tells a valid key of Berth, which no application may see
	Log      *slog.Logger
	Registry prometheus.Registerer // nil: not registered
}

// Forwarder moves exchanges between clients and nodes. Run must run for its limits on silence to
// hold.
type Forwarder struct {
	cfg      Config
	deps     Deps
	nodes    *connections
	open     *registry
	metrics  *metrics
	httpOpen prometheus.Gauge
	wsOpen   prometheus.Gauge
}

// New returns a Forwarder. It starts nothing.
func New(deps Deps, cfg Config) *Forwarder {
	m := newMetrics(deps.Registry)
	return &Forwarder{
		cfg: cfg, deps: deps, nodes: newConnections(deps.Guard, deps.Routes.Trusted, cfg.DialTimeout), open: newRegistry(),
		metrics: m, httpOpen: m.open.WithLabelValues("http"), wsOpen: m.open.WithLabelValues("websocket"),
	}
}

// Run keeps the limits on silence until ctx ends, then returns nil.
func (f *Forwarder) Run(ctx context.Context) error {
	f.open.run(ctx, f.cfg.Limits)
	return nil
}

// Close waits for open exchanges until ctx ends, cuts those that are left, tunnels included, and
// closes the connections to nodes.
func (f *Forwarder) Close(ctx context.Context) error {
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	for f.open.len() > 0 {
		select {
		case <-poll.C:
			continue
		case <-ctx.Done():
		}
		f.open.each(func(x *exchange) { x.end(errDraining) })
		break
	}
	f.nodes.close()
	return nil
}

// ServeData serves a request of the data plane whole, errors included. t is of KindData.
func (f *Forwarder) ServeData(w http.ResponseWriter, r *http.Request, t Target) {
	send := t.Send()
	if f.cfg.KeepPrefix {
		send = "/proxy" + t.Raw
	}
	f.serve(w, r, job{
		plane: Data, source: t.Source, route: dataRoute, sandbox: t.Sandbox, port: t.Port, raw: t.Raw, send: send,
		upgrade: websocketOffer(r),
	})
}

// ControlCall is a request of the control plane that the sandbox's node answers.
type ControlCall struct {
	Target Target
	Found  *routecache.Found // where it is, if the caller has looked it up
	Send   string            // what the node gets; "": Target.Raw
	Body   []byte            // read and checked by the caller; nil: streamed, up to MaxControlBody
	Header http.Header       // set in the end
	// Answered is called with the node's final answer before anything of it goes on. An error is
	// told instead; an Error as it is, anything else as "internal error".
	Answered func(ctx context.Context, f routecache.Found, resp *http.Response) error
}

// ServeControl serves a request whose path names a sandbox: with the node key, and with the same
// retries as the data plane. A redirect is never followed or passed on.
func (f *Forwarder) ServeControl(w http.ResponseWriter, r *http.Request, c ControlCall) {
	send := c.Send
	if send == "" {
		send = c.Target.Raw
	}
	f.serve(w, r, job{
		plane: Control, source: SourcePath, route: c.Target.Route, sandbox: c.Target.Sandbox, raw: c.Target.Raw, send: send,
		fixed: c.Body, whole: c.Body != nil, limit: f.cfg.MaxControlBody, found: c.Found, set: c.Header, answered: c.Answered,
	})
}

// job is one exchange as its caller wants it.
type job struct {
	plane    Plane
	source   Source
	route    string
	sandbox  sandbox.ID
	port     uint16 // 0 on the control plane: no pair
	raw      string
	send     string
	upgrade  string
	fixed    []byte
	whole    bool // fixed is the body
	limit    int64
	found    *routecache.Found
	set      http.Header
	answered func(ctx context.Context, f routecache.Found, resp *http.Response) error
}

// fail returns e as the client of this job is told it.
func (j *job) fail(e Error) *Error {
	e.Sandbox, e.Port = j.sandbox, j.port
	return &e
}

// noter is a client's ResponseWriter that wants to know how its exchange was routed, for the log.
type noter interface {
	Routed(f routecache.Found, retried bool)
}

// serve is one exchange from first byte to last.
func (f *Forwarder) serve(w http.ResponseWriter, r *http.Request, j job) {
	began := time.Now()
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	rc := http.NewResponseController(w)
	x := &exchange{cancel: cancel, unread: func() { _ = rc.SetReadDeadline(time.Unix(1, 0)) }}
	f.open.add(x)
	defer f.open.remove(x)
	f.httpOpen.Inc()
	defer f.httpOpen.Dec()

	status := 0
	defer func() { f.ObserveRequest(r, j.route, j.source, status, time.Since(began)) }()

	a := &attempts{f: f, job: &j, w: w, client: r, x: x}
	if !j.whole && r.Body != nil && r.Body != http.NoBody {
		a.body = newClientBody(r, x)
		if j.limit > 0 {
			a.body.limit = j.limit
			if r.ContentLength > j.limit {
				status = http.StatusRequestEntityTooLarge
				WriteError(w, r, j.plane, TooLarge())
				return
			}
		}
		if r.ProtoMajor == 1 {
			_ = rc.EnableFullDuplex() // a writer without it serves one direction after the other
		}
		defer a.body.leave(rc)
	} else {
		x.set(bodySent)
	}

	resp, failure := a.run(ctx)
	a.stop1xx()
	if n, ok := w.(noter); ok {
		n.Routed(a.found, a.retried)
	}
	if failure != nil {
		if r.Context().Err() != nil && !x.unreadUsed.Load() { // stopping a read ends the context too
			panic(http.ErrAbortHandler) // the client left: there is nobody to tell
		}
		failure.Close = failure.Close || x.state.Load()&bodySent == 0
		status = failure.Status
		f.report(ctx, &j, failure, a.cause)
		WriteError(w, r, j.plane, *failure)
		return
	}
	defer resp.Body.Close()
	status = resp.StatusCode
	if resp.StatusCode == http.StatusSwitchingProtocols {
		f.wsOpen.Inc()
		defer f.wsOpen.Dec()
		in, out, err := tunnel(ctx, w, resp, j.upgrade, x)
		f.metrics.dataIn.Add(float64(in))
		f.metrics.dataOut.Add(float64(out))
		if err != nil && !errors.Is(err, errClientGone) {
			f.deps.Log.WarnContext(ctx, "tunnel could not be opened", slog.Any("error", err))
			panic(http.ErrAbortHandler)
		}
		return
	}
	if err := f.pass(w, r, resp, a); err != nil {
		if errors.Is(err, errClientGone) || r.Context().Err() != nil {
			status = 0
		}
		f.deps.Log.DebugContext(ctx, "answer was cut", slog.Any("sandbox", j.sandbox), slog.Any("error", err))
		// The client must see a cut, not an end: no last chunk, or a stream reset.
		panic(http.ErrAbortHandler)
	}
}

// report logs a failure of the gateway or a node once; a client's own is debug.
func (f *Forwarder) report(ctx context.Context, j *job, e *Error, cause error) {
	level := slog.LevelDebug
	if e.Status >= http.StatusInternalServerError && e.Code != "unknown_sandbox" {
		level = slog.LevelWarn
	}
	f.deps.Log.Log(ctx, level, "request failed", slog.String("plane", j.plane.String()), slog.Any("sandbox", j.sandbox),
		slog.Int("status", e.Status), slog.String("code", e.Code), slog.Any("error", cause))
}

// pass sends a final answer on as it is: status, header, body, trailers.
func (f *Forwarder) pass(w http.ResponseWriter, r *http.Request, resp *http.Response, a *attempts) error {
	h := w.Header()
	passHeader(h, resp.Header)
	KeepUntyped(h)
	for name := range resp.Trailer {
		if !forbiddenTrailer(name) {
			h["Trailer"] = append(h["Trailer"], name)
		}
	}
	announced := h["Trailer"]
	if f.cfg.Debug {
		h.Set("X-Agentenv-Node-Id", string(a.found.Node.ID))
		h.Set("Berth-Route", a.describe())
	}
	if a.x.state.Load()&bodySent == 0 && r.ProtoMajor == 1 {
		// The answer came before the body's end. If it also ends before, what is left of the body
		// must never be read as another request.
		h["Connection"] = []string{"close"}
	}
	if resp.ContentLength < 0 && r.ProtoMajor == 1 && r.ProtoMinor > 0 {
		// Else the server gives an answer without bytes a length, and its trailers are lost.
		h["Transfer-Encoding"] = []string{"chunked"}
	}
	stream, eachChunk := streams(resp)
	a.x.touch()
	if stream {
		a.x.set(answering | streaming)
	} else {
		a.x.set(answering)
	}
	w.WriteHeader(resp.StatusCode)
	if r.Method == http.MethodHead {
		return nil
	}
	n, err := copyAnswer(w, resp, a.x, eachChunk)
	if a.job.plane == Data {
		f.metrics.dataOut.Add(float64(n))
	}
	if err != nil {
		return err
	}
	passTrailers(h, resp.Trailer, announced)
	return nil
}

// KeepUntyped keeps the server from guessing a Content-Type for an answer whose sender named none.
func KeepUntyped(h http.Header) {
	if _, typed := h["Content-Type"]; !typed {
		h["Content-Type"] = nil
	}
}

// passTrailers sets the trailers of an answer that has ended; those that were not announced carry
// net/http's prefix.
func passTrailers(h, trailer http.Header, announced []string) {
	for name, values := range trailer {
		if forbiddenTrailer(name) || len(values) == 0 {
			continue
		}
		key := http.TrailerPrefix + name
		for _, known := range announced {
			if known == name {
				key = name
			}
		}
		h[key] = values
	}
}
