package proxy

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"
)

// Dialer connects to a port of one sandbox.
type Dialer interface {
	Dial(ctx context.Context, port int) (net.Conn, error)
}

// Connections that are kept: few, and for less than the 5 s after which common servers close them.
const (
	keptConns = 32
	keptFor   = 4 * time.Second
)

// Conns is the connections to one sandbox. A request that may be sent twice (GET, HEAD, OPTIONS, no body) takes a kept connection, and is
// sent once more by the transport when that one turns out to be closed; every other has a connection of its own, so that nothing else
// is ever repeated. It is safe for concurrent use.
type Conns struct {
	dialer      Dialer
	kept, fresh *http.Transport
}

// NewConns returns the connections of the sandbox behind d. Close it when the sandbox has ended.
func NewConns(d Dialer) *Conns {
	c := &Conns{dialer: d}
	c.kept = c.newTransport(func(conn net.Conn) net.Conn { return conn })
	c.kept.MaxIdleConnsPerHost, c.kept.IdleConnTimeout = keptConns, keptFor
	c.fresh = c.newTransport(func(conn net.Conn) net.Conn { return conn })
	return c
}

// Close closes the connections nobody uses.
func (c *Conns) Close() {
	c.kept.CloseIdleConnections()
	c.fresh.CloseIdleConnections()
}

func (c *Conns) newTransport(wrap func(net.Conn) net.Conn) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			host, _, err := net.SplitHostPort(address)
			if err != nil {
				return nil, &Error{Dial: true, Cause: err}
			}
			port, err := strconv.Atoi(host)
			if err != nil {
				return nil, &Error{Dial: true, Cause: fmt.Errorf("port %q: %w", host, err)}
			}
			limited, cancel := context.WithTimeout(ctx, dialLimit)
			defer cancel()
			conn, err := c.dialer.Dial(limited, port)
			if err != nil {
				return nil, &Error{Dial: true, Cause: err}
			}
			return wrap(conn), nil
		},
		DisableCompression: true, MaxIdleConnsPerHost: -1,
		ExpectContinueTimeout: continueAfter, MaxResponseHeaderBytes: maxAnswerHeadBytes,
		WriteBufferSize: copyBytes, ReadBufferSize: copyBytes,
	}
}

// kind says which connection a request takes.
type kind int

const (
	ownConn kind = iota
	keptConn
	markedConn // its own, and the marker comes off
)

func kindOf(out *http.Request, marked, upgrade bool) kind {
	switch {
	case marked:
		return markedConn
	case upgrade || out.Body != nil:
		return ownConn
	}
	switch out.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return keptConn
	}
	return ownConn
}

// transport returns the transport for one request, and what to call after it.
func (c *Conns) transport(k kind) (*http.Transport, func()) {
	switch k {
	case keptConn:
		return c.kept, func() {}
	case markedConn:
		once := c.newTransport(func(conn net.Conn) net.Conn { return &unmarking{Conn: conn} })
		return once, once.CloseIdleConnections
	default:
		return c.fresh, func() {}
	}
}
