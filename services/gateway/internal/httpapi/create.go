package httpapi

import (
	"errors"
	"io"
	"maps"
	"net/http"

	"github.com/labstack/echo/v4"

	"berth/services/gateway/internal/launch"
	"berth/services/gateway/internal/proxy"
)

// create makes a sandbox: POST /sandboxes, /v2/sandboxes and /sandboxes-cold, called by clients. A
// second call makes a second sandbox; an Idempotency-Key changes nothing yet. The 201 is the node's,
// and any gateway can route the sandbox from the moment it is read.
func (a *API) create(c echo.Context) error {
	x, r := of(c), c.Request()
	parse := launch.ParseAsk
	if x.target.Route == "/sandboxes-cold" {
		parse = launch.ParseColdAsk
	}
	var ask launch.Ask
	text, err := a.read(x, r, func(text []byte) (err error) {
		ask, err = parse(text, a.cfg.MaxTimeout)
		return err
	})
	if err != nil {
		return err
	}
	created, err := a.Launcher.Create(r.Context(), launch.Request{
		Tenant: x.caller.Tenant, Ask: ask, Client: r, Raw: x.target.Raw, Body: text,
	})
	if refusal, ok := errors.AsType[*launch.Refusal](err); ok {
		defer func() { _ = refusal.Response.Body.Close() }()
		passOn(x, refusal.Response)
		return nil
	}
	if err != nil {
		return err
	}
	defer created.Close()
	x.target.Sandbox = created.Sandboxes[0]
	x.route.Route.Node, x.route.Revision = created.Node, created.Revision
	passOn(x, created.Response)
	return nil
}

// passOn sends a node's answer on as it is. One that breaks off is cut, so that the client can tell.
func passOn(w http.ResponseWriter, resp *http.Response) {
	h := w.Header()
	maps.Copy(h, resp.Header)
	proxy.KeepUntyped(h)
	w.WriteHeader(resp.StatusCode)
	if _, err := io.Copy(w, resp.Body); err != nil {
		panic(http.ErrAbortHandler)
	}
}
