package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"

	"github.com/labstack/echo/v4"
	"go.opentelemetry.io/otel/propagation"

	"berth/services/gateway/internal/listing"
	"berth/services/gateway/internal/proxy"
	"berth/services/gateway/internal/routecache"
	"berth/services/internal/node"
)

// list shows the caller's sandboxes on all nodes: GET /sandboxes, all of them, and GET /v2/sandboxes, in
// pages; called by clients. It changes nothing. Berth-Missing-Nodes names nodes that it lacks.
func (a *API) list(c echo.Context) error {
	x, r := of(c), c.Request()
	_, raw, _ := strings.Cut(x.target.Raw, "?")
	query, err := listing.ParseQuery(raw, strings.HasPrefix(x.target.Route, "/v2/"))
	if err != nil {
		return err
	}
	forNodes := http.Header{"X-Request-Id": {proxy.RequestID(r)}}
	a.Propagator.Inject(r.Context(), propagation.HeaderCarrier(forNodes))
	page, err := a.Lister.List(r.Context(), listing.Ask{
		Path: x.target.Path, Query: query, Tenant: x.caller.Tenant, SeesAll: x.caller.SeesAll(), Header: forNodes,
	})
	if unavailable, ok := errors.AsType[*listing.Unavailable](err); ok {
		return a.noList(x, r, unavailable)
	}
	if refused, ok := errors.AsType[*listing.Refused](err); ok {
		x.Header().Set("Content-Type", refused.ContentType)
		x.WriteHeader(http.StatusBadRequest)
		_, err := x.Write(refused.Body)
		return err
	}
	if err != nil {
		return err
	}
	if len(page.Missing) > 0 {
		x.Header().Set("Berth-Missing-Nodes", listing.MissingHeader(page.Missing))
	}
	if page.Next != "" {
		x.Header().Set("X-Next-Token", page.Next)
	}
	return writeJSON(x, http.StatusOK, page.Items)
}

// noList says which nodes are missing, beside the error that all share.
func (a *API) noList(x *exchange, r *http.Request, e *listing.Unavailable) error {
	answer, _ := answerFor(e)
	h := x.Header()
	h.Set("Berth-Error", answer.Code)
	h.Set("Cache-Control", "no-store")
	if len(e.Missing) > 0 {
		h.Set("Berth-Missing-Nodes", listing.MissingHeader(e.Missing))
	}
	missing := e.Missing
	if missing == nil {
		missing = []listing.Missing{}
	}
	return writeJSON(x, answer.Status, map[string]any{
		"code": answer.Status, "message": answer.Message, "error_code": answer.Code,
		"requestId": proxy.RequestID(r), "missing": missing,
	})
}

func writeJSON(w http.ResponseWriter, status int, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(text)))
	w.WriteHeader(status)
	_, _ = w.Write(text) // a client that left is not told
	return nil
}

// ListNodes makes the calls of a Lister: by the routes that are known, with the node key.
type ListNodes struct {
	Routes    *routecache.Cache
	Forwarder *proxy.Forwarder
}

// Get asks one node.
func (n ListNodes) Get(ctx context.Context, id node.ID, target string, h http.Header) (*http.Response, bool, error) {
	to, err := n.Routes.Node(ctx, id)
	if err != nil {
		return nil, true, err
	}
	answer, err := n.Forwarder.Do(ctx, proxy.NodeCall{Node: to, Method: http.MethodGet, Target: target, Header: h})
	if err != nil {
		return nil, proxy.NothingSent(err), err
	}
	return answer.Response, false, nil
}
