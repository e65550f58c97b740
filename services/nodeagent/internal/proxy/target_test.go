package proxy

import (
	"bufio"
	"bytes"
	"net"
	"net/http"
	"strings"
	"testing"
)

func TestTarget(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		want string
		ok   bool
	}{
		"/proxy": {"/", true}, "/proxy?": {"/?", true}, "/proxy?a": {"/?a", true}, "/proxy/a?b": {"/a?b", true}, "/proxy//a": {"//a", true},
		"/proxyx": {"", false}, "/": {"", false}, "": {"", false}, "*": {"", false}, "/Proxy/": {"", false}, "/%70roxy/": {"", false},
		"http://h/proxy/a": {"/a", true}, "http://h": {"", false}, "http://h?x": {"", false}, "http:///proxy/": {"/", true},
	}
	for in, tt := range cases {
		if got, ok := Target(in); got != tt.want || ok != tt.ok {
			t.Errorf("Target(%q) = %q, %v, want %q, %v", in, got, ok, tt.want, tt.ok)
		}
	}
}

// written collects what is written to a connection.
type written struct {
	net.Conn
	text bytes.Buffer
}

func (w *written) Write(p []byte) (int, error) { return w.text.Write(p) }

// FuzzRequestLine: whatever target the server accepts arrives in the request line as it was.
func FuzzRequestLine(f *testing.F) {
	for _, seed := range []string{"/proxy//a b", "/proxy/a?b", "/proxy//", "/proxy/-//-x", "/proxy/%zz\"|"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, in string) {
		parsed, err := http.ReadRequest(bufio.NewReader(strings.NewReader("GET " + in + " HTTP/1.1\r\nHost: x\r\n\r\n")))
		if err != nil {
			t.Skip("no request")
		}
		target, ok := Target(parsed.RequestURI)
		if !ok {
			t.Skip("not the data plane")
		}
		u, marked := opaque(target)
		req := &http.Request{Method: "GET", URL: u, Host: "x", Header: http.Header{}}
		w := &written{}
		var out net.Conn = w
		if marked {
			out = &unmarking{Conn: w}
		}
		var head bytes.Buffer
		if err := req.Write(&head); err != nil {
			t.Skip("the transport refuses it")
		}
		if n, err := out.Write(head.Bytes()); err != nil || n != head.Len() {
			t.Fatalf("Write = %d, %v, want %d", n, err, head.Len())
		}
		line, _, _ := strings.Cut(w.text.String(), "\r\n")
		if want := "GET " + target + " HTTP/1.1"; line != want {
			t.Errorf("%q was written as %q, want %q", in, line, want)
		}
	})
}
