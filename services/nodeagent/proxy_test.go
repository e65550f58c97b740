package nodeagent_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

func killProcess(t testing.TB, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatalf("kill %d: %v", pid, err)
	}
}

func head(method, target string, lines ...string) string {
	return method + " " + target + " HTTP/1.1\r\nHost: 3000-s.sbx.test\r\nX-API-Key: " + nodeKey +
		"\r\nx-agentenv-sandbox-id: s\r\nx-agentenv-target-port: 3000\r\n" + strings.Join(append(lines, ""), "\r\n") + "\r\n"
}

func TestBytesArePreserved(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("s", "echo", "")
	a.ask("s", 3000, "/")
	targets := map[string]string{
		"/proxy":                     "/",
		"/proxy?":                    "/?",
		"/proxy?a=b":                 "/?a=b",
		"/proxy/":                    "/",
		"/proxy/?":                   "/?",
		"/proxy//two//slashes/":      "//two//slashes/",
		"/proxy//host/x?y":           "//host/x?y",
		"/proxy//":                   "//",
		"/proxy//odd|\"bytes{}?":     "//odd|\"bytes{}?",
		"/proxy/../a/./b":            "/../a/./b",
		"/proxy/%2e%2E/%2f%zz":       "/%2e%2E/%2f%zz",
		"/proxy/a|b^c\"?d|e=\"f\"#g": "/a|b^c\"?d|e=\"f\"#g",
		"/proxy/proxy/x":             "/proxy/x",
		"/proxy/a?b?c=%20+;d":        "/a?b?c=%20+;d",
		"http://x/proxy/abs?q":       "/abs?q",
		"/proxy/\xc3\xa9":            "/\xc3\xa9",
	}
	for target, want := range targets {
		t.Run(target, func(t *testing.T) {
			text := a.raw(head("GET", target, "Connection: close"))
			resp, err := http.ReadResponse(bufio.NewReader(strings.NewReader(text)), nil)
			if err != nil {
				t.Fatalf("%q: %v", text, err)
			}
			body, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode == http.StatusBadRequest && !json.Valid(body) && strings.Contains(target, "%zz") {
				return // the HTTP parser's word: no valid target
			}
			var dump struct{ Target, Host string }
			if err := json.Unmarshal(body, &dump); err != nil {
				t.Fatalf("%d %q: %v", resp.StatusCode, body, err)
			}
			if dump.Target != want {
				t.Errorf("%q arrived as %q, want %q", target, dump.Target, want)
			}
			if !strings.HasPrefix(target, "http:") && dump.Host != "3000-s.sbx.test" {
				t.Errorf("host arrived as %q", dump.Host)
			}
		})
	}
}

func TestHeadersOnTheWay(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("s", "echo", "")
	a.ask("s", 3000, "/")
	text := a.raw(head("GET", "/proxy/", "Connection: close, X-Hop", "X-Hop: 1", "TE: trailers, deflate", "Keep-Alive: x", "under_score: kept",
		"e2b-sandbox-id: s", "Berth-Route-Revision: 1", "berth-anything: 1", "X-API-Key: the-applications-own", "Upgrade: h2c", "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
	resp, err := http.ReadResponse(bufio.NewReader(strings.NewReader(text)), nil)
	if err != nil {
		t.Fatal(err)
	}
	var dump struct{ Headers http.Header }
	if err := json.NewDecoder(resp.Body).Decode(&dump); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"Te": "trailers", "Under_score": "kept", "X-Api-Key": "the-applications-own", "Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
	for name, values := range dump.Headers {
		if want[name] != strings.Join(values, "|") {
			t.Errorf("the application got %s: %q", name, values)
		}
		delete(want, name)
	}
	if len(want) > 0 {
		t.Errorf("the application did not get %v", want)
	}
}

func TestABodyComesBackAsItArrives(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("s", "echo", "")
	a.ask("s", 3000, "/")
	conn, err := net.Dial("tcp", a.cfg.Listen)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	fmt.Fprint(conn, head("POST", "/proxy/echo", "Transfer-Encoding: chunked", "Trailer: X-Sum, Berth-Sum", "Content-Type: text/x"))
	in := bufio.NewReader(conn)
	chunk := func(text string) { fmt.Fprintf(conn, "%x\r\n%s\r\n", len(text), text) }

	chunk("first")
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatalf("an answer that begins before the body ends: %v", err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != "first" {
		t.Fatalf("first chunk: %q, %v", got, err)
	}
	chunk("second")
	got = make([]byte, 6)
	if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != "second" {
		t.Fatalf("second chunk: %q, %v", got, err)
	}
	fmt.Fprint(conn, "0\r\nX-Sum: 11\r\nBerth-Sum: 12\r\n\r\n")
	if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) != 0 {
		t.Fatalf("rest: %q, %v", rest, err)
	}
	if resp.Trailer.Get("X-Sum") != "11" || resp.Trailer.Get("Berth-Sum") != "" {
		t.Errorf("trailers are %v", resp.Trailer)
	}
	if resp.Header.Get("Content-Type") != "text/x" {
		t.Errorf("content type is %q", resp.Header.Get("Content-Type"))
	}
}

func TestABigBodyPasses(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("s", "echo", "")
	a.ask("s", 3000, "/")
	big := strings.Repeat("0123456789abcdef", 1<<16)
	if r := a.call("POST", "/proxy/echo", big, pair("s", 3000)); r.status != http.StatusOK || r.body != big {
		t.Errorf("1 MiB came back as %d, %d bytes", r.status, len(r.body))
	}
}

func TestABodyThatBreaksOffIsTheClientsFault(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("s", "echo", "")
	a.ask("s", 3000, "/")
	text := a.raw(head("POST", "/proxy/", "Transfer-Encoding: chunked") + "zz\r\n")
	if !strings.HasPrefix(text, "HTTP/1.1 400 ") || !strings.Contains(text, "failed to read request body") {
		t.Errorf("answer is %q", text)
	}
}

func TestAHandshakeWithABodyIsAnOrdinaryRequest(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("s", "echo", "")
	a.ask("s", 3000, "/")
	text := a.raw(head("GET", "/proxy/", "Connection: close, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
		"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Transfer-Encoding: chunked") + "5\r\nhello\r\n0\r\n\r\n")
	// That is what the application says to a key without an offer.
	if !strings.HasPrefix(text, "HTTP/1.1 426 ") {
		t.Errorf("answer is %q", text)
	}
	if r := a.ask("s", 3000, "/"); r.status != http.StatusOK {
		t.Errorf("asked again: %d %q", r.status, r.body)
	}
}

func TestFilesServesTheWorkspace(t *testing.T) {
	t.Parallel()
	a := newAgent(t, func(c *nodeagentConfig) {
		c.Templates = writeFile(t, "t.yaml", "templates:\n  make:\n    command: [sh, -c, 'echo $GREETING > index.txt; exec /.berth/berth berth-sandbox-builtin files']\n    env: {GREETING: no}\n")
	})
	a.run()
	a.create("s", "make", `,"envVars":{"GREETING":"hello"}`)
	if r := a.ask("s", 3000, "/index.txt"); r.status != http.StatusOK || r.body != "hello\n" {
		t.Errorf("%d %q", r.status, r.body)
	}
}
