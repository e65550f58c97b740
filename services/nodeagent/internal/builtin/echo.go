package builtin

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"unicode/utf8"

	"github.com/coder/websocket"
)

// maxDumpBytes is how much of a body the dump shows; /echo sends any length back.
const maxDumpBytes = 1 << 20

// Dump is what the application got, as it got it.
type Dump struct {
	Sandbox   string      `json:"sandbox"`
	Method    string      `json:"method"`
	Target    string      `json:"target"` // exactly as in the request line
	Path      string      `json:"path"`   // decoded
	RawQuery  string      `json:"rawQuery"`
	Proto     string      `json:"proto"`
	Host      string      `json:"host"`
	Headers   http.Header `json:"headers"`
	Trailers  http.Header `json:"trailers,omitempty"`
	Body      string      `json:"body"`
	BodyBytes int64       `json:"bodyBytes"`
	Truncated bool        `json:"truncated,omitempty"`
}

// EchoHandler answers what it is asked:
//   - a WebSocket handshake on any path: every message comes back as it is;
//   - /echo: the request body comes back as it arrives, with its Content-Type;
//   - anything else: a Dump of the request as JSON.
func EchoHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Sec-WebSocket-Key") != "":
			echoMessages(w, r)
		case r.URL.Path == "/echo":
			echoBody(w, r)
		default:
			dump(w, r)
		}
	})
}

func echoMessages(w http.ResponseWriter, r *http.Request) {
	// Anybody who reaches this port may talk to it: a page of another origin is as good as curl.
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true, Subprotocols: []string{"echo"}})
	if err != nil {
		return // Accept has answered
	}
	defer conn.CloseNow()
	conn.SetReadLimit(-1)
	for {
		kind, reader, err := conn.Reader(r.Context())
		if err != nil {
			return
		}
		writer, err := conn.Writer(r.Context(), kind)
		if err != nil {
			return
		}
		if _, err := io.Copy(writer, reader); err != nil {
			return
		}
		if err := writer.Close(); err != nil {
			return
		}
	}
}

func echoBody(w http.ResponseWriter, r *http.Request) {
	control := http.NewResponseController(w)
	_ = control.EnableFullDuplex() // HTTP/2 has it anyway
	if kind := r.Header.Get("Content-Type"); kind != "" {
		w.Header().Set("Content-Type", kind)
	}
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Body.Read(buf)
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return
			}
			if err := control.Flush(); err != nil {
				return
			}
		}
		if errors.Is(err, io.EOF) {
			for name, values := range r.Trailer {
				w.Header()[http.TrailerPrefix+name] = values
			}
			return
		}
		if err != nil {
			panic(http.ErrAbortHandler) // cut, so that nobody takes half a body for a whole one
		}
	}
}

func dump(w http.ResponseWriter, r *http.Request) {
	shown, err := io.ReadAll(io.LimitReader(r.Body, maxDumpBytes))
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	rest, err := io.Copy(io.Discard, r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if !utf8.Valid(shown) {
		w.Header().Set("X-Body-Encoding", "replaced") // JSON cannot carry it; /echo can
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(Dump{
		Sandbox: os.Getenv("SANDBOX_ID"), //nolint:forbidigo // inside a sandbox the environment is the template's
		Method:  r.Method, Target: r.RequestURI, Path: r.URL.Path, RawQuery: r.URL.RawQuery, Proto: r.Proto, Host: r.Host,
		Headers: r.Header, Trailers: r.Trailer,
		Body: string(shown), BodyBytes: int64(len(shown)) + rest, Truncated: rest > 0,
	})
}
