// Package httpapi is the gateway's front door. It decides which plane a request is for, hands the data
// plane to the proxy at once, and answers the control plane: who calls, may they, and then one file an
// endpoint. Every exchange ends in the metrics, and in the access log where that is wanted.
//
// What is not here yet is 404 like any unknown path: forks, templates, snapshots and volumes, Twirp
// through the gateway, the events of sessions.
package httpapi

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/labstack/echo/v4"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"berth/pkg/lifecycle"
	"berth/services/gateway/internal/auth"
	"berth/services/gateway/internal/launch"
	"berth/services/gateway/internal/listing"
	"berth/services/gateway/internal/proxy"
	"berth/services/gateway/internal/routecache"
)

// Config is how the API answers.
type Config struct {
	Domains        proxy.Domains
	Origins        []string       // browsers may read answers there; "*" is any
	MaxTimeout     time.Duration  // the longest life a sandbox may be given
	IdleTimeout    time.Duration  // a client's silence in a body that is read here; 0: any
	TrustedProxies []netip.Prefix // fronts whose X-Forwarded-For is believed
}

// Deps are what an API works with.
type Deps struct {
	Keys       *auth.Keys
	Routes     *routecache.Cache
	Forwarder  *proxy.Forwarder
	Launcher   *launch.Launcher
	Scheduler  *launch.Scheduler
	Lister     *listing.Lister
	Nodes      *listing.Store
	Health     *lifecycle.Health
	Access     *AccessLog
	Log        *slog.Logger
	Tracers    trace.TracerProvider
	Propagator propagation.TextMapPropagator
}

// API is the root handler of the public listener.
type API struct {
	Deps
	cfg    Config
	echo   *echo.Echo
	tracer trace.Tracer
}

// New returns the handler.
func New(d Deps, cfg Config) *API {
	a := &API{Deps: d, cfg: cfg, tracer: d.Tracers.Tracer("berth/gateway"), echo: echo.New()}
	a.echo.HTTPErrorHandler = a.onError
	a.echo.Use(a.traced, a.authenticated)
	a.routes()
	return a
}

// endpoint is one call of the control plane. The path is the pattern that proxy.ParseTarget found, as
// text: handlers take ids from that parse, never from a router that decodes.
func (a *API) endpoint(method, pattern string, handle echo.HandlerFunc) {
	a.echo.Add(method, pattern, handle)
}

// routes are the endpoints, each with who calls it and what a second call does in its own file.
func (a *API) routes() {
	for _, path := range []string{"/sandboxes", "/v2/sandboxes", "/sandboxes-cold"} {
		a.endpoint(http.MethodPost, path, a.create)
	}
	a.endpoint(http.MethodGet, "/sandboxes", a.list)
	a.endpoint(http.MethodGet, "/v2/sandboxes", a.list)
	a.endpoint(http.MethodGet, "/nodes", a.listNodes)
	a.endpoint(http.MethodGet, "/nodes/{node_id}", a.getNode)

	const sandbox = "/sandboxes/{sandbox_id}"
	a.endpoint(http.MethodGet, sandbox, a.get)
	a.endpoint(http.MethodDelete, sandbox, a.delete)
	a.endpoint(http.MethodPost, sandbox+"/connect", a.connect)
	a.endpoint(http.MethodPost, "/v2"+sandbox+"/connect", a.connect)
	a.endpoint(http.MethodPost, sandbox+"/pause", a.pause)
	a.endpoint(http.MethodPost, sandbox+"/resume", a.resume)
	a.endpoint(http.MethodPost, sandbox+"/timeout", a.timeout)
	a.endpoint(http.MethodPost, sandbox+"/refreshes", a.refreshes)
	a.endpoint(http.MethodPost, sandbox+"/snapshots", a.pass)
	a.endpoint(http.MethodPut, sandbox+"/network", a.pass)
	a.endpoint(http.MethodPatch, sandbox+"/custom-extension-params", a.pass)
	a.endpoint(http.MethodGet, sandbox+"/custom-extension-params", a.pass)
	a.endpoint(http.MethodGet, sandbox+"/metrics", a.pass)
	a.endpoint(http.MethodGet, sandbox+"/logs", a.pass)
	a.endpoint(http.MethodGet, "/v2"+sandbox+"/logs", a.pass)
}

// ServeHTTP serves one exchange of either plane.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	x := &exchange{ResponseWriter: w, begun: time.Now()}
	x.unread.Store(r.ProtoMajor == 1 && r.ContentLength != 0)
	defer a.end(x, r) // also when the proxy cuts the answer by a panic
	if a.Health.Draining() {
		// Closes an HTTP/1.1 connection after this answer, and tells an HTTP/2 one to go away.
		w.Header().Set("Connection", "close")
	}
	target, err := proxy.ParseTarget(r, a.cfg.Domains)
	if err != nil {
		a.misdirected(x, r, err)
		return
	}
	x.target = target
	switch target.Kind {
	case proxy.KindData:
		x.proxied = true
		a.Forwarder.ServeData(x, r, target)
	case proxy.KindHealth:
		x.quiet = true
		a.health(x, r)
	case proxy.KindMetrics:
		x.quiet = true
		proxy.WriteError(x, r, proxy.Control, target.Refusal(r.Method))
	case proxy.KindOptions:
		x.WriteHeader(http.StatusNoContent)
	case proxy.KindPreflight:
		a.preflight(x, r)
	default:
		a.allowOrigin(w.Header(), r)
		a.control(x, r)
	}
}

// misdirected answers a request that goes nowhere.
func (a *API) misdirected(x *exchange, r *http.Request, err error) {
	told, ok := errors.AsType[*proxy.Error](err)
	if !ok {
		a.fail(x, r, err)
		return
	}
	x.target.Plane = proxy.Data
	if told.Code == "wrong_method" || told.Code == "bad_request" {
		x.target.Plane = proxy.Control
	}
	proxy.WriteError(x, r, x.target.Plane, *told)
}

