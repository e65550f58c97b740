package proxy

import (
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"

	"berth/services/internal/sandbox"
)

// Plane is which side of the gateway a request is on.
type Plane uint8

const (
	// Control is the API: lifecycle, lists, templates, nodes. Needs a key; errors are JSON.
	Control Plane = iota
	// Data is traffic to a port inside a sandbox. The node judges it.
	Data
)

// String returns the plane as metrics and logs spell it.
func (p Plane) String() string {
	if p == Data {
		return "data"
	}
	return "control"
}

// Error is an error that the gateway itself tells a client. Code is one of the closed set of
// error_codes, Message is the text clients match on: neither ever has an address, SQL, a file or
// the text of another error.
type Error struct {
	Status     int
	Code       string
	Message    string
	RetryAfter time.Duration // 0: no Retry-After; else whole seconds, rounded up
	Allow      string        // of a 405
	Sandbox    sandbox.ID    // shown on the data plane only, "" if not known
	Port       uint16
	Close      bool // the connection cannot be used again: the request was not read to its end
}

// Error returns the message.
func (e *Error) Error() string { return e.Message }

// UnknownSandbox is a sandbox nobody has: 404 for API clients, 502 on the data plane, where the
// SDKs take 502 for "not running".
func UnknownSandbox(p Plane) Error {
	e := Error{Status: http.StatusNotFound, Code: "unknown_sandbox", Message: sandbox.ErrNotFound.Error()}
	if p == Data {
		e.Status = http.StatusBadGateway
	}
	return e
}

// RoutesUnavailable is a look-up that could not be answered: absence cannot be told from ignorance.
func RoutesUnavailable() Error {
	return Error{Status: http.StatusServiceUnavailable, Code: "routes_unavailable", Message: "binding store unavailable", RetryAfter: time.Second}
}

// UnreadBody is a failure to read the client's body, bad framing included.
func UnreadBody() Error {
	return Error{Status: http.StatusBadRequest, Code: "bad_request", Message: "failed to read request body", Close: true}
}

// TooLarge is a request body over its limit.
func TooLarge() Error {
	return Error{Status: http.StatusRequestEntityTooLarge, Code: "too_large", Message: "request body too large", Close: true}
}

// NodeUnreachable is a node that could not be dialled, or that went away before it answered.
func NodeUnreachable() Error {
	return Error{Status: http.StatusBadGateway, Code: "node_unreachable", Message: "upstream unavailable"}
}

// NodeLost is a node whose lease has ended: waiting may help, for its sandboxes move.
func NodeLost() Error {
	return Error{Status: http.StatusServiceUnavailable, Code: "node_lost", Message: "node unavailable", RetryAfter: 5 * time.Second}
}

// NodeTimeout is a node that did not answer in time.
func NodeTimeout() Error {
	return Error{Status: http.StatusGatewayTimeout, Code: "node_timeout", Message: "upstream timeout"}
}

// ClientTimeout is a client that stopped sending its body.
func ClientTimeout() Error {
	return Error{Status: http.StatusRequestTimeout, Code: "client_timeout", Message: "request body timed out", Close: true}
}

// BadAnswer is an answer of a node that may not be passed on; message says which rule it broke.
func BadAnswer(message string) Error {
	return Error{Status: http.StatusBadGateway, Code: "bad_answer", Message: message}
}

// Internal is a fault of the gateway.
func Internal() Error {
	return Error{Status: http.StatusInternalServerError, Code: "internal", Message: "internal error"}
}

const (
	headerRequestID = "X-Request-Id"
	headerError     = "Berth-Error"
)

// RequestID returns the id of r: its own X-Request-Id if that is one value of 1 to 128 of
// A-Z a-z 0-9 . _ -, else one that is made. It is kept in r's header, so every call gives the same
// and the node gets it.
func RequestID(r *http.Request) string {
	if values := r.Header[headerRequestID]; len(values) == 1 && validRequestID(values[0]) {
		return values[0]
	}
	id := strconv.FormatUint(rand.Uint64()|1<<63, 16) // always 16 digits
	r.Header[headerRequestID] = []string{id}
	return id
}

