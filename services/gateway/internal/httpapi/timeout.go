package httpapi

import "github.com/labstack/echo/v4"

// timeout sets how long a sandbox lives from now: POST /sandboxes/{id}/timeout, called by clients; 0 ends
// it. A second call counts from then.
func (a *API) timeout(c echo.Context) error { return a.checked(c, a.timeoutBody) }
