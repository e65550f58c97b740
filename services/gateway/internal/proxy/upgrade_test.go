package proxy

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"berth/pkg/waittest"
)

const handshake = "GET /pty?cols=80 HTTP/1.1\r\nHost: 3000-s1.sbx.test\r\n"

const handshakeRest = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" +
	"Sec-WebSocket-Protocol: tty, v2.tty\r\nSec-WebSocket-Extensions: permessage-deflate\r\nOrigin: https://app.example\r\n" +
	"Authorization: Bearer abc\r\nX-Custom: 1\r\nCookie: a=1\r\nCookie: b=2\r\n"

// echoSocket answers a handshake with 101 and then sends back what it gets. The head it saw goes to
// heads, and done is told when its connection ends.
func echoSocket(heads chan<- string, done chan<- time.Time) func(net.Conn) {
	return func(c net.Conn) {
		r := bufio.NewReader(c)
		head, err := readHead(r)
		if err != nil {
			return
		}
		heads <- head
		if !strings.Contains(head, "Upgrade: ") {
			// What is left unread when it closes would reset the connection, and the answer with it.
			_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
			_, _ = io.Copy(io.Discard, r)
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nplain")
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Protocol: v2.tty\r\n"+
			"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSet-Cookie: c=3\r\nSet-Cookie: d=4\r\nX-App: 1\r\nBerth-Node: full\r\n\r\n")
		_, _ = io.Copy(c, r)
		done <- time.Now()
	}
}