// health says whether this replica wants requests.
func (a *API) health(x *exchange, r *http.Request) {
	if a.Health.Draining() {
		proxy.WriteError(x, r, proxy.Control, proxy.Error{
			Status: http.StatusServiceUnavailable, Code: "draining", Message: "shutting down", RetryAfter: time.Second,
		})
		return
	}
	x.WriteHeader(http.StatusNoContent)
}

type exchangeKey struct{}

// of returns the exchange that a handler answers.
func of(c echo.Context) *exchange {
	x, ok := c.Request().Context().Value(exchangeKey{}).(*exchange)
	if !ok {
		panic("httpapi: a control-plane handler was called without its exchange")
	}
	return x
}

// control hands a request to echo, whose router sees the pattern in place of the path.
func (a *API) control(x *exchange, r *http.Request) {
	if r.Body != nil {
		r.Body = &counted{r.Body, x}
	}
	ctx := a.Propagator.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
	r = r.WithContext(context.WithValue(ctx, exchangeKey{}, x))
	r.URL = &url.URL{Path: x.target.Route}
	if x.target.Kind == proxy.KindUnknown {
		r.URL.Path = "/"
	}
	x.Header().Set("X-Request-Id", proxy.RequestID(r))
	a.echo.ServeHTTP(x, r)
}

// traced makes the server span of a control-plane call.
func (a *API) traced(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		x, r := of(c), c.Request()
		ctx, span := a.tracer.Start(r.Context(), spanName(r.Method, x.target.Route), trace.WithSpanKind(trace.SpanKindServer))
		defer span.End()
		if id := span.SpanContext().TraceID(); id.IsValid() {
			x.trace = id.String()
		}
		r = r.WithContext(ctx)
		// What nodes get is a child of this span.
		a.Propagator.Inject(ctx, propagation.HeaderCarrier(r.Header))
		c.SetRequest(r)
		if err := next(c); err != nil {
			a.onError(err, c)
		}
		span.SetAttributes(attribute.String("http.request.method", r.Method), attribute.String("http.route", x.target.Route),
			attribute.Int("http.response.status_code", x.status))
		return nil
	}
}

// spanName is subject and verb of a call.
func spanName(method, route string) string {
	if name, known := spanNames[method+" "+route]; known {
		return name
	}
	return "gateway." + route
}

var spanNames = map[string]string{ //nolint:gochecknoglobals // a constant table
	"POST /sandboxes": "sandbox.create", "POST /v2/sandboxes": "sandbox.create", "POST /sandboxes-cold": "sandbox.create",
	"GET /sandboxes": "sandbox.list", "GET /v2/sandboxes": "sandbox.list",
	"GET /sandboxes/{sandbox_id}": "sandbox.get", "DELETE /sandboxes/{sandbox_id}": "sandbox.delete",
	"POST /sandboxes/{sandbox_id}/connect": "sandbox.connect", "POST /v2/sandboxes/{sandbox_id}/connect": "sandbox.connect",
	"POST /sandboxes/{sandbox_id}/pause": "sandbox.pause", "POST /sandboxes/{sandbox_id}/resume": "sandbox.resume",
	"POST /sandboxes/{sandbox_id}/timeout": "sandbox.timeout", "POST /sandboxes/{sandbox_id}/refreshes": "sandbox.refresh",
	"GET /nodes": "node.list", "GET /nodes/{node_id}": "node.get",
}

// authenticated lets a known caller with the scope of the path through. Nothing else is said before
// that, not even that a path does not exist.
func (a *API) authenticated(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		x, r := of(c), c.Request()
		caller, err := a.Keys.Authenticate(r.Context(), r.Header)
		if err != nil {
			return err
		}
		x.caller = caller
		if scope := x.target.Scope; scope != "" && !caller.Allows(scope) {
			told := denied(scope)
			return &told
		}
		return next(c)
	}
}

// onError answers with err what no handler has answered.
func (a *API) onError(err error, c echo.Context) {
	x, r := of(c), c.Request()
	if x.status != 0 {
		a.Log.ErrorContext(r.Context(), "failed after the answer had begun", slog.Any("error", err))
		return
	}
	if _, unrouted := errors.AsType[*echo.HTTPError](err); unrouted {
		refusal := x.target.Refusal(r.Method)
		err = &refusal
	}
	a.fail(x, r, err)
}

// end counts and logs an exchange.
func (a *API) end(x *exchange, r *http.Request) {
	if x.quiet {
		return
	}
	took := time.Since(x.begun)
	if !x.proxied {
		route, source := x.target.Route, x.target.Source
		if route == "" {
			route = "unmatched"
		}
		if source == "" {
			source = proxy.SourceUnknown
		}
		a.Forwarder.ObserveRequest(r, route, source, x.status, took)
	}
	a.Access.note(x, r, took, a.cfg.TrustedProxies)
}

// remote is the client's address: the rightmost one that is not a trusted front's.
func remote(r *http.Request, trusted []netip.Prefix) string {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	client := peer.Addr()
	if len(trusted) == 0 {
		return client.String()
	}
	hops := splitList(strings.Join(r.Header.Values("X-Forwarded-For"), ","))
	for _, hop := range slices.Backward(hops) {
		next, err := netip.ParseAddr(hop)
		if !within(client, trusted) || err != nil {
			break
		}
		client = next
	}
	return client.String()
}

func within(addr netip.Addr, prefixes []netip.Prefix) bool {
	addr = addr.Unmap().WithZone("")
	for _, p := range prefixes {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}
