package telemetry

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/pprof"
	"strings"
)

// maxLevelBytes is room for a level as text or JSON.
const maxLevelBytes = 256

// Admin serves what only operators may see, so it belongs on a loopback listener.
//
//	GET /debug/pprof/…   Go's profiles
//	GET /log-level       {"level":"info"}
//	PUT /log-level       the level as {"level":"debug"} or plain text; 400 names what is wanted
func (t *Telemetry) Admin() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /log-level", func(w http.ResponseWriter, _ *http.Request) {
		t.writeLevel(w)
	})
	mux.HandleFunc("PUT /log-level", func(w http.ResponseWriter, r *http.Request) {
		level, err := readLevel(http.MaxBytesReader(w, r.Body, maxLevelBytes))
		if err != nil {
			writeJSON(w, http.StatusBadRequest, map[string]string{"message": err.Error()})
			return
		}
		before := t.Level.Level()
		t.Level.Set(level)
		t.Log.InfoContext(r.Context(), "log level changed",
			slog.String("from", before.String()), slog.String("to", level.String()))
		t.writeLevel(w)
	})
	return mux
}

func readLevel(body io.Reader) (slog.Level, error) {
	text, err := io.ReadAll(body)
	if err != nil {
		return 0, fmt.Errorf("read level: %w", err)
	}
	word := strings.TrimSpace(string(text))
	var object struct {
		Level string `json:"level"`
	}
	if json.Unmarshal(text, &object) == nil {
		word = object.Level
	}
	if word == "" {
		return 0, fmt.Errorf("level: debug, info, warn or error is wanted")
	}
	level, err := parseLevel(word)
	if err != nil {
		return 0, fmt.Errorf("level %q: debug, info, warn or error is wanted", word)
	}
	return level, nil
}

func (t *Telemetry) writeLevel(w http.ResponseWriter) {
	writeJSON(w, http.StatusOK, map[string]string{"level": strings.ToLower(t.Level.Level().String())})
}

func writeJSON(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// The client may be gone; there is nobody else to tell.
	_ = json.NewEncoder(w).Encode(body)
}
