package proxy

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// http2Client speaks HTTP/2 by prior knowledge to the gateway, whatever host a request names.
func (s *stack) http2Client() *http.Client {
	s.t.Helper()
	transport := &http.Transport{
		Protocols: new(http.Protocols), DisableCompression: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", s.addr)
		},
	}
	transport.Protocols.SetUnencryptedHTTP2(true)
	s.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 10 * time.Second}
}

// http2App makes s1 live on a node that speaks HTTP/2 without TLS, and says so.
func (s *stack) http2App(h http.HandlerFunc) {
	s.t.Helper()
	server := httptest.NewUnstartedServer(h)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	s.t.Cleanup(server.Close)
	s.routes.set("s1", testNode(s.t, server.Listener.Addr().String(), "h2c"), 7)
}

func TestC29HTTP2WithPriorKnowledge(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	release := make(chan struct{})
	s.app(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/stall") {
			w.(http.Flusher).Flush()
			<-release
		}
		b, _ := io.ReadAll(r.Body)
		w.Header().Set("Trailer", "X-Sum")
		fmt.Fprintf(w, "%s %s %s %s", r.RequestURI, r.Host, r.Header.Get("X-Agentenv-Target-Port"), b)
		w.Header().Set("X-Sum", "9")
		w.Header().Set(http.TrailerPrefix+"X-Late", "1")
	})
	client := s.http2Client()
	get := func(url string, header map[string]string, body io.Reader) (*http.Response, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, body)
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range header {
			req.Header.Set(k, v)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp, string(b)
	}
	stalled, err := client.Get("http://3000-s1.sbx.test/stall")
	if err != nil {
		t.Fatal(err)
	}
	defer stalled.Body.Close()
	resp, got := get("http://3000-s1.sbx.test/a%2Fb?c", nil, strings.NewReader("body"))
	if resp.ProtoMajor != 2 || got != "/proxy/a%2Fb?c 3000-s1.sbx.test 3000 body" {
		t.Errorf("by host: HTTP/%d %d %q", resp.ProtoMajor, resp.StatusCode, got)
	}
	if resp.Trailer.Get("X-Sum") != "9" || resp.Trailer.Get("X-Late") != "1" {
		t.Errorf("trailers %v", resp.Trailer)
	}
	resp, got = get("http://gw/x", map[string]string{"e2b-sandbox-id": "s1", "e2b-sandbox-port": "80"}, nil)
	if got != "/proxy/x gw 80 " {
		t.Errorf("by header: %d %q", resp.StatusCode, got)
	}
	resp, got = get("http://gw/x", map[string]string{"e2b-sandbox-id": "s2", "e2b-sandbox-port": "80"}, nil)
	if e := errorOf(t, resp, got); e.ErrorCode != "unknown_sandbox" || e.Code != 502 {
		t.Errorf("%+v", e)
	}
	close(release)
	if b, err := io.ReadAll(stalled.Body); err != nil || !strings.Contains(string(b), "/proxy/stall") {
		t.Errorf("the stalled stream ended as %q, %v", b, err)
	}
}

func TestGRPCGoesByHTTP2ToNodesThatSpeakIt(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.http2App(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Proto", fmt.Sprint(r.ProtoMajor, r.Header.Get("Te")))
		w.Header().Set("Content-Type", "application/grpc")
		if strings.HasSuffix(r.URL.Path, "/Outcome") { // trailers only
			w.Header().Set("Grpc-Status", "5")
			w.Header().Set("Grpc-Message", "none")
			return
		}
		w.WriteHeader(http.StatusOK)
		flush := w.(http.Flusher)
		flush.Flush()
		r2 := bufio.NewReader(r.Body)
		for { // two-way: each line comes back before the next is sent
			line, err := r2.ReadString('\n')
			if err != nil {
				break
			}
			_, _ = io.WriteString(w, "echo "+line)
			flush.Flush()
		}
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
	})
	client := s.http2Client()
	in, out := io.Pipe()
	ask := func(path string, body io.Reader) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://50051-s1.sbx.test"+path, body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/grpc")
		req.Header.Set("Te", "trailers")
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	resp := ask("/svc/Both", in)
	defer resp.Body.Close()
	if resp.Header.Get("X-Proto") != "2trailers" {
		t.Errorf("the node was spoken to as %q", resp.Header.Get("X-Proto"))
	}
	lines := bufio.NewReader(resp.Body)
	for _, word := range []string{"one\n", "two\n", "three\n"} {
		if _, err := io.WriteString(out, word); err != nil {
			t.Fatal(err)
		}
		if got, err := lines.ReadString('\n'); got != "echo "+word {
			t.Fatalf("sent %q, got %q, %v", word, got, err)
		}
	}
	out.Close()
	if rest, err := io.ReadAll(lines); len(rest) != 0 || err != nil || resp.Trailer.Get("Grpc-Status") != "0" {
		t.Errorf("the end: %q, %v, trailers %v", rest, err, resp.Trailer)
	}

	outcome := ask("/svc/Outcome", http.NoBody)
	defer outcome.Body.Close()
	if b, err := io.ReadAll(outcome.Body); len(b) != 0 || err != nil || outcome.Header.Get("Grpc-Status") != "5" || outcome.Header.Get("Grpc-Message") != "none" {
		t.Errorf("an outcome without a body: %q, %v, %v, trailers %v", b, err, outcome.Header, outcome.Trailer)
	}
}

func TestC03ExtendedConnectIsNotAnnouncedAndRefused(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	hits := s.rawNode(func(net.Conn) {})
	c := s.dial()
	c.send(http2.ClientPreface)
	framer := http2.NewFramer(c.Conn, c.r)
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if err := framer.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for _, field := range [][2]string{
		{":method", "CONNECT"},
		{":protocol", "websocket"},
		{":scheme", "http"},
		{":path", "/pty"},
		{":authority", "3000-s1.sbx.test"},
		{"sec-websocket-version", "13"},
	} {
		if err := encoder.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}); err != nil {
			t.Fatal(err)
		}
	}
	if err := framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true}); err != nil {
		t.Fatal(err)
	}
	for refused := false; !refused; {
		frame, err := framer.ReadFrame()
		if err != nil {
			t.Fatalf("no answer: %v", err)
		}
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if value, ok := frame.Value(http2.SettingEnableConnectProtocol); ok && value != 0 {
				t.Error("extended CONNECT is announced")
			}
		case *http2.MetaHeadersFrame:
			refused = true
			if status := frame.PseudoValue("status"); status[0] != '4' && status[0] != '5' {
				t.Errorf("answered with %s", status)
			}
		case *http2.RSTStreamFrame, *http2.GoAwayFrame:
			refused = true
		}
	}
	if hits.Load() != 0 {
		t.Error("the node was asked")
	}
}

func TestC19BigCookies(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.app(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, len(r.Header.Get("Cookie"))) })
	for _, size := range []int{8, 16, 32, 64} {
		resp, got := s.ask("GET /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Cookie: " + strings.Repeat("c", size<<10) + "\r\n\r\n")
		if resp.StatusCode != 200 || got != fmt.Sprint(size<<10) {
			t.Errorf("%d KiB: %d %q", size, resp.StatusCode, got)
		}
	}
	resp, _ := s.ask("GET /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Cookie: " + strings.Repeat("c", 140<<10) + "\r\n\r\n")
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("140 KiB: %d", resp.StatusCode)
	}
}
