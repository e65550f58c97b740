package proxy

import (
	"maps"
	"net/http"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// hopByHop are the headers of one connection only, beside what Connection names.
var hopByHop = []string{
	"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer",
	"Transfer-Encoding", "Upgrade",
}

// reserved is the prefix of Berth's own headers: an application neither sees nor sends them.
const reserved = "Berth-"

// removeHop takes hop-by-hop headers off h. A TE that takes trailers stays as that.
func removeHop(h http.Header) {
	trailers := httpguts.HeaderValuesContainsToken(h["Te"], "trailers")
	for _, line := range h["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			if name = strings.TrimSpace(name); name != "" {
				h.Del(name)
			}
		}
	}
	for _, name := range hopByHop {
		h.Del(name)
	}
	if trailers {
		h.Set("Te", "trailers")
	}
}

func removeReserved(h http.Header) {
	for name := range h {
		if len(name) >= len(reserved) && strings.EqualFold(name[:len(reserved)], reserved) {
			delete(h, name)
		}
	}
}

// toApplication returns the headers the application gets: without hop-by-hop ones, without Berth's, without the
// pair that named the sandbox, and without the node's key. upgrade: the request asks for a WebSocket. One with a
// body does not: body and tunnel would be read from one connection at once, which net/http answers by a panic that
// ends the process.
func toApplication(r *http.Request, isNodeKey func(string) bool) (out http.Header, upgrade bool) {
	in := r.Header
	out = in.Clone()
	upgrade = r.ContentLength == 0 && httpguts.HeaderValuesContainsToken(in["Connection"], "upgrade") && httpguts.HeaderValuesContainsToken(in["Upgrade"], "websocket")
	removeHop(out)
	removeReserved(out)
	for _, name := range []string{"X-Agentenv-Sandbox-Id", "X-Agentenv-Target-Port", "E2b-Sandbox-Id", "E2b-Sandbox-Port"} {
		delete(out, name)
	}
	var keys []string
	for _, key := range out["X-Api-Key"] {
		if !isNodeKey(key) { // an application may have keys of its own under that name
			keys = append(keys, key)
		}
	}
	delete(out, "X-Api-Key")
	if keys != nil {
		out["X-Api-Key"] = keys
	}
	if upgrade {
		out.Set("Connection", "Upgrade")
		out.Set("Upgrade", "websocket")
	}
	if _, named := out["User-Agent"]; !named {
		out["User-Agent"] = nil // or the transport adds its own
	}
	return out, upgrade
}

// toClient copies the headers of an application's answer, without hop-by-hop and reserved ones.
func toClient(to, from http.Header) {
	from = from.Clone()
	removeHop(from)
	removeReserved(from)
	maps.Copy(to, from)
}
