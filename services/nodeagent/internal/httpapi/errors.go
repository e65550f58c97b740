package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"

	"berth/services/internal/sandbox"
	"berth/services/nodeagent/internal/journal"
	"berth/services/nodeagent/internal/sandboxes"
	"berth/services/nodeagent/internal/templates"
)

// marker is how this node tells a gateway what a status alone does not say.
const marker = "Berth-Node"

// apiError is the body of every error this node makes itself.
type apiError struct {
	Code      int    `json:"code"`
	Message   string `json:"message"`
	ErrorCode string `json:"error_code,omitempty"`
	Sandbox   string `json:"sandboxId,omitempty"`
	Port      int    `json:"port,omitempty"`
}

// badRequestError is a mistake of the caller's; its text says which field.
type badRequestError string

func (e badRequestError) Error() string { return string(e) }

func badf(format string, args ...any) error { return badRequestError(fmt.Sprintf(format, args...)) }

// errTooLarge is a body beyond the limit.
var errTooLarge = errors.New("request body too large")

// answerOf is the one table from errors to answers of the control plane. What it does not know is "internal error", its
// cause only in the log.
func answerOf(id sandbox.ID, err error) apiError {
	if bad, ok := errors.AsType[badRequestError](err); ok {
		return apiError{Code: http.StatusBadRequest, Message: bad.Error(), ErrorCode: "bad_request"}
	}
	if _, ok := errors.AsType[*journal.StaleError](err); ok {
		return apiError{Code: http.StatusMisdirectedRequest, Message: "route is stale", ErrorCode: "stale_route"}
	}
	switch {
	case errors.Is(err, errTooLarge):
		return apiError{Code: http.StatusRequestEntityTooLarge, Message: errTooLarge.Error(), ErrorCode: "too_large"}
	case errors.Is(err, templates.ErrUnknown):
		return apiError{Code: http.StatusNotFound, Message: err.Error(), ErrorCode: "unknown_template"}
	case errors.Is(err, sandboxes.ErrNotFound):
		return apiError{Code: http.StatusNotFound, Message: fmt.Sprintf("sandbox %s not found", id), ErrorCode: "unknown_sandbox"}
	case errors.Is(err, sandbox.ErrDeleted):
		return apiError{Code: http.StatusConflict, Message: fmt.Sprintf("sandbox %s was deleted", id), ErrorCode: "deleted"}
	case errors.Is(err, sandboxes.ErrPaused):
		return apiError{Code: http.StatusConflict, Message: fmt.Sprintf("sandbox %s is paused", id), ErrorCode: "paused"}
	case errors.Is(err, sandboxes.ErrRunning):
		return apiError{Code: http.StatusConflict, Message: fmt.Sprintf("sandbox %s is running", id), ErrorCode: "running"}
	case errors.Is(err, sandboxes.ErrFull):
		return apiError{Code: http.StatusServiceUnavailable, Message: err.Error(), ErrorCode: "sandbox_capacity_unavailable"}
	case errors.Is(err, sandboxes.ErrClosing):
		return apiError{Code: http.StatusServiceUnavailable, Message: "node is stopping", ErrorCode: "draining"}
	case errors.Is(err, context.DeadlineExceeded):
		return apiError{Code: http.StatusGatewayTimeout, Message: "sandbox did not do that in time", ErrorCode: "timeout"}
	}
	return apiError{Code: http.StatusInternalServerError, Message: "internal error", ErrorCode: "internal_server_error"}
}

// refuse answers a failed control-plane call.
func (a *API) refuse(w http.ResponseWriter, r *http.Request, id sandbox.ID, err error) {
	answer := answerOf(id, err)
	if stale, ok := errors.AsType[*journal.StaleError](err); ok {
		w.Header().Set(marker, "stale; revision="+strconv.FormatInt(int64(stale.Revision), 10))
	}
	if errors.Is(err, sandboxes.ErrFull) || errors.Is(err, sandboxes.ErrClosing) {
		w.Header().Set(marker, "full") // the gateway tries the next node
	}
	if answer.Code >= http.StatusInternalServerError {
		a.Log.ErrorContext(r.Context(), "call failed", slog.String("method", r.Method), slog.Any("sandbox", id), slog.Int("status", answer.Code),
			slog.Any("error", err))
	}
	writeError(w, answer)
}

func writeError(w http.ResponseWriter, e apiError) {
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, e.Code, e)
}

func writeJSON(w http.ResponseWriter, status int, body any) {
	text, err := json.Marshal(body)
	if err != nil { // our own types always encode
		panic(err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(text)))
	w.WriteHeader(status)
	_, _ = w.Write(text) // a client that left is nobody's error
}
