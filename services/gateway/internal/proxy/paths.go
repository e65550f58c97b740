package proxy

import (
	"net/http"
	"net/url"
	"strings"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// Kind is what is done with a request.
type Kind uint8

// The kinds.
const (
	KindUnknown   Kind = iota // no such path, or not by that method: Allow says which
	KindData                  // data plane: to a port inside a sandbox
	KindHealth                // GET /health of the gateway itself
	KindMetrics               // public /metrics: 404
	KindOptions               // OPTIONS *: 204
	KindPreflight             // a browser asks whether it may; answered without a key
	KindSandbox               // control plane: the sandbox's node answers
	KindPlace                 // a create
	KindFan                   // a list: all nodes are asked
	KindNodes                 // the list of nodes, from SQL
	KindNode                  // one node answers, found by its id
	KindAny                   // any ready node answers
	KindEvents                // the events of a session
	KindTwirp                 // a Twirp method
)

// pathRow is one row of the control plane. In pattern a segment {sandbox_id}, {node_id} or
// {session} is an id, {service} and {method} any text, and a last "*" any rest, none included.
type pathRow struct {
	methods string // separated by a blank, "" is any
	pattern string
	kind    Kind
	scope   string
}

// pathRows are the paths of the API. Both SDK generations are equal in everything.
var pathRows = compile([]pathRow{ //nolint:gochecknoglobals // a constant table
	{"POST", "/sandboxes", KindPlace, "sandboxes:write"},
	{"POST", "/v2/sandboxes", KindPlace, "sandboxes:write"},
	{"POST", "/sandboxes-cold", KindPlace, "sandboxes:write"},
	{"GET", "/sandboxes", KindFan, "sandboxes:read"},
	{"GET", "/v2/sandboxes", KindFan, "sandboxes:read"},
	{"GET", "/sandboxes/{sandbox_id}", KindSandbox, "sandboxes:read"},
	{"DELETE", "/sandboxes/{sandbox_id}", KindSandbox, "sandboxes:write"},
	{"POST", "/sandboxes/{sandbox_id}/connect", KindSandbox, "sandboxes:write"},
	{"POST", "/v2/sandboxes/{sandbox_id}/connect", KindSandbox, "sandboxes:write"},
	{"POST", "/sandboxes/{sandbox_id}/pause", KindSandbox, "sandboxes:write"},
	{"POST", "/sandboxes/{sandbox_id}/resume", KindSandbox, "sandboxes:write"},
	{"POST", "/sandboxes/{sandbox_id}/timeout", KindSandbox, "sandboxes:write"},
	{"POST", "/sandboxes/{sandbox_id}/refreshes", KindSandbox, "sandboxes:write"},
	{"POST", "/sandboxes/{sandbox_id}/snapshots", KindSandbox, "sandboxes:write"},
	{"POST", "/sandboxes/{sandbox_id}/fork", KindSandbox, "sandboxes:write"},
	{"PUT", "/sandboxes/{sandbox_id}/network", KindSandbox, "sandboxes:write"},
	{"PATCH", "/sandboxes/{sandbox_id}/custom-extension-params", KindSandbox, "sandboxes:write"},
	{"GET", "/sandboxes/{sandbox_id}/custom-extension-params", KindSandbox, "sandboxes:read"},
	{"GET", "/sandboxes/{sandbox_id}/metrics", KindSandbox, "sandboxes:read"},
	{"GET", "/sandboxes/{sandbox_id}/logs", KindSandbox, "sandboxes:read"},
	{"GET", "/v2/sandboxes/{sandbox_id}/logs", KindSandbox, "sandboxes:read"},
	{"GET", "/nodes", KindNodes, "nodes:read"},
	{"GET", "/nodes/{node_id}", KindNode, "nodes:read"},
	{"", "/templates/*", KindAny, "templates:"},
	{"", "/v2/templates/*", KindAny, "templates:"},
	{"", "/v3/templates/*", KindAny, "templates:"},
	{"", "/snapshots/*", KindAny, "snapshots:"},
	{"", "/volumes/*", KindAny, "volumes:"},
	{"GET", "/sessions/{session}/events", KindEvents, "sessions:read"},
	{"POST", "/twirp/{service}/{method}", KindTwirp, ""},
})

type compiledRow struct {
	pathRow
	segments []string
}

func compile(rows []pathRow) []compiledRow {
	compiled := make([]compiledRow, len(rows))
	for i, row := range rows {
		compiled[i] = compiledRow{row, strings.Split(row.pattern[1:], "/")}
	}
	return compiled
}

// firstSegments are the first segments of all rows: what begins otherwise is no path of the API,
// and the data plane does not pay for the table.
var firstSegments = func() map[string]bool { //nolint:gochecknoglobals // derived from the table
	first := map[string]bool{}
	for _, row := range pathRows {
		first[row.segments[0]] = true
	}
	return first
}()

// matchPath finds the row of a raw path. Segments are split before anything is decoded, literals
// are compared undecoded, an empty segment or a trailing slash matches nothing. known tells that
// the path is one of the API by another method, which allow lists.
func matchPath(method, path string) (t Target, found bool, allow string) {
	if path == "" || path[0] != '/' {
		return Target{}, false, ""
	}
	first, _, _ := strings.Cut(path[1:], "/")
	if !firstSegments[first] {
		return Target{}, false, ""
	}
	segments := strings.Split(path[1:], "/")
	var methods []string
	for _, row := range pathRows {
		t, ok := row.match(segments)
		if !ok {
			continue
		}
		if row.methods != "" && row.methods != method {
			methods = append(methods, row.methods)
			continue
		}
		t.Kind, t.Route, t.Scope = row.kind, row.pattern, row.scope
		if row.kind == KindAny {
			t.Scope += "write"
			if method == http.MethodGet || method == http.MethodHead {
				t.Scope = row.scope + "read"
			}
		}
		return t, true, ""
	}
	return Target{}, false, strings.Join(methods, ", ")
}

func (row compiledRow) match(segments []string) (Target, bool) {
	var t Target
	for i, want := range row.segments {
		if want == "*" {
			return t, t.takeRest(segments[i:])
		}
		if i >= len(segments) {
			return t, false
		}
		have := segments[i]
		switch want {
		case "{sandbox_id}", "{node_id}", "{session}":
			if !t.takeID(want, have) {
				return t, false
			}
		case "{service}", "{method}":
			if have == "" {
				return t, false
			}
			t.Rest = append(t.Rest, have)
		default:
			if have != want {
				return t, false
			}
		}
	}
	return t, len(segments) == len(row.segments)
}

// takeID decodes an id segment once; what is then no id names nothing.
func (t *Target) takeID(what, segment string) bool {
	text, err := url.PathUnescape(segment)
	if err != nil || text == "" {
		return false
	}
	switch what {
	case "{sandbox_id}":
		t.Sandbox, err = sandbox.ParseID(text)
	case "{node_id}":
		t.Node, err = node.ParseID(text)
	default:
		t.Rest = append(t.Rest, text)
	}
	return err == nil
}

// takeRest takes the raw segments behind a family of paths. The node acts on them with the
// cluster's key, so none may climb out of the family, however often a node decodes.
func (t *Target) takeRest(segments []string) bool {
	for _, segment := range segments {
		text, err := url.PathUnescape(segment)
		if segment == "" || err != nil {
			return false
		}
		for piece := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == '/' || r == '\\' }) {
			if piece == "." || piece == ".." {
				return false
			}
		}
	}
	t.Rest = segments
	return true
}
