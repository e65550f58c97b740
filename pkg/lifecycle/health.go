package lifecycle

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// checkTimeout bounds one round of readiness checks, so that a probe gets an answer.
const checkTimeout = 2 * time.Second

// Health answers whether a process lives and whether it may get work. All methods may be called at
// the same time.
type Health struct {
	starting atomic.Bool // while Run has parts left to start
	draining atomic.Bool

	mu     sync.Mutex
	checks map[string]func(context.Context) error
}

// NewHealth returns a Health without checks, ready and not draining.
func NewHealth() *Health {
	return &Health{checks: map[string]func(context.Context) error{}}
}

// Check adds a readiness check under name, or replaces it. f must be quick and may run many times at
// once; the text of its error is shown to operators without a key, so it holds no secrets.
func (h *Health) Check(name string, f func(context.Context) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.checks[name] = f
}

// Draining reports whether the process has begun to stop.
func (h *Health) Draining() bool { return h.draining.Load() }

// Drain makes the process unready for good. A second call changes nothing.
func (h *Health) Drain() { h.draining.Store(true) }

// notReadyError holds the reasons by check; it is never empty.
type notReadyError map[string]string

func (e notReadyError) Error() string {
	reasons := make([]string, 0, len(e))
	for _, name := range slices.Sorted(maps.Keys(e)) {
		reasons = append(reasons, name+": "+e[name])
	}
	return "not ready: " + strings.Join(reasons, ", ")
}

// Ready returns nil if the process may get work, else an error that names every reason. It takes 2 s
// at most; a check that has not answered by then counts as failed.
func (h *Health) Ready(ctx context.Context) error {
	switch {
	case h.draining.Load():
		return notReadyError{"process": "draining"}
	case h.starting.Load():
		return notReadyError{"process": "starting"}
	}
	h.mu.Lock()
	checks := maps.Clone(h.checks)
	h.mu.Unlock()

	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	type result struct {
		name string
		err  error
	}
	results := make(chan result, len(checks))
	for name, check := range checks {
		go func() { results <- result{name, check(ctx)} }()
	}
	reasons := notReadyError{}
	missing := maps.Clone(checks)
	for range checks {
		select {
		case r := <-results:
			delete(missing, r.name)
			if r.err != nil {
				reasons[r.name] = r.err.Error()
			}
		case <-ctx.Done():
			for name := range missing {
				reasons[name] = "no answer in time"
			}
			return reasons
		}
	}
	if len(reasons) > 0 {
		return reasons
	}
	return nil
}

type healthBody struct {
	Status string            `json:"status"`
	Checks map[string]string `json:"checks,omitempty"`
}

// Handler serves the ops paths. Orchestrators call them; none needs a key and none changes anything.
//
//	GET /healthz  200 {"status":"ok"}; 503 {"status":"draining"} once the process stops
//	GET /readyz   200 {"status":"ok"}; 503 {"status":"not ready","checks":{name: reason}}
//	GET /metrics  metrics; 404 if that is nil
func (h *Health) Handler(metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if h.Draining() {
			writeHealth(w, http.StatusServiceUnavailable, healthBody{Status: "draining"})
			return
		}
		writeHealth(w, http.StatusOK, healthBody{Status: "ok"})
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		err := h.Ready(r.Context())
		if reasons, ok := errors.AsType[notReadyError](err); ok {
			writeHealth(w, http.StatusServiceUnavailable, healthBody{Status: "not ready", Checks: reasons})
			return
		}
		writeHealth(w, http.StatusOK, healthBody{Status: "ok"})
	})
	if metrics != nil {
		mux.Handle("GET /metrics", metrics)
	}
	return mux
}

func writeHealth(w http.ResponseWriter, status int, body healthBody) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	// The client may be gone; there is nobody else to tell.
	_ = json.NewEncoder(w).Encode(body)
}