func TestC01TheWholeWebSocketHandshakeReachesTheApp(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	heads, done := make(chan string, 1), make(chan time.Time, 1)
	s.rawNode(echoSocket(heads, done))
	c := s.dial()
	c.send(handshake + "Connection: Upgrade\r\nUpgrade: websocket\r\n" + handshakeRest + "\r\n")
	resp := c.answer("GET")
	head := waittest.Receive(t, "the head at the app", heads)
	for line := range strings.SplitSeq(strings.TrimSuffix(handshakeRest, "\r\n"), "\r\n") {
		name, value, _ := strings.Cut(line, ": ")
		if !strings.Contains(head, http.CanonicalHeaderKey(name)+": "+value+"\r\n") {
			t.Errorf("the app did not see %q in:\n%s", line, head)
		}
	}
	if !strings.HasPrefix(head, "GET /proxy/pty?cols=80 HTTP/1.1\r\n") || !strings.Contains(head, "Connection: Upgrade\r\n") || !strings.Contains(head, "Upgrade: websocket\r\n") {
		t.Errorf("the app saw:\n%s", head)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols || resp.Header.Get("Sec-Websocket-Protocol") != "v2.tty" || resp.Header.Get("X-App") != "1" ||
		len(resp.Header["Set-Cookie"]) != 2 || resp.Header.Get("Sec-Websocket-Accept") == "" || resp.Header.Get("Berth-Node") != "" {
		t.Errorf("the client got %d %v", resp.StatusCode, resp.Header)
	}

	// One byte comes back alone, and a mebibyte whole, while both directions move.
	c.send("x")
	if b, err := c.r.ReadByte(); err != nil || b != 'x' {
		t.Fatalf("one byte came back as %q, %v", b, err)
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	go func() { _, _ = c.Write(big) }()
	got := make([]byte, len(big))
	if _, err := io.ReadFull(c.r, got); err != nil || !bytes.Equal(got, big) {
		t.Errorf("1 MiB did not come back whole: %v", err)
	}
	closed := time.Now()
	c.Close()
	select {
	case at := <-done:
		if took := at.Sub(closed); took > time.Second {
			t.Errorf("the app's side was closed after %s", took)
		}
	case <-time.After(5 * time.Second):
		t.Error("the app's side stayed open")
	}
}

func TestC01AnAppThatClosesClosesTheClient(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.rawNode(func(c net.Conn) {
		if _, err := readHead(bufio.NewReader(c)); err == nil {
			_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nlast words")
		}
	})
	c := s.dial()
	c.send(handshake + "Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	c.answer("GET")
	began := time.Now()
	if got, err := io.ReadAll(c.r); string(got) != "last words" || err != nil {
		t.Errorf("the client got %q, %v", got, err)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("the client was closed after %s", took)
	}
	eventually(t, "the tunnel is over", func() bool { return s.forward.open.len() == 0 })
}

func TestC02ConnectionIsAList(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	heads, done := make(chan string, 1), make(chan time.Time, 9)
	s.rawNode(echoSocket(heads, done))
	for lines, status := range map[string]int{
		"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n":                                           101,
		"Connection: Keep-Alive,upgrade\r\nUpgrade: websocket\r\n":                                            101,
		"Connection: keep-alive\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n":                             101,
		"Connection: UPGRADE\r\nUpgrade: WebSocket\r\n":                                                       101,
		"Connection: upgrade\r\nUpgrade: foo, websocket\r\n":                                                  101,
		"Connection: keep-alive\r\nUpgrade: websocket\r\n":                                                    200,
		"Connection: Upgrade\r\nUpgrade: h2c\r\n":                                                             200,
		"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n": 200,
	} {
		c := s.dial()
		c.send(handshake + lines + "\r\n")
		resp := c.answer("GET")
		head := waittest.Receive(t, "the head at the app", heads)
		if resp.StatusCode != status {
			t.Errorf("%q: %d, want %d", lines, resp.StatusCode, status)
		}
		if status == 200 && (strings.Contains(head, "Upgrade") || strings.Contains(head, "Http2-Settings")) {
			t.Errorf("%q: the app saw an offer:\n%s", lines, head)
		}
		c.Close()
	}
}

func TestAHandshakeWithABodyIsAnOrdinaryRequest(t *testing.T) {
	t.Parallel()
	for name, rest := range map[string]string{
		"a length":              "Content-Length: 5\r\n\r\nhello",
		"chunks":                "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
		"chunks that never end": "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStack(t, nil)
			heads, done := make(chan string, 1), make(chan time.Time, 1)
			s.rawNode(echoSocket(heads, done))
			c := s.dial()
			c.send(handshake + "Connection: Upgrade\r\nUpgrade: websocket\r\n" + rest)
			resp := c.answer("GET")
			if got := body(t, resp); resp.StatusCode != http.StatusOK || got != "plain" {
				t.Errorf("the client got %d %q", resp.StatusCode, got)
			}
			if head := waittest.Receive(t, "the head at the app", heads); strings.Contains(head, "Upgrade") {
				t.Errorf("the app saw an offer:\n%s", head)
			}
		})
	}
}

func TestC04AnAppThatAnswers101WithoutBeingAsked(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.rawNode(func(c net.Conn) {
		head, err := readHead(bufio.NewReader(c))
		if err != nil {
			return
		}
		if strings.Contains(head, "/ok") {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: foo\r\nConnection: Upgrade\r\n\r\nbytes")
		_, _ = c.Read(make([]byte, 1)) // until the gateway closes it
	})
	for _, offer := range []string{"", "Connection: Upgrade\r\nUpgrade: websocket\r\n"} {
		c := s.dial()
		c.send("GET /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + offer + "\r\n")
		resp := c.answer("GET")
		if got := body(t, resp); resp.StatusCode != http.StatusBadGateway || !strings.Contains(got, "unexpected protocol switch") ||
			resp.Header.Get("Upgrade") != "" || resp.Header.Get("Berth-Error") != "bad_answer" {
			t.Errorf("%q: %d %v %s", offer, resp.StatusCode, resp.Header, got)
		}
		c.send("GET /ok HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "\r\n")
		if got := body(t, c.answer("GET")); got != "ok" {
			t.Errorf("the next request got %q", got)
		}
	}
	eventually(t, "nothing is left open", func() bool { return s.forward.open.len() == 0 })
}

func TestC05ARefusedUpgradeIsTheNodesAnswer(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.app(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("E2b-Traffic-Access-Token") != "right" {
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = io.WriteString(w, "no token")
		}
	})
	c := s.dial()
	for range 2 { // the connection stays usable
		c.send(handshake + "Connection: Upgrade\r\nUpgrade: websocket\r\ne2b-traffic-access-token: wrong\r\n" + handshakeRest + "\r\n")
		resp := c.answer("GET")
		if got := body(t, resp); resp.StatusCode != http.StatusUnauthorized || got != "no token" || resp.Header.Get("Location") != "" {
			t.Errorf("%d %q %v", resp.StatusCode, got, resp.Header)
		}
	}
}

func TestStoppingCutsTunnels(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	heads, done := make(chan string, 1), make(chan time.Time, 1)
	s.rawNode(echoSocket(heads, done))
	c := s.dial()
	c.send(handshake + "Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	c.answer("GET")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := s.forward.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := c.r.ReadByte(); err == nil {
		t.Error("the client's tunnel is still open")
	}
	waittest.Receive(t, "the end of the tunnel at the app", done)
}
