package httpapi

import (
	"context"
	"net/http"

	"github.com/labstack/echo/v4"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"berth/services/gateway/internal/proxy"
	"berth/services/gateway/internal/routecache"
	"berth/services/internal/sandbox"
)

// find returns where the sandbox of the path is. Another tenant's does not exist for the caller.
func (a *API) find(x *exchange, r *http.Request) (routecache.Found, error) {
	found, err := a.Routes.Lookup(r.Context(), x.target.Sandbox)
	if err != nil {
		return routecache.Found{}, err
	}
	if !x.caller.Sees(found.Tenant) {
		return routecache.Found{}, sandbox.ErrNotFound
	}
	x.route = found
	return found, nil
}

// answered is told of a node's answer before it goes on.
type answered func(ctx context.Context, f routecache.Found, resp *http.Response) error

// forward has the sandbox's node answer. text is the body that was read, nil to stream it.
func (a *API) forward(x *exchange, r *http.Request, text []byte, before answered) error {
	found, err := a.find(x, r)
	if err != nil {
		return err
	}
	ctx, span := a.tracer.Start(r.Context(), "node.call", trace.WithSpanKind(trace.SpanKindClient))
	defer span.End()
	header := http.Header{}
	a.Propagator.Inject(ctx, propagation.HeaderCarrier(header))
	x.proxied = true
	a.Forwarder.ServeControl(x, r, proxy.ControlCall{
		Target: x.target, Found: &found, Body: text, Header: header,
		Answered: before,
	})
	return nil
}

// checked reads and checks the body, then has the node answer.
func (a *API) checked(c echo.Context, looksRight check) error {
	x, r := of(c), c.Request()
	text, err := a.read(x, r, looksRight)
	if err != nil {
		return err
	}
	return a.forward(x, r, text, nil)
}

// pass has the node answer calls that change nothing a gateway keeps: snapshots, network, metrics,
// logs and extension parameters of a sandbox. Called by clients; what a second call does is the node's.
func (a *API) pass(c echo.Context) error { return a.forward(of(c), c.Request(), nil, nil) }
