package httpapi

import (
	"strings"

	"github.com/labstack/echo/v4"
)

// connect makes a sandbox run for at least a time: POST /sandboxes/{id}/connect and /v2/…, called by
// clients. It may be repeated and never shortens a life.
func (a *API) connect(c echo.Context) error {
	return a.checked(c, a.connectBody(strings.HasPrefix(of(c).target.Route, "/v2/")))
}
