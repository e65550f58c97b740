package proxy

import (
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"

	"berth/services/internal/sandbox"
)

// hopByHop tells that a header, by its canonical name, is about one connection only. TE and Upgrade
// are put back where they are meant.
func hopByHop(name string) bool {
	switch name {
	case "Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade":
		return true
	}
	return false
}

// reserved tells that a header is Berth's own: clients, nodes and applications cannot set it.
func reserved(name string) bool { return strings.HasPrefix(name, "Berth-") }

// hasToken tells whether a comma-separated header has token, in any case, in any of its lines.
func hasToken(lines []string, token string) bool {
	for _, line := range lines {
		if len(line) == len(token) && strings.EqualFold(line, token) {
			return true
		}
		for item := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(item), token) {
				return true
			}
		}
	}
	return false
}

// removeNamed removes what the lines of a Connection header name from h.
func removeNamed(h http.Header, connection []string) {
	for _, line := range connection {
		for item := range strings.SplitSeq(line, ",") {
			switch name := http.CanonicalHeaderKey(strings.TrimSpace(item)); name {
			case "", "Close", "Keep-Alive", "Upgrade":
			default:
				delete(h, name)
			}
		}
	}
}

// passHeader copies what may go on of src to dst, both ways of an exchange and 1xx answers alike.
func passHeader(dst, src http.Header) {
	for name, values := range src {
		if !hopByHop(name) && !reserved(name) {
			dst[name] = values
		}
	}
	if connection := src["Connection"]; len(connection) > 0 {
		removeNamed(dst, connection)
	}
}

// websocketOffer returns the upgrade token of a request that offers WebSocket, as it is spelled, ""
// for every other request. One with a body is ordinary: its body and the tunnel's bytes would be read
// from one connection at once, which net/http answers by a panic that ends the process.
func websocketOffer(r *http.Request) string {
	offers := r.Header["Upgrade"]
	if len(offers) == 0 || r.Method != http.MethodGet || r.ProtoMajor != 1 || r.ProtoMinor < 1 || !hasToken(r.Header["Connection"], "upgrade") {
		return ""
	}
	if r.ContentLength != 0 { // -1 where it is chunked
		return ""
	}
	for _, line := range offers {
		for item := range strings.SplitSeq(line, ",") {
			if item = strings.TrimSpace(item); strings.EqualFold(item, "websocket") {
				return item
			}
		}
	}
	return ""
}

// outgoing has what the header of a request to a node is made of.
type outgoing struct {
	client  *http.Request
	raw     string // the target as the client sent it
	upgrade string // the token to offer, "" for an ordinary request
	trusted []netip.Prefix
	keepKey func(values []string) []string // what of X-API-Key goes on
	sandbox sandbox.ID                     // with a port: the pair
	port    uint16
}

// header returns the header a node gets: first what is only about the client's connection is taken
// off, then ours is set, so that no Connection header can remove it.
func (o *outgoing) header() http.Header {
	in := o.client.Header
	out := make(http.Header, len(in)+12)
	var set values
	peer, trusted := o.peer()
	passHeader(out, in)
	for name := range out {
		switch name {
		case HeaderSandbox, HeaderPort, HeaderE2BSandbox, HeaderE2BPort:
			delete(out, name)
		case "Forwarded", "X-Real-Ip":
			if !trusted {
				delete(out, name)
			}
		default:
			if !trusted && strings.HasPrefix(name, "X-Forwarded-") {
				delete(out, name)
			}
		}
	}
	if keys, ok := out["X-Api-Key"]; ok {
		if keys = o.keepKey(keys); len(keys) == 0 {
			delete(out, "X-Api-Key")
		} else {
			out["X-Api-Key"] = keys
		}
	}
	// The transport repeats a bodiless POST that has one of these, by its canonical key.
	for _, name := range [...]string{"Idempotency-Key", "X-Idempotency-Key"} {
		if values, ok := out[name]; ok {
			delete(out, name)
			out[strings.ToLower(name)] = values
		}
	}
	if hasToken(in["Te"], "trailers") {
		out["Te"] = set.one("trailers")
	}
	if o.upgrade != "" {
		out["Connection"] = set.one("Upgrade")
		out["Upgrade"] = set.one(o.upgrade)
	}
	if _, ok := out["User-Agent"]; !ok {
		out["User-Agent"] = set.one("") // the transport would add its own
	}
	out[headerRequestID] = set.one(RequestID(o.client))
	o.forwarded(out, &set, peer, trusted)
	if o.port != 0 {
		out[HeaderSandbox] = set.one(string(o.sandbox))
		out[HeaderPort] = set.one(strconv.Itoa(int(o.port)))
	}
	return out
}

// forwarded tells the node who asked and how. What a trusted front says about that stays.
func (o *outgoing) forwarded(out http.Header, set *values, peer string, trusted bool) {
	proto := "http"
	if o.client.TLS != nil {
		proto = "https"
	}
	chain := peer
	if earlier := out["X-Forwarded-For"]; trusted && len(earlier) > 0 {
		chain = strings.Join(earlier, ", ") + ", " + peer
	}
	out["X-Forwarded-For"] = set.one(chain)
	if _, ok := out["X-Forwarded-Host"]; !ok {
		out["X-Forwarded-Host"] = set.one(o.client.Host)
	}
	if _, ok := out["X-Forwarded-Proto"]; !ok {
		out["X-Forwarded-Proto"] = set.one(proto)
	}
	out["X-Forwarded-Method"] = set.one(o.client.Method)
	out["X-Forwarded-Uri"] = set.one(o.raw)
}

// values makes one-line header values out of one array: a request gets a dozen of them.
type values struct{ free []string }

func (v *values) one(s string) []string {
	if len(v.free) == 0 {
		v.free = make([]string, 12)
	}
	line := v.free[:1:1]
	v.free = v.free[1:]
	line[0] = s
	return line
}

// peer returns the address at the other end of the client's connection, and whether it is a front
// that may speak for others.
func (o *outgoing) peer() (string, bool) {
	host, _, err := net.SplitHostPort(o.client.RemoteAddr)
	if err != nil {
		return o.client.RemoteAddr, false
	}
	return host, trustedPeer(host, o.trusted)
}

func trustedPeer(host string, prefixes []netip.Prefix) bool {
	if len(prefixes) == 0 {
		return false
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return false
	}
	for _, prefix := range prefixes {
		if prefix.Contains(addr.Unmap().WithZone("")) {
			return true
		}
	}
	return false
}

// forbiddenTrailer tells that a field may never be a trailer: it would change how the message or
// the next one is read.
func forbiddenTrailer(name string) bool {
	switch http.CanonicalHeaderKey(name) {
	case "Content-Length", "Transfer-Encoding", "Host", "Trailer":
		return true
	}
	return reserved(http.CanonicalHeaderKey(name))
}
