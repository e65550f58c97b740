package httpapi

import "github.com/labstack/echo/v4"

// refreshes lengthens a sandbox's life: POST /sandboxes/{id}/refreshes, called by older clients. It may be
// repeated.
func (a *API) refreshes(c echo.Context) error { return a.checked(c, a.refreshBody) }
