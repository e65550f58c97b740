package httpapi

import "github.com/labstack/echo/v4"

// get shows a sandbox as its node sees it: GET /sandboxes/{id}, called by clients. It changes nothing.
func (a *API) get(c echo.Context) error { return a.forward(of(c), c.Request(), nil, nil) }
