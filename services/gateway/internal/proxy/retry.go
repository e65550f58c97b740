package proxy

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"berth/services/gateway/internal/routecache"
	"berth/services/internal/sandbox"
)

const (
	headerRevision    = "Berth-Route-Revision"
	headerIncarnation = "Berth-Incarnation"
	headerNode        = "Berth-Node"
)

// lastStatus is the highest status that can be passed on: net/http takes three digits.
const lastStatus = 999

// attempts sends one exchange to the sandbox's node, twice at most.
type attempts struct {
	f      *Forwarder
	job    *job
	w      http.ResponseWriter
	client *http.Request
	x      *exchange
	body   *clientBody // nil: none, or job.fixed
	found  routecache.Found
	cause  error // of the failure, for the log

	mu      sync.Mutex // of w, while 1xx answers may come
	no1xx   bool
	retried bool
}

// run returns the node's final answer, or what the client is to be told.
func (a *attempts) run(ctx context.Context) (*http.Response, *Error) {
	if failure := a.lookup(ctx); failure != nil {
		return nil, failure
	}
	out := outgoing{
		client: a.client, raw: a.job.raw, upgrade: a.job.upgrade, trusted: a.f.cfg.TrustedProxies,
		keepKey: func(values []string) []string { return a.f.keepKey(ctx, a.job.plane, values) },
		sandbox: a.job.sandbox, port: a.job.port,
	}
	header := out.header()
	maps.Copy(header, a.job.set)
	for key := 0; ; {
		if a.job.plane == Control && len(a.f.deps.NodeKeys) > 0 {
			header["X-Api-Key"] = []string{a.f.deps.NodeKeys[key]}
		}
		resp, err := a.send(ctx, header)
		if err != nil {
			if again, failure := a.afterError(ctx, err); !again {
				return nil, failure
			}
			header = maps.Clone(header) // the first attempt may still read its own
			continue
		}
		verdict := readMark(a.found.Node, resp)
		switch {
		case verdict.stale:
			a.x.abandons()
			discard(resp)
			if failure := a.afterStale(ctx, verdict.revision); failure != nil {
				return nil, failure
			}
			header = maps.Clone(header)
			continue
		case a.job.plane == Control && resp.StatusCode == http.StatusUnauthorized && key+1 < len(a.f.deps.NodeKeys) && a.canRepeat():
			a.x.abandons()
			discard(resp)
			key++
			header = maps.Clone(header)
			continue
		}
		if failure := a.judge(ctx, resp); failure != nil {
			discard(resp)
			return nil, failure
		}
		if a.body != nil {
			a.body.forget()
			close(a.body.answered)
		}
		return resp, nil
	}
}

func (a *attempts) lookup(ctx context.Context) *Error {
	if a.job.found != nil {
		a.found = *a.job.found
		return nil
	}
	// A hit needs no deadline, and most are hits: the cache limits its own reads.
	found, err := a.f.deps.Routes.Lookup(ctx, a.job.sandbox)
	if err != nil {
		return a.routeFailure(ctx, err)
	}
	a.found = found
	return nil
}

// routeFailure is what a client is told when its route is not known.
func (a *attempts) routeFailure(ctx context.Context, err error) *Error {
	a.cause = err
	if errors.Is(err, sandbox.ErrNotFound) {
		e := UnknownSandbox(a.job.plane)
		if a.job.plane == Data && a.f.cfg.UnknownStatus != 0 {
			e.Status = a.f.cfg.UnknownStatus
		}
		return a.job.fail(e)
	}
	if failure := a.ended(ctx); failure != nil {
		return failure
	}
	return a.job.fail(RoutesUnavailable())
}

