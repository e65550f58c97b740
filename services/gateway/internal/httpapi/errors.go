package httpapi

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"berth/pkg/pgdb"
	"berth/services/gateway/internal/auth"
	"berth/services/gateway/internal/body"
	"berth/services/gateway/internal/launch"
	"berth/services/gateway/internal/listing"
	"berth/services/gateway/internal/proxy"
	"berth/services/gateway/internal/routecache"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
	"berth/services/internal/sandbox"
)

// rule gives one sentinel its answer. The first that matches decides.
type rule struct {
	cause  error
	answer proxy.Error
}

// rules are the errors that subjects return and what clients of the control plane are told. What has
// no rule is an internal error: its text stays in the log.
var rules = []rule{ //nolint:gochecknoglobals // the table is the file
	{auth.ErrUnauthorized, proxy.Error{Status: http.StatusUnauthorized, Code: "unauthenticated", Message: "unauthorized"}},
	{auth.ErrUnavailable, proxy.RoutesUnavailable()},
	{body.ErrTooLarge, proxy.TooLarge()},
	{body.ErrUnreadable, proxy.UnreadBody()},

	{launch.ErrUnrecorded, proxy.Error{Status: http.StatusServiceUnavailable, Code: "unrecorded", Message: "sandbox could not be recorded", RetryAfter: time.Second}},
	{launch.ErrNodeKey, schedulerError},
	{launch.ErrSchedulerAway, proxy.Error{Status: http.StatusServiceUnavailable, Code: "scheduler_unavailable", Message: "scheduler unavailable", RetryAfter: time.Second}},
	{node.ErrNoneReady, noNode("no nodes available")},
	{node.ErrNoRoom, noNode("no node has room")},
	{node.ErrContended, noNode("no nodes available")},
	{node.ErrConstraints, proxy.Error{Status: http.StatusServiceUnavailable, Code: "sandbox_no_compatible_node", Message: "no node satisfies the constraints"}},
	{node.ErrQuota, proxy.Error{Status: http.StatusTooManyRequests, Code: "quota", Message: "tenant quota exceeded", RetryAfter: time.Second}},
	{rpcerr.ErrUnavailable, proxy.RoutesUnavailable()},
	{rpcerr.ErrUnauthenticated, schedulerError},
	{rpcerr.ErrDenied, schedulerError},
	{rpcerr.ErrInternal, schedulerError},

	{sandbox.ErrNotFound, proxy.UnknownSandbox(proxy.Control)},
	{routecache.ErrUnavailable, proxy.RoutesUnavailable()},
	{node.ErrNotObserved, proxy.Error{Status: http.StatusNotFound, Code: "unknown_node", Message: "observed node not found"}},
	{listing.ErrUnavailable, proxy.Error{Status: http.StatusBadGateway, Code: "list_unavailable", Message: "cluster list unavailable"}},
}

var schedulerError = proxy.Error{Status: http.StatusBadGateway, Code: "scheduler_error", Message: "scheduler error"} //nolint:gochecknoglobals // a constant

func noNode(message string) proxy.Error {
	return proxy.Error{
		Status: http.StatusServiceUnavailable, Code: "sandbox_capacity_unavailable", Message: message, RetryAfter: time.Second,
	}
}

func badRequest(message string) proxy.Error {
	return proxy.Error{Status: http.StatusBadRequest, Code: "bad_request", Message: message}
}

func denied(scope string) proxy.Error {
	return proxy.Error{Status: http.StatusForbidden, Code: "denied", Message: "scope " + scope + " required"}
}

// answerFor returns what a client is told of err, and whether err is nobody's fault but ours, so that
// someone should look.
func answerFor(err error) (answer proxy.Error, ours bool) {
	if already, ok := errors.AsType[*proxy.Error](err); ok {
		return *already, false
	}
	if wrong, ok := errors.AsType[*body.Wrong](err); ok {
		return badRequest(wrong.Text), false
	}
	if invalid, ok := errors.AsType[*rpcerr.Invalid](err); ok {
		return badRequest(invalid.Text), false
	}
	if errors.Is(err, launch.ErrUnknown) {
		return unknownOutcome(err), false
	}
	if bad, ok := errors.AsType[*launch.BadAnswer](err); ok {
		return proxy.BadAnswer(bad.Text), false
	}
	for _, r := range rules {
		if !errors.Is(err, r.cause) {
			continue
		}
		answer = r.answer
		if refused, ok := errors.AsType[*node.Refused](err); ok && answer.RetryAfter > 0 && refused.RetryAfter > 0 {
			answer.RetryAfter = refused.RetryAfter
		}
		return answer, answer.Code == schedulerError.Code
	}
	if pgdb.Unavailable(err) {
		return proxy.RoutesUnavailable(), false
	}
	return proxy.Internal(), true
}

// unknownOutcome is 504 when the node fell silent, else 502; a node that answered too much is told as
// such.
func unknownOutcome(err error) proxy.Error {
	if bad, ok := errors.AsType[*launch.BadAnswer](err); ok {
		return proxy.BadAnswer(bad.Text)
	}
	e := proxy.Error{Status: http.StatusBadGateway, Code: "create_unknown", Message: "create outcome unknown"}
	if errors.Is(err, launch.ErrSilent) || errors.Is(err, context.DeadlineExceeded) {
		e.Status = http.StatusGatewayTimeout
	}
	return e
}

// fail answers a control-plane request with err. Where that is that the client has left, nobody is told:
// the exchange is cut, for a handler that returns would have answered 200.
func (a *API) fail(x *exchange, r *http.Request, err error) {
	if errors.Is(err, launch.ErrClientGone) || errors.Is(err, context.Canceled) && r.Context().Err() != nil {
		panic(http.ErrAbortHandler)
	}
	answer, ours := answerFor(err)
	if ours {
		a.Log.ErrorContext(r.Context(), "request failed", slog.String("route", x.target.Route),
			slog.String("request", proxy.RequestID(r)), slog.Any("error", err))
	}
	proxy.WriteError(x, r, proxy.Control, answer)
}
