package httpapi

import "github.com/labstack/echo/v4"

// resume thaws a paused sandbox: POST /sandboxes/{id}/resume, called by older clients. A second call is
// the node's 409.
func (a *API) resume(c echo.Context) error { return a.checked(c, a.resumeBody) }