// send makes one attempt.
func (a *attempts) send(ctx context.Context, header http.Header) (*http.Response, error) {
	n := a.found.Node
	if n.Revisions {
		header[headerRevision] = []string{strconv.FormatInt(int64(a.found.Revision), 10)}
		header[headerIncarnation] = []string{strconv.FormatInt(int64(a.found.Incarnation), 10)}
	} else {
		delete(header, headerRevision)
		delete(header, headerIncarnation)
	}
	out := &http.Request{
		Method: a.client.Method, Host: a.client.Host, Header: header,
		URL:   &url.URL{Scheme: n.Scheme, Host: n.Address, Opaque: a.job.send},
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
	}
	switch {
	case a.job.whole:
		out.ContentLength = int64(len(a.job.fixed))
		if len(a.job.fixed) > 0 {
			out.Body = fixedBody(a.job.fixed)
			// Only where no byte was written the transport asks for it again.
			out.GetBody = func() (io.ReadCloser, error) { return fixedBody(a.job.fixed), nil }
		}
	case a.body != nil:
		out.ContentLength = a.client.ContentLength
		out.Trailer = http.Header{}
		for name := range a.client.Trailer {
			if !forbiddenTrailer(name) {
				out.Trailer[name] = nil // announced
			}
		}
		body, err := a.body.reader(out.Trailer)
		if err != nil {
			return nil, err
		}
		out.Body = body
		switch a.client.Method {
		case http.MethodGet, http.MethodHead, http.MethodOptions:
		default:
			// Only where no byte was written the transport asks for the body again.
			out.GetBody = func() (io.ReadCloser, error) { return a.body.reader(out.Trailer) }
		}
	}
	trace := &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) {
			if c := asNodeConn(info.Conn); c != nil {
				a.x.uses(c)
			}
		},
		GotFirstResponseByte: func() { a.x.answered.Store(true) },
		Got1xxResponse:       a.pass1xx,
	}
	began := time.Now()
	resp, err := a.f.nodes.roundTrip(n, out.WithContext(httptrace.WithClientTrace(ctx, trace)))
	a.observe(resp, err, time.Since(began))
	return resp, err
}

func (a *attempts) observe(resp *http.Response, err error, took time.Duration) {
	if err == nil && a.job.plane == Data && resp.StatusCode/100 == 2 {
		a.f.metrics.dataUpstream.Observe(took.Seconds())
		return
	}
	status := "error"
	if err == nil {
		status = statusLabel(resp.StatusCode)
	}
	a.f.metrics.upstream.WithLabelValues(a.job.route, status).Observe(took.Seconds())
}

// afterError decides about an attempt without an answer: once more, or what the client is told.
func (a *attempts) afterError(ctx context.Context, err error) (again bool, failure *Error) {
	a.cause = err
	if failure := a.clientFailure(ctx); failure != nil {
		return false, failure
	}
	switch {
	case errors.Is(err, errForgotten): // while the first attempt was given up, too much went by
		return false, a.job.fail(RoutesUnavailable())
	case !NothingSent(err):
		return false, a.job.fail(NodeUnreachable())
	}
	found, lost, routeErr := a.f.deps.Routes.Suspect(ctx, a.found)
	if routeErr != nil {
		return false, a.routeFailure(ctx, routeErr)
	}
	moved := found.Node.Address != a.found.Node.Address
	if a.retried || lost && !moved {
		if lost && !moved {
			return false, a.job.fail(NodeLost())
		}
		return false, a.job.fail(NodeUnreachable())
	}
	a.found, a.retried = found, true
	a.f.metrics.retries.WithLabelValues("dial").Inc()
	return true, nil
}

// afterStale reads the route until it is at what the node knows.
func (a *attempts) afterStale(ctx context.Context, atLeast sandbox.Revision) *Error {
	if a.retried || !a.canRepeat() {
		return a.job.fail(RoutesUnavailable())
	}
	found, err := a.f.deps.Routes.Recheck(ctx, a.job.sandbox, atLeast)
	if err != nil {
		return a.routeFailure(ctx, err)
	}
	a.found, a.retried = found, true
	a.f.metrics.retries.WithLabelValues("stale").Inc()
	return nil
}

func (a *attempts) canRepeat() bool { return a.body == nil || a.body.repeatable() }

// clientFailure is what a client is told whose own doing ended the attempt, nil where it was not.
func (a *attempts) clientFailure(ctx context.Context) *Error {
	if failure := a.ended(ctx); failure != nil {
		return failure
	}
	if a.body == nil {
		return nil
	}
	switch err := a.body.failed(); {
	case errors.Is(err, errTooLarge):
		return a.job.fail(TooLarge())
	case err != nil:
		a.cause = err
		return a.job.fail(UnreadBody())
	}
	return nil
}

