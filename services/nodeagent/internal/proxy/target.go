package proxy

import (
	"net"
	"net/url"
	"strings"
)

// Prefix is where the data plane is mounted; what follows it is the application's target.
const Prefix = "/proxy"

// Target returns the application's target of a request target as it stood in the request line: without scheme and authority, without
// Prefix. false: the target is not below Prefix.
func Target(requestURI string) (string, bool) {
	rest, found := strings.CutPrefix(originForm(requestURI), Prefix)
	switch {
	case !found:
		return "", false
	case rest == "":
		return "/", true
	case rest[0] == '/':
		return rest, true
	case rest[0] == '?':
		return "/" + rest, true
	}
	return "", false
}

// originForm takes scheme and authority off a target in absolute form.
func originForm(target string) string {
	if target != "" && target[0] == '/' {
		return target
	}
	_, after, found := strings.Cut(target, "://")
	if !found {
		return target
	}
	if i := strings.IndexAny(after, "/?"); i >= 0 {
		if after[i] == '?' {
			return "/" + after[i:]
		}
		return after[i:]
	}
	return "/"
}

// marker stands before a target that begins with two slashes while it is in a URL, which would take it for an authority. The connection
// takes it off again as it writes the request line.
const marker = "/-"

// opaque returns a URL whose request line will have exactly the target. marked: the connection must take the marker off.
func opaque(target string) (u *url.URL, marked bool) {
	path, query, asked := strings.Cut(target, "?")
	marked = strings.HasPrefix(path, "//")
	if marked {
		path = marker + path
	}
	return &url.URL{Scheme: "http", Host: "sandbox", Opaque: path, RawQuery: query, ForceQuery: asked && query == ""}, marked
}

// unmarking is a connection that takes the marker off the first request line it writes. It serves one request.
type unmarking struct {
	net.Conn
	done bool
}

func (c *unmarking) Write(p []byte) (int, error) {
	if c.done {
		return c.Conn.Write(p)
	}
	// The transport writes the head through a buffer, so the method and the marker come in one piece.
	c.done = true
	line := string(p[:min(len(p), maxMethodBytes+len(marker))])
	i := strings.Index(line, " "+marker)
	if i < 0 {
		return c.Conn.Write(p)
	}
	rest := make([]byte, 0, len(p)-len(marker))
	rest = append(rest, p[:i+1]...)
	rest = append(rest, p[i+1+len(marker):]...)
	n, err := c.Conn.Write(rest)
	if n > i {
		n += len(marker)
	}
	return n, err
}

// maxMethodBytes bounds where the target begins in a request line.
const maxMethodBytes = 64
