package gatewaytest

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// NodeKey is what the nodes here expect.
const NodeKey = "node-key-0123456789-0123456789-0123456789"

// Node stands for a node process. Script sees each request first and answers it or returns false; what
// it leaves is answered as a small Berth node would.
type Node struct {
	ID           node.ID
	URL          string
	Capabilities []string
	Key          string // "": NodeKey
	Script       func(w http.ResponseWriter, r Seen) (answered bool)

	server    *httptest.Server
	mu        sync.Mutex
	seen      []Seen
	sandboxes map[string]time.Time
}

// Seen is a request as it arrived, its body read to the end.
type Seen struct {
	Method string
	Target string // byte for byte
	Host   string
	Header http.Header
	Body   string
	Ended  error // why the body broke off; nil: it was whole
}

// NewNode starts a node that ends with t. Without capabilities it is one that draws its own ids.
func NewNode(t testing.TB, id node.ID, capabilities ...string) *Node {
	t.Helper()
	n := &Node{ID: id, Capabilities: capabilities, sandboxes: map[string]time.Time{}}
	server := httptest.NewServer(n)
	t.Cleanup(server.Close)
	n.server, n.URL = server, server.URL
	return n
}

// CloseConnections closes every connection, as a node does with those that were idle.
func (n *Node) CloseConnections() { n.server.CloseClientConnections() }

// BerthCapabilities are those of a Berth node today.
func BerthCapabilities() []string {
	return []string{route.CapabilityCreateKey, route.CapabilityRouteRevision}
}

// Seen returns the requests that have arrived, in order.
func (n *Node) Seen() []Seen {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.seen)
}

// Count returns how many requests with this method have arrived.
func (n *Node) Count(method string) int {
	count := 0
	for _, r := range n.Seen() {
		if r.Method == method {
			count++
		}
	}
	return count
}

// Sandboxes returns the ids of what lives here, sorted.
func (n *Node) Sandboxes() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	ids := []string{}
	for id := range n.sandboxes {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// Add puts a sandbox here that nobody created through a gateway.
func (n *Node) Add(id sandbox.ID, started time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.sandboxes[string(id)] = started
}

// ServeHTTP answers a request.
func (n *Node) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	text, err := io.ReadAll(r.Body)
	seen := Seen{Method: r.Method, Target: r.RequestURI, Host: r.Host, Header: r.Header, Body: string(text), Ended: err}
	n.mu.Lock()
	n.seen = append(n.seen, seen)
	n.mu.Unlock()
	if n.Script != nil && n.Script(w, seen) {
		return
	}
	n.usual(w, seen)
}

// usual answers as a small Berth node.
func (n *Node) usual(w http.ResponseWriter, r Seen) {
	path, _, _ := strings.Cut(r.Target, "?")
	if strings.HasPrefix(path, "/proxy") {
		w.Header().Set("X-App", "1")
		_, _ = io.WriteString(w, "app saw "+r.Method+" "+strings.TrimPrefix(r.Target, "/proxy"))
		return
	}
	if r.Header.Get("X-Api-Key") != n.key() {
		Answer(w, http.StatusUnauthorized, map[string]any{"code": 401, "message": "unauthorized"})
		return
	}
	id, verb, hasVerb := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(path, "/v2"), "/sandboxes/"), "/")
	if decoded, err := url.PathUnescape(id); err == nil {
		id = decoded
	}
	switch {
	case path == "/sandboxes" || path == "/v2/sandboxes" || path == "/sandboxes-cold":
		if r.Method == http.MethodPost {
			Answer(w, http.StatusCreated, n.create(r.Header.Get("Berth-Sandbox-Id")))
			return
		}
		Answer(w, http.StatusOK, n.list())
	case !n.has(id):
		Answer(w, http.StatusNotFound, map[string]any{"code": 404, "message": "sandbox not found"})
	case r.Method == http.MethodDelete:
		n.mu.Lock()
		delete(n.sandboxes, id)
		n.mu.Unlock()
		w.WriteHeader(http.StatusNoContent)
	case r.Method == http.MethodGet && !hasVerb:
		Answer(w, http.StatusOK, n.detail(id))
	case verb == "connect":
		Answer(w, http.StatusOK, n.detail(id))
	case verb == "resume":
		Answer(w, http.StatusCreated, n.detail(id))
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}

// key is the one this node knows.
func (n *Node) key() string {
	if n.Key != "" {
		return n.Key
	}
	return NodeKey
}

func (n *Node) has(id string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, found := n.sandboxes[id]
	return found
}

// create makes a sandbox under the given id, once, or under one of its own.
func (n *Node) create(given string) map[string]any {
	if given == "" {
		drawn, err := sandbox.NewID()
		if err != nil {
			panic(err)
		}
		given = string(drawn)
	}
	n.mu.Lock()
	if _, known := n.sandboxes[given]; !known {
		n.sandboxes[given] = time.Now()
	}
	n.mu.Unlock()
	return n.detail(given)
}

func (n *Node) list() []map[string]any {
	items := []map[string]any{}
	for _, id := range n.Sandboxes() {
		items = append(items, n.detail(id))
	}
	return items
}

func (n *Node) detail(id string) map[string]any {
	n.mu.Lock()
	started := n.sandboxes[id]
	n.mu.Unlock()
	return map[string]any{
		"templateID": "echo", "sandboxID": id, "clientID": string(n.ID), "envdVersion": "0.6.4",
		"startedAt": started.Format(time.RFC3339Nano), "state": "running",
	}
}

// Answer writes JSON.
func Answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

// Cut closes the connection without another byte.
func Cut(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err == nil {
		_ = conn.Close()
	}
}