// ended is what a client is told when the gateway has ended the exchange.
func (a *attempts) ended(ctx context.Context) *Error {
	if ctx.Err() == nil {
		return nil
	}
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errClientSilent):
		return a.job.fail(ClientTimeout())
	case errors.Is(cause, errNodeSilent):
		return a.job.fail(NodeTimeout())
	case errors.Is(cause, errDraining):
		return a.job.fail(Error{Status: http.StatusServiceUnavailable, Code: "draining", Message: "shutting down", RetryAfter: time.Second})
	case a.x.unreadUsed.Load():
		return nil // it was the node that ended it: reading the client had to be stopped
	}
	return a.job.fail(Internal()) // the client left, and is not told
}

// judge returns what is told instead of an answer that may not go on.
func (a *attempts) judge(ctx context.Context, resp *http.Response) *Error {
	if resp.StatusCode == http.StatusSwitchingProtocols && !switchesAsAsked(a.job.upgrade, resp) {
		return a.job.fail(BadAnswer("unexpected protocol switch"))
	}
	if resp.StatusCode < http.StatusContinue || resp.StatusCode > lastStatus {
		return a.job.fail(BadAnswer("failed to read upstream response"))
	}
	if a.job.plane == Data {
		return nil
	}
	switch resp.StatusCode {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		// Whoever follows redirects behind a control plane is a way into its network.
		return a.job.fail(BadAnswer("failed to read upstream response"))
	case http.StatusUnauthorized, http.StatusForbidden:
		a.cause = errors.New("the node refuses the node key")
		return a.job.fail(Error{Status: http.StatusBadGateway, Code: "scheduler_error", Message: "scheduler error"})
	}
	if a.job.answered == nil {
		return nil
	}
	err := a.job.answered(ctx, a.found, resp)
	if err == nil {
		return nil
	}
	a.cause = err
	if told, ok := errors.AsType[*Error](err); ok {
		return a.job.fail(*told)
	}
	return a.job.fail(Internal())
}

// keepKey returns what of a client's X-API-Key goes on to the node: on the data plane the
// application's own, never a key of ours.
func (f *Forwarder) keepKey(ctx context.Context, p Plane, values []string) []string {
	if p == Control {
		return nil
	}
	var kept []string
	for _, value := range values {
		if !f.deps.IsKey(ctx, value) {
			kept = append(kept, value)
		}
	}
	return kept
}

// pass1xx sends a 1xx answer on. 100 is not: net/http sends its own when the body is first read.
func (a *attempts) pass1xx(code int, header textproto.MIMEHeader) error {
	a.x.answered.Store(false)
	if code == http.StatusContinue {
		if a.body != nil {
			a.body.ask()
		}
		return nil
	}
	if !a.client.ProtoAtLeast(1, 1) {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.no1xx {
		return nil
	}
	passed := make(http.Header, len(header))
	passHeader(passed, http.Header(header))
	h := a.w.Header()
	maps.Copy(h, passed)
	a.w.WriteHeader(code)
	for name := range passed {
		delete(h, name)
	}
	a.x.touch()
	return nil
}

// stop1xx ends the passing of 1xx answers: the final one is about to be written.
func (a *attempts) stop1xx() {
	a.mu.Lock()
	a.no1xx = true
	a.mu.Unlock()
}

// describe is the debug header about a route.
func (a *attempts) describe() string {
	age := "fresh"
	if a.found.Stale {
		age = "stale"
	}
	return "source=" + string(a.job.source) + "; revision=" + strconv.FormatInt(int64(a.found.Revision), 10) + "; " + age
}

// mark is what a node that can says about itself in an answer.
type mark struct {
	stale    bool
	full     bool
	revision sandbox.Revision
}

// readMark reads Berth-Node of an answer, which is removed on the way in any case. From a node
// without the capability it means nothing: an application could have set it.
func readMark(n *routecache.Node, resp *http.Response) mark {
	text := resp.Header.Get(headerNode)
	if text == "" {
		return mark{}
	}
	word, params, _ := strings.Cut(text, ";")
	switch word = strings.TrimSpace(word); {
	case word == "full" && resp.StatusCode == http.StatusServiceUnavailable && n.Can("create_key"):
		return mark{full: true}
	case word == "stale" && resp.StatusCode == http.StatusMisdirectedRequest && n.Revisions:
		number, ok := strings.CutPrefix(strings.TrimSpace(params), "revision=")
		revision, err := strconv.ParseInt(number, 10, 64)
		if !ok || err != nil || revision <= 0 {
			return mark{}
		}
		return mark{stale: true, revision: sandbox.Revision(revision)}
	}
	return mark{}
}
