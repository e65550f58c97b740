package httpapi

import (
	"net/http"
	"slices"
	"strings"
)

// exposed are the headers a console in a browser may read.
const exposed = "x-next-token, x-request-id, retry-after, berth-error, berth-missing-nodes, berth-stale, berth-replayed"

// origin returns what Access-Control-Allow-Origin says to r, "" for nothing: r names no origin, or one
// that is not allowed. Never with credentials, for a key is sent on purpose.
func (a *API) origin(r *http.Request) string {
	origin := r.Header.Get("Origin")
	switch {
	case origin == "":
		return ""
	case slices.Contains(a.cfg.Origins, "*"):
		return "*"
	case slices.Contains(a.cfg.Origins, origin):
		return origin
	}
	return ""
}

// allowOrigin tells a browser that the page may read this answer.
func (a *API) allowOrigin(h http.Header, r *http.Request) {
	origin := a.origin(r)
	if origin == "" {
		return
	}
	h.Set("Access-Control-Allow-Origin", origin)
	h.Set("Access-Control-Expose-Headers", exposed)
	if origin != "*" {
		h.Add("Vary", "Origin")
	}
}

// preflight answers a browser that asks whether it may call a path of the API, or send a routing
// header. It carries no key, and cannot.
func (a *API) preflight(x *exchange, r *http.Request) {
	if origin := a.origin(r); origin != "" {
		h := x.Header()
		h.Set("Access-Control-Allow-Origin", origin)
		h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE")
		h.Set("Access-Control-Max-Age", "600")
		if asked := strings.Join(r.Header.Values("Access-Control-Request-Headers"), ", "); asked != "" {
			h.Set("Access-Control-Allow-Headers", asked)
		}
		h.Add("Vary", "Origin, Access-Control-Request-Headers")
	}
	x.WriteHeader(http.StatusNoContent)
}
