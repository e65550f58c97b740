package proxy

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// Source is how a target was found.
type Source string

// The sources, as metrics and logs spell them.
const (
	SourceHost     Source = "host"
	SourcePath     Source = "path"
	SourceHeader   Source = "header"
	SourceSchedule Source = "schedule"
	SourceGateway  Source = "gateway" // answered or gathered here
	SourceUnknown  Source = "unknown"
)

// The header names that route a request, as net/http spells them.
const (
	HeaderSandbox    = "X-Agentenv-Sandbox-Id"
	HeaderPort       = "X-Agentenv-Target-Port"
	HeaderE2BSandbox = "E2b-Sandbox-Id"
	HeaderE2BPort    = "E2b-Sandbox-Port"
)

// Target is where a request goes.
type Target struct {
	Kind    Kind
	Plane   Plane
	Source  Source
	Sandbox sandbox.ID // KindData and KindSandbox
	Port    uint16     // KindData
	Node    node.ID    // KindNode
	Raw     string     // path and query, byte for byte as the client sent them, in origin form
	Path    string     // the path of Raw
	Route   string     // the pattern that matched, for metrics: "/sandboxes/{sandbox_id}/pause"
	Scope   string     // what a key must be allowed to: "sandboxes:write"; "" where the row has none
	Rest    []string   // KindAny: raw segments behind the family; KindEvents: session; KindTwirp: service, method
	Allow   string     // KindUnknown: the methods of a path that is known
}

// Send returns the request target that the node gets.
func (t *Target) Send() string {
	if t.Kind != KindData || t.Source == SourceHeader && underProxy(t.Path) {
		return t.Raw
	}
	return "/proxy" + t.Raw
}

// Refusal returns the error for a KindUnknown target: 404, or 405 for a known path by another
// method.
func (t *Target) Refusal(method string) Error {
	if t.Allow != "" {
		return Error{Status: http.StatusMethodNotAllowed, Code: "wrong_method", Message: "method not allowed", Allow: t.Allow}
	}
	return Error{Status: http.StatusNotFound, Code: "unknown_route", Message: "route not found: " + method + " " + t.Path}
}

// Domains are the names under which every sandbox has its own: lower case, longest first.
type Domains []string

// ParseDomains reads a comma-separated list of domains: blanks and one trailing dot go, repetitions
// too. The error names the one that is no domain.
func ParseDomains(text string) (Domains, error) {
	var domains Domains
	for item := range strings.SplitSeq(text, ",") {
		domain := strings.TrimSuffix(strings.ToLower(strings.TrimSpace(item)), ".")
		if domain == "" {
			continue
		}
		if !validDomain(domain) {
			return nil, fmt.Errorf("domain %q is not valid: labels of a-z, 0-9 and inner hyphens, 63 bytes each, 253 in all, such as sandboxes.example", item)
		}
		domains = append(domains, domain)
	}
	slices.SortFunc(domains, func(a, b string) int {
		return cmp.Or(cmp.Compare(len(b), len(a)), cmp.Compare(a, b))
	})
	return slices.Compact(domains), nil
}

func validDomain(domain string) bool {
	if len(domain) > 253 {
		return false
	}
	for label := range strings.SplitSeq(domain, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for i := range len(label) {
			if c := label[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
				return false
			}
		}
	}
	return true
}

// ParseTarget says where r goes, by the first that decides: its host, /proxy, /health and /metrics,
// a control-plane path with an id, the header pair, another control-plane path. It reads only r and
// changes nothing. The error is an *Error of the data plane, but for a method nobody serves. A
// target of KindUnknown is no error: the caller authenticates before anything is said about paths.
func ParseTarget(r *http.Request, domains Domains) (Target, error) {
	if r.Method == http.MethodConnect || r.Method == http.MethodTrace {
		return Target{}, &Error{
			Status: http.StatusMethodNotAllowed, Code: "wrong_method", Message: "method not allowed",
			Allow: "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS",
		}
	}
	if r.RequestURI == "*" && r.Method == http.MethodOptions {
		return Target{Kind: KindOptions, Source: SourceGateway, Raw: "*", Path: "*"}, nil
	}
	raw, err := originForm(r.RequestURI)
	if err != nil {
		return Target{}, err
	}
	t := Target{Raw: raw, Source: SourceUnknown}
	t.Path, _, _ = strings.Cut(raw, "?")

	if label, ok := domains.label(r.Host); ok {
		id, port, err := parseLabel(label)
		if err != nil {
			return Target{}, err
		}
		t.Kind, t.Plane, t.Source, t.Sandbox, t.Port = KindData, Data, SourceHost, id, port
		return t, nil
	}

	pair, pairErr := parsePair(r.Header)
	toData := func() (Target, error) {
		if pairErr != nil {
			return Target{}, pairErr
		}
		t.Kind, t.Plane, t.Source, t.Sandbox, t.Port = KindData, Data, SourceHeader, pair.sandbox, pair.port
		return t, nil
	}
	switch {
	case underProxy(t.Path):
		return toData()
	case t.Path == "/health" || t.Path == "/metrics":
		if pair.present {
			return toData()
		}
		t.Kind, t.Source, t.Route = KindHealth, SourceGateway, t.Path
		if t.Path == "/metrics" {
			t.Kind = KindMetrics
		}
		return t, nil
	}
	row, found, allow := matchPath(r.Method, t.Path)
	if r.Method == http.MethodOptions && isPreflight(r.Header) && (found || allow != "" || asksForRouting(r.Header)) {
		t.Kind, t.Source = KindPreflight, SourceGateway
		return t, nil
	}
	idRow := found && row.Kind == KindSandbox
	if !idRow && pair.present {
		return toData()
	}
	if !found {
		t.Allow = allow
		return t, nil
	}
	row.Raw, row.Path, row.Source = t.Raw, t.Path, row.Kind.source()
	return row, nil
}

