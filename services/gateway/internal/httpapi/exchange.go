package httpapi

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"berth/services/gateway/internal/auth"
	"berth/services/gateway/internal/proxy"
	"berth/services/gateway/internal/routecache"
)

// exchange is one request with its answer, and what the log and the metrics say of it at its end. It is
// the ResponseWriter of everything below, and unwraps to the server's own.
type exchange struct {
	http.ResponseWriter
	begun  time.Time
	target proxy.Target
	caller auth.Caller
	trace  string
	route  routecache.Found // zero: not looked up here

	status    int // 0: nothing was answered
	firstByte time.Duration
	in        atomic.Int64 // a body may still be on its way when the answer has ended
	out       int64
	attempts  int
	upgraded  bool
	proxied   bool        // the proxy has counted it already
	quiet     bool        // neither logged nor counted
	unread    atomic.Bool // the client's body has not been read to its end
}

// WriteHeader notes the final status; informational answers pass.
func (x *exchange) WriteHeader(status int) {
	if x.status == 0 && (status >= 200 || status == http.StatusSwitchingProtocols) {
		x.status = status
		x.firstByte = time.Since(x.begun)
		if !x.proxied && x.unread.Load() {
			// Before it answers, the server takes what is left of the body, for as long as that takes.
			_ = http.NewResponseController(x.ResponseWriter).SetReadDeadline(time.Now().Add(restWithin))
		}
	}
	x.ResponseWriter.WriteHeader(status)
}

// Write counts.
func (x *exchange) Write(p []byte) (int, error) {
	if x.status == 0 {
		x.WriteHeader(http.StatusOK)
	}
	n, err := x.ResponseWriter.Write(p)
	x.out += int64(n)
	return n, err
}

// Routed notes how the proxy routed it.
func (x *exchange) Routed(f routecache.Found, retried bool) {
	x.route = f
	if x.attempts = 1; retried {
		x.attempts = 2
	}
}

// Unwrap is for http.ResponseController.
func (x *exchange) Unwrap() http.ResponseWriter { return x.ResponseWriter }

// Hijack gives the connection away: what follows is a tunnel.
func (x *exchange) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := http.NewResponseController(x.ResponseWriter).Hijack()
	if err == nil && x.status == 0 {
		x.status = http.StatusSwitchingProtocols
		x.firstByte = time.Since(x.begun)
		x.upgraded = true
	}
	return conn, buffered, err
}

// counted counts what a client sends.
type counted struct {
	io.ReadCloser
	x *exchange
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.x.in.Add(int64(n))
	if errors.Is(err, io.EOF) {
		c.x.unread.Store(false)
	}
	return n, err
}
