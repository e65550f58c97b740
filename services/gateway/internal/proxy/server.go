package proxy

import (
	"net/http"
	"time"
)

// Configure sets what an http.Server that serves exchanges needs: HTTP/1.1 and HTTP/2, with and
// without TLS; limits on the head of a request and on idle connections, none on the length of an
// exchange. maxHeaderBytes bounds the head of a request.
func Configure(s *http.Server, maxHeaderBytes int) {
	s.Protocols = new(http.Protocols)
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetHTTP2(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	s.ReadHeaderTimeout = 10 * time.Second
	s.IdleTimeout = 620 * time.Second // longer than a balancer's: the side that reuses closes first
	s.MaxHeaderBytes = maxHeaderBytes
	s.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: 250, MaxReceiveBufferPerStream: 1 << 20}
}