func (k Kind) source() Source {
	switch k {
	case KindSandbox:
		return SourcePath
	case KindPlace, KindAny, KindNode:
		return SourceSchedule
	default:
		return SourceGateway
	}
}

// originForm returns the path and query of a request target, less scheme and authority if it is in
// absolute form (RFC 9112, section 3.2). What is no valid target is the client's fault.
func originForm(uri string) (string, error) {
	if uri == "" {
		return "/", nil
	}
	if uri[0] != '/' {
		scheme, rest, ok := strings.Cut(uri, "://")
		if !ok || strings.ContainsAny(scheme, "/?#:") {
			return "", badTarget()
		}
		i := strings.IndexAny(rest, "/?")
		switch {
		case i < 0:
			return "/", nil
		case rest[i] == '?':
			uri = "/" + rest[i:]
		default:
			uri = rest[i:]
		}
	}
	for i := range len(uri) {
		// What would end the request line or the target at the node must not be in it.
		if c := uri[i]; c <= ' ' || c == 0x7f || c == '#' {
			return "", badTarget()
		}
	}
	return uri, nil
}

func badTarget() error {
	return &Error{Status: http.StatusBadRequest, Code: "bad_request", Message: "invalid request target"}
}

func underProxy(path string) bool {
	const prefix = "/proxy"
	return strings.HasPrefix(path, prefix) && (len(path) == len(prefix) || path[len(prefix)] == '/')
}

// label returns the label in front of a configured domain. The bare domain, deeper names, labels
// without a hyphen, addresses and other domains are no sandbox hosts.
func (d Domains) label(host string) (string, bool) {
	if len(d) == 0 || host == "" || host[0] == '[' {
		return "", false
	}
	if i := strings.IndexByte(host, ':'); i >= 0 {
		host = host[:i]
	}
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	for _, domain := range d {
		rest, ok := strings.CutSuffix(host, domain)
		if !ok {
			continue
		}
		label, ok := strings.CutSuffix(rest, ".")
		if !ok || strings.IndexByte(label, '.') >= 0 || strings.IndexByte(label, '-') < 0 {
			continue
		}
		return label, true
	}
	return "", false
}

func parseLabel(label string) (sandbox.ID, uint16, error) {
	refuse := func(why string) (sandbox.ID, uint16, error) {
		return "", 0, &Error{Status: http.StatusBadRequest, Code: "bad_host", Message: "invalid sandbox data-plane host: " + why}
	}
	if len(label) > 63 {
		return refuse("label too long")
	}
	portText, idText, _ := strings.Cut(label, "-")
	if idText == "" {
		return refuse("sandbox id is empty")
	}
	id, err := sandbox.ParseID(idText)
	if err != nil {
		return refuse("sandbox id is invalid")
	}
	port, numeric, ok := parsePort(portText)
	switch {
	case !numeric:
		return refuse("port is not numeric")
	case !ok:
		return refuse("port out of range")
	}
	return id, port, nil
}

// parsePort reads a decimal of 1 to 65535 without sign and leading zero. numeric tells that it is
// such a decimal, be it too large; "0" is numeric and out of range.
func parsePort(s string) (port uint16, numeric, ok bool) {
	if s == "" || s[0] == '0' && len(s) > 1 {
		return 0, false, false
	}
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 0, false, false
		}
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), true, err == nil && n != 0
}

// headerPair is what the routing headers say; present tells that any of the four has a value.
type headerPair struct {
	present bool
	sandbox sandbox.ID
	port    uint16
}

// parsePair reads the pair in both vocabularies. The error tells why it is not complete.
func parsePair(h http.Header) (headerPair, error) {
	var p headerPair
	refuse := func(message string) (headerPair, error) {
		return p, &Error{Status: http.StatusBadRequest, Code: "bad_route", Message: message}
	}
	idText, idConflict := oneValue(h[HeaderSandbox], h[HeaderE2BSandbox])
	portText, portConflict := oneValue(h[HeaderPort], h[HeaderE2BPort])
	p.present = idText != "" || portText != ""
	switch {
	case idConflict:
		return refuse("conflicting sandbox id headers")
	case portConflict:
		return refuse("conflicting target port headers")
	case idText == "":
		return refuse("sandbox id header required")
	}
	id, err := sandbox.ParseID(idText)
	if err != nil {
		return refuse("sandbox id header invalid")
	}
	if portText == "" {
		return refuse("target port header required")
	}
	port, _, ok := parsePort(portText)
	if !ok {
		return refuse("target port header invalid")
	}
	p.sandbox, p.port = id, port
	return p, nil
}

// oneValue returns the one value that all lines of both names agree on; blank is absent.
func oneValue(a, b []string) (value string, conflict bool) {
	for _, lines := range [2][]string{a, b} {
		for _, line := range lines {
			switch line = strings.TrimSpace(line); {
			case line == "" || line == value:
			case value == "":
				value = line
			default:
				return value, true
			}
		}
	}
	return value, false
}

func isPreflight(h http.Header) bool {
	return h.Get("Origin") != "" && h.Get("Access-Control-Request-Method") != ""
}

// asksForRouting tells that a preflight asks for a routing header: it cannot carry a pair itself.
func asksForRouting(h http.Header) bool {
	for _, line := range h["Access-Control-Request-Headers"] {
		for name := range strings.SplitSeq(line, ",") {
			switch http.CanonicalHeaderKey(strings.TrimSpace(name)) {
			case HeaderSandbox, HeaderPort, HeaderE2BSandbox, HeaderE2BPort:
				return true
			}
		}
	}
	return false
}
