package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"berth/services/gateway/internal/routecache"
	"berth/services/internal/route"
)

const (
	idlePerNode       = 1024
	idleNode          = 90 * time.Second // nodes keep theirs longer: the side that reuses closes first
	maxAnswerHead     = 256 << 10
	nodeKeepAlive     = 15 * time.Second
	defaultDialWithin = 2 * time.Second
)

// dialError is a connection that could not be made: nothing was sent.
type dialError struct{ cause error }

func (e *dialError) Error() string { return "dial node: " + e.cause.Error() }
func (e *dialError) Unwrap() error { return e.cause }

// NothingSent tells that err is of a call of which no byte left: it may be made again, elsewhere
// too.
func NothingSent(err error) bool {
	_, ok := errors.AsType[*dialError](err)
	return ok
}

// nodeConn is a connection to a node that tells the exchange on it when it closes.
type nodeConn struct {
	net.Conn
	user atomic.Pointer[exchange]
}

func (c *nodeConn) Close() error {
	err := c.Conn.Close()
	if x := c.user.Load(); x != nil {
		x.lost(c)
	}
	return err
}

// CloseWrite ends our half of a tunnel.
func (c *nodeConn) CloseWrite() error {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return half.CloseWrite()
}

// connections sends requests to nodes. It is where a faster layer of our own would come in.
type connections struct {
	http1 *http.Transport
	http2 *http.Transport // without TLS by prior knowledge, with TLS by ALPN
	fresh *http.Transport // a connection for each call
}

// newConnections returns connections whose every dial is judged by guard, save those to the address
// of a trusted node. Proxy variables are ignored.
func newConnections(guard *route.Guard, trusted func(address string) bool, within time.Duration) *connections {
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		dialer := net.Dialer{Timeout: within, KeepAlive: nodeKeepAlive}
		if !trusted(address) {
			dialer.Control = guard.Control
		}
		conn, err := dialer.DialContext(ctx, network, address)
		if err != nil {
			return nil, &dialError{err}
		}
		return &nodeConn{Conn: conn}, nil
	}
	base := func() *http.Transport {
		return &http.Transport{
			DialContext: dial, MaxIdleConnsPerHost: idlePerNode, IdleConnTimeout: idleNode,
			DisableCompression: true, MaxResponseHeaderBytes: maxAnswerHead, TLSHandshakeTimeout: within,
			TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12},
			WriteBufferSize: 8 << 10, ReadBufferSize: 8 << 10,
		}
	}
	c := &connections{http1: base(), http2: base(), fresh: base()}
	c.http1.Protocols = new(http.Protocols)
	c.http1.Protocols.SetHTTP1(true)
	c.fresh.Protocols, c.fresh.DisableKeepAlives = c.http1.Protocols, true
	c.http2.Protocols = new(http.Protocols)
	c.http2.Protocols.SetUnencryptedHTTP2(true)
	c.http2.Protocols.SetHTTP2(true)
	return c
}

// roundTrip sends r to n and returns its answer. gRPC goes by HTTP/2 to nodes that speak it.
func (c *connections) roundTrip(n *routecache.Node, r *http.Request) (*http.Response, error) {
	if n.H2C && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		return c.http2.RoundTrip(r)
	}
	return c.http1.RoundTrip(r)
}

func (c *connections) close() {
	c.http1.CloseIdleConnections()
	c.http2.CloseIdleConnections()
}

// asNodeConn returns the connection under a TLS layer, if it is ours.
func asNodeConn(conn net.Conn) *nodeConn {
	if secure, ok := conn.(*tls.Conn); ok {
		conn = secure.NetConn()
	}
	c, _ := conn.(*nodeConn)
	return c
}