func validRequestID(s string) bool {
	if s == "" || len(s) > 128 {
		return false
	}
	for i := range len(s) {
		c := s[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !letter && c != '.' && c != '_' && c != '-' {
			return false
		}
	}
	return true
}

// WriteError answers r with e, in the form its caller reads: JSON; for gRPC trailers only; for
// Connect, where a plain error would be taken for a dead sandbox, its own form; for a browser on
// the data plane a page. Nothing may have been written to w before.
func WriteError(w http.ResponseWriter, r *http.Request, p Plane, e Error) {
	h := w.Header()
	id := RequestID(r)
	h.Set(headerRequestID, id)
	h.Set(headerError, e.Code)
	h.Set("Cache-Control", "no-store")
	if e.RetryAfter > 0 {
		h.Set("Retry-After", strconv.FormatInt(int64((e.RetryAfter+time.Second-1)/time.Second), 10))
	}
	if e.Allow != "" {
		h.Set("Allow", e.Allow)
	}
	if e.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "ApiKey")
	}
	if e.Close && r.ProtoMajor == 1 {
		h.Set("Connection", "close")
	}
	contentType := r.Header.Get("Content-Type")
	switch {
	case strings.HasPrefix(contentType, "application/grpc"):
		writeGRPCError(w, contentType, e)
	case p == Data && connectCode(e.Status) != "" && strings.HasPrefix(contentType, "application/connect+"):
		writeConnectStream(w, contentType, e)
	case p == Data && connectCode(e.Status) != "" && r.Header.Get("Connect-Protocol-Version") != "":
		writeJSON(w, e.Status, connectError{Code: connectCode(e.Status), Message: e.Message})
	case p == Data && wantsPage(r):
		writePage(w, r, id, e)
	default:
		body := errorBody{Code: e.Status, Message: e.Message, ErrorCode: e.Code, RequestID: id}
		if p == Data {
			body.Sandbox, body.Port = e.Sandbox, e.Port
		}
		writeJSON(w, e.Status, body)
	}
}

type errorBody struct {
	Code      int        `json:"code"`
	Message   string     `json:"message"`
	ErrorCode string     `json:"error_code"`
	RequestID string     `json:"requestId"`
	Sandbox   sandbox.ID `json:"sandboxId,omitempty"`
	Port      uint16     `json:"port,omitempty"`
}

type connectError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil { // of structs of texts and numbers: cannot happen
		panic(err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // a client that left is not told
}

// connectCode returns the Connect code for a status that Connect clients would misread as plain
// HTTP, "" for all others: 503 in Connect's own mapping is "unavailable", which the SDKs take for a
// sandbox that is gone.
func connectCode(status int) string {
	switch status {
	case http.StatusTooManyRequests:
		return "resource_exhausted"
	case http.StatusServiceUnavailable:
		return "aborted"
	case http.StatusGatewayTimeout:
		return "deadline_exceeded"
	}
	return ""
}

// writeConnectStream writes one end-of-stream envelope: a flag byte of 2, the length, JSON.
func writeConnectStream(w http.ResponseWriter, contentType string, e Error) {
	message, err := json.Marshal(struct {
		Error connectError `json:"error"`
	}{connectError{Code: connectCode(e.Status), Message: e.Message}})
	if err != nil {
		panic(err)
	}
	envelope := binary.BigEndian.AppendUint32([]byte{2}, uint32(len(message)))
	envelope = append(envelope, message...)
	mediaType, _, _ := strings.Cut(contentType, ";")
	w.Header().Set("Content-Type", strings.TrimSpace(mediaType))
	w.Header().Set("Content-Length", strconv.Itoa(len(envelope)))
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(envelope)
}

// writeGRPCError writes an answer of trailers only: status and message stand in the header.
func writeGRPCError(w http.ResponseWriter, contentType string, e Error) {
	mediaType, _, _ := strings.Cut(contentType, ";")
	h := w.Header()
	h.Set("Content-Type", strings.TrimSpace(mediaType))
	h.Set("Grpc-Status", strconv.Itoa(grpcStatus(e)))
	h.Set("Grpc-Message", e.Message)
	w.WriteHeader(http.StatusOK)
}

// grpcStatus is gRPC's number for e.
func grpcStatus(e Error) int {
	if e.Code == "unknown_sandbox" {
		return 5
	}
	switch e.Status {
	case http.StatusBadRequest, http.StatusUnprocessableEntity:
		return 3
	case http.StatusUnauthorized:
		return 16
	case http.StatusForbidden:
		return 7
	case http.StatusNotFound:
		return 5
	case http.StatusMethodNotAllowed:
		return 12
	case http.StatusConflict:
		return 9
	case http.StatusRequestEntityTooLarge, http.StatusTooManyRequests:
		return 8
	case http.StatusBadGateway, http.StatusServiceUnavailable:
		return 14
	case http.StatusRequestTimeout, http.StatusGatewayTimeout:
		return 4
	case http.StatusInternalServerError:
		return 13
	}
	return 2
}
