package httpapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"berth/services/gateway/internal/routecache"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// endLimit bounds what is done for a delete after its node has answered.
const endLimit = 15 * time.Second

// delete ends a sandbox: DELETE /sandboxes/{id}, called by clients. On the node's 204 or 404 the binding
// is ended before the client is answered, so from then on the id is unknown to every gateway. A second
// call is 404.
func (a *API) delete(c echo.Context) error {
	return a.forward(of(c), c.Request(), nil, func(ctx context.Context, f routecache.Found, resp *http.Response) error {
		if resp.StatusCode != http.StatusNoContent && resp.StatusCode != http.StatusNotFound {
			return nil
		}
		// The node has done it: the binding must end although the client may have left.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endLimit)
		defer cancel()
		if err := a.unbind(ctx, f); err != nil {
			answer, _ := answerFor(err)
			a.Log.WarnContext(ctx, "binding of a deleted sandbox was not ended", slog.Any("sandbox", f.Sandbox), slog.Any("error", err))
			return &answer
		}
		return nil
	})
}

// unbind ends the binding that a delete was routed by. If it has changed meanwhile, the new one is
// ended if it is on the same node; one on another node is not what was deleted.
func (a *API) unbind(ctx context.Context, f routecache.Found) error {
	revision, err := a.Scheduler.ReleaseSandbox(ctx, f.Sandbox, f.Revision)
	if errors.Is(err, sandbox.ErrChanged) {
		now, lookupErr := a.Routes.Recheck(ctx, f.Sandbox, f.Revision+1)
		switch {
		case errors.Is(lookupErr, sandbox.ErrNotFound):
			return nil
		case lookupErr != nil:
			return lookupErr
		case now.Route.Node != f.Route.Node:
			return fmt.Errorf("it moved to another node: %w", routecache.ErrUnavailable)
		}
		revision, err = a.Scheduler.ReleaseSandbox(ctx, f.Sandbox, now.Revision)
	}
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	a.Log.InfoContext(ctx, "sandbox deleted", slog.Any("sandbox", f.Sandbox), slog.Any("node", f.Route.Node))
	a.Routes.Put(route.Route{
		Sandbox: f.Sandbox, Node: f.Route.Node, Tenant: f.Tenant, Incarnation: f.Incarnation, Revision: revision, State: sandbox.Gone,
	})
	return nil
}
