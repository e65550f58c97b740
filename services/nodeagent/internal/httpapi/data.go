package httpapi

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"

	"berth/services/internal/sandbox"
	"berth/services/nodeagent/internal/isolation"
	"berth/services/nodeagent/internal/journal"
	"berth/services/nodeagent/internal/proxy"
	"berth/services/nodeagent/internal/sandboxes"
)

func isDataPlane(requestURI string) bool {
	_, is := proxy.Target(requestURI)
	return is
}

// serveData carries a request to a port of a sandbox: any method under /proxy, with the pair in headers, called by a gateway. A sandbox that is not here and a port
// nobody listens on are 502, which the SDKs read as "not running"; paused is 410.
func (a *API) serveData(w http.ResponseWriter, r *http.Request) {
	id, port, err := target(r.Header)
	if err != nil {
		writeError(w, apiError{Code: http.StatusBadRequest, Message: err.Error(), ErrorCode: "bad_route"})
		return
	}
	refuse := func(status int, code, message string) {
		writeError(w, apiError{Code: status, Message: message, ErrorCode: code, Sandbox: string(id), Port: port})
	}
	if err := a.checkRevision(r, id, false); err != nil {
		if stale, ok := errors.AsType[*journal.StaleError](err); ok {
			w.Header().Set(marker, "stale; revision="+strconv.FormatInt(int64(stale.Revision), 10))
		}
		answer := answerOf(id, err)
		refuse(answer.Code, answer.ErrorCode, answer.Message)
		return
	}
	conns, view, err := a.Sandboxes.Reach(r.Context(), id)
	switch {
	case errors.Is(err, sandboxes.ErrNotFound):
		refuse(http.StatusBadGateway, "unknown_sandbox", fmt.Sprintf("sandbox %s not found", id))
		return
	case errors.Is(err, sandboxes.ErrPaused):
		refuse(http.StatusGone, "paused", fmt.Sprintf("sandbox %s is paused", id))
		return
	case err != nil && r.Context().Err() != nil:
		return // the client left
	case err != nil:
		a.Log.ErrorContext(r.Context(), "sandbox could not be woken by traffic", slog.Any("sandbox", id), slog.Any("error", err))
		refuse(http.StatusServiceUnavailable, "wake_failed", fmt.Sprintf("sandbox %s could not be resumed", id))
		return
	}
	if token := view.TrafficToken; token != "" && port != envdPort &&
		subtle.ConstantTimeCompare([]byte(r.Header.Get("E2b-Traffic-Access-Token")), []byte(token)) != 1 {
		refuse(http.StatusUnauthorized, "traffic_token", "e2b-traffic-access-token is missing or wrong")
		return
	}
	defer a.Metrics.exchange()()
	to, _ := proxy.Target(r.RequestURI)
	err = proxy.Serve(w, r, proxy.Request{Conns: conns, Port: port, Target: to, IsNodeKey: a.isKey})
	if err == nil || r.Context().Err() != nil {
		return
	}
	a.Log.DebugContext(r.Context(), "exchange failed", slog.Any("sandbox", id), slog.Int("port", port), slog.Any("error", err))
	failed, _ := errors.AsType[*proxy.Error](err)
	switch {
	case errors.Is(err, isolation.ErrRefused):
		refuse(http.StatusBadGateway, "port_closed", fmt.Sprintf("nobody listens on port %d of sandbox %s", port, id))
	case errors.Is(err, isolation.ErrGone):
		refuse(http.StatusBadGateway, "unknown_sandbox", fmt.Sprintf("sandbox %s not found", id))
	case failed != nil && failed.Client:
		w.Header().Set("Connection", "close") // where the next request begins nobody knows
		refuse(http.StatusBadRequest, "bad_request", "failed to read request body")
	default:
		refuse(http.StatusBadGateway, "bad_answer", fmt.Sprintf("port %d of sandbox %s did not answer with HTTP", port, id))
	}
}

// envdPort is the SDKs' own agent's, which checks its own token.
const envdPort = 49983

// target reads the pair of sandbox id and port.
func target(h http.Header) (sandbox.ID, int, error) {
	text := strings.TrimSpace(first(h, "X-Agentenv-Sandbox-Id", "E2b-Sandbox-Id"))
	if text == "" {
		return "", 0, badf("sandbox id header required")
	}
	id, err := sandbox.ParseID(text)
	if err != nil {
		return "", 0, badf("sandbox id header invalid")
	}
	text = strings.TrimSpace(first(h, "X-Agentenv-Target-Port", "E2b-Sandbox-Port"))
	if text == "" {
		return "", 0, badf("target port header required")
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 || text[0] == '0' || text[0] == '+' {
		return "", 0, badf("target port header invalid")
	}
	return id, int(port), nil
}

func first(h http.Header, names ...string) string {
	for _, name := range names {
		if value := h.Get(name); value != "" {
			return value
		}
	}
	return ""
}
