// Package httpapi is the node's HTTP contract: the control plane of the E2B API for the sandboxes of this node, and the data
// plane under /proxy. Its callers are gateways. The control plane asks for a node key; the data plane does not, for there X-API-Key
// belongs to the application, and a sandbox that is private has a token of its own. So the port is for gateways' networks only.
package httpapi

import (
	"crypto/sha256"
	"crypto/subtle"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"berth/services/internal/sandbox"
	"berth/services/nodeagent/internal/journal"
	"berth/services/nodeagent/internal/sandboxes"
)

// Deps is what an API works with.
type Deps struct {
	NodeID     string
	Keys       []string // each is accepted; at least one
	Domain     string   // told to clients; may be empty
	Sandboxes  *sandboxes.Manager
	Fences     *journal.Fences
	Tracers    trace.TracerProvider
	Propagator propagation.TextMapPropagator
	Metrics    *Metrics
	Log        *slog.Logger
}

// API serves the contract. It reads paths as they stand in the request line: a path is never cleaned, redirected or
// decoded but for the id segment.
type API struct {
	Deps
	keys   [][sha256.Size]byte
	tracer trace.Tracer
}

// New returns the handler.
func New(d Deps) *API {
	a := &API{Deps: d, tracer: d.Tracers.Tracer("berth/nodeagent")}
	for _, key := range d.Keys {
		a.keys = append(a.keys, sha256.Sum256([]byte(key)))
	}
	return a
}

// isKey reports whether key is one of ours, in a time that does not depend on how much of it is right.
func (a *API) isKey(key string) bool {
	digest, found := sha256.Sum256([]byte(key)), 0
	for _, k := range a.keys {
		found |= subtle.ConstantTimeCompare(digest[:], k[:])
	}
	return found == 1
}

// authorized reports whether the request shows a node key, and only that.
func (a *API) authorized(r *http.Request) bool {
	keys := r.Header["X-Api-Key"]
	return len(keys) == 1 && a.isKey(keys[0])
}

func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path, _, _ := strings.Cut(r.RequestURI, "?")
	if path == "/health" {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	if isDataPlane(r.RequestURI) {
		a.serveData(w, r)
		return
	}
	if !a.authorized(r) {
		w.Header().Set("WWW-Authenticate", "ApiKey")
		writeError(w, apiError{Code: http.StatusUnauthorized, Message: "unauthorized", ErrorCode: "unauthenticated"})
		return
	}
	a.serveControl(w, r, path)
}

// call is one control-plane call.
type call struct {
	name     string // of the span and the metric
	mutating bool
	serve    func(w http.ResponseWriter, r *http.Request, id sandbox.ID)
}

// route returns the call for a method and path segments, the id segment still encoded. known: the path exists, for other
// methods.
func (a *API) route(method string, segments []string) (c call, idSegment string, known bool) {
	versioned := len(segments) > 0 && segments[0] == "v2"
	if versioned {
		segments = segments[1:]
	}
	if len(segments) == 1 && segments[0] == "sandboxes-cold" && !versioned {
		return pick(method, map[string]call{http.MethodPost: {"create", false, a.create}})
	}
	if len(segments) == 0 || segments[0] != "sandboxes" {
		return call{}, "", false
	}
	if len(segments) == 1 {
		return pick(method, map[string]call{
			http.MethodPost: {"create", false, a.create},
			http.MethodGet:  {"list", false, a.list},
		})
	}
	idSegment = segments[1]
	var calls map[string]call
	if len(segments) == 2 && !versioned {
		calls = map[string]call{
			http.MethodGet:    {"get", false, a.get},
			http.MethodDelete: {"delete", true, a.delete},
		}
	}
	if len(segments) == 3 {
		verbs := map[string]call{"connect": {"connect", true, a.connect}}
		if !versioned {
			verbs["pause"] = call{"pause", true, a.pause}
			verbs["resume"] = call{"resume", true, a.resume}
			verbs["timeout"] = call{"timeout", true, a.timeout}
			verbs["refreshes"] = call{"refreshes", true, a.refreshes}
		}
		if c, found := verbs[segments[2]]; found {
			calls = map[string]call{http.MethodPost: c}
		}
	}
	c, _, known = pick(method, calls)
	return c, idSegment, known
}

func pick(method string, calls map[string]call) (call, string, bool) {
	return calls[method], "", len(calls) > 0
}

func (a *API) serveControl(w http.ResponseWriter, r *http.Request, path string) {
	segments := strings.Split(strings.TrimPrefix(path, "/"), "/")
	c, idSegment, known := a.route(r.Method, segments)
	switch {
	case !known:
		writeError(w, apiError{Code: http.StatusNotFound, Message: "route not found: " + r.Method + " " + path, ErrorCode: "unknown_route"})
		return
	case c.serve == nil:
		writeError(w, apiError{Code: http.StatusMethodNotAllowed, Message: "method not allowed", ErrorCode: "wrong_method"})
		return
	}
	ctx := a.Propagator.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
	ctx, span := a.tracer.Start(ctx, "sandbox."+c.name, trace.WithSpanKind(trace.SpanKindServer))
	defer span.End()
	r = r.WithContext(ctx)
	recorded := &statusWriter{ResponseWriter: w, status: http.StatusOK}
	defer a.Metrics.call(c.name, recorded)()

	var id sandbox.ID
	if idSegment != "" {
		var found bool
		if id, found = parseSegment(idSegment); !found {
			a.refuse(recorded, r, sandbox.ID(idSegment), sandboxes.ErrNotFound)
			return
		}
		if err := a.checkRevision(r, id, c.mutating); err != nil {
			a.refuse(recorded, r, id, err)
			return
		}
	}
	c.serve(recorded, r, id)
	span.SetAttributes(attribute.Int("http.response.status_code", recorded.status), attribute.String("sandbox", string(id)))
}

// parseSegment decodes an id segment once. What is then no sandbox id exists nowhere.
func parseSegment(segment string) (sandbox.ID, bool) {
	text, err := url.PathUnescape(segment)
	if err != nil {
		return "", false
	}
	id, err := sandbox.ParseID(text)
	return id, err == nil
}

// checkRevision refuses a request that came by an old route. Of an unknown sandbox nothing is kept.
func (a *API) checkRevision(r *http.Request, id sandbox.ID, mutating bool) error {
	text := r.Header.Get("Berth-Route-Revision")
	if text == "" {
		return nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 1 {
		return badf("Berth-Route-Revision is not a revision")
	}
	if _, err := a.Sandboxes.Get(id); err != nil {
		return nil //nolint:nilerr // the call itself says so, in its own form
	}
	if mutating {
		return a.Fences.PassMutation(id, sandbox.Revision(n))
	}
	return a.Fences.Pass(id, sandbox.Revision(n))
}

type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
