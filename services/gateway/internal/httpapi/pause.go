package httpapi

import "github.com/labstack/echo/v4"

// pause freezes a sandbox on its node: POST /sandboxes/{id}/pause, called by clients. The binding stays;
// a second call is the node's 409.
func (a *API) pause(c echo.Context) error { return a.forward(of(c), c.Request(), nil, nil) }
