package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"berth/pkg/waittest"
)

func TestPathAndQueryReachTheNodeByteForByte(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.app(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.RequestURI) })
	targets := []string{
		"/", "/?", "/x?", "/a%2Fb/../c//d/./e", "/%7e~?q=a+b%20c;d&e=%zz", "//double//", "/proxyfoo", "/a?b?c",
		"/\xc3\xa4?\xff", "/a|b^c`d{e}\"<>?|^`{}\"<>", "/A%2f%2F%41?%41", "/" + strings.Repeat("x", 8000),
	}
	for _, target := range targets {
		for name, c := range map[string]struct{ host, pair, want string }{
			"by host":   {"3000-s1." + domain, "", "/proxy" + target},
			"by header": {"10.0.0.5:3002", pairOfS1, "/proxy" + target},
		} {
			resp, got := s.ask("GET " + target + " HTTP/1.1\r\nHost: " + c.host + "\r\n" + c.pair + "Connection: close\r\n\r\n")
			if resp.StatusCode != http.StatusOK || got != c.want {
				t.Errorf("%s: GET %.60q reached the node as %d %.80q, want %.80q", name, target, resp.StatusCode, got, c.want)
			}
		}
	}
	for name, c := range map[string]struct{ request, want string }{
		"/proxy by header is kept":            {"GET /proxy/x?y HTTP/1.1\r\nHost: h\r\n" + pairOfS1, "/proxy/x?y"},
		"/proxy alone by header is kept":      {"GET /proxy HTTP/1.1\r\nHost: h\r\n" + pairOfS1, "/proxy"},
		"/proxy by host is the application's": {"GET /proxy/x HTTP/1.1\r\nHost: 3000-s1.sbx.test\r\n", "/proxy/proxy/x"},
		"absolute form loses its authority":   {"GET http://3000-s1.sbx.test/a%20b?c HTTP/1.1\r\nHost: other\r\n", "/proxy/a%20b?c"},
		"absolute form without a path":        {"GET http://3000-s1.sbx.test?c HTTP/1.1\r\nHost: other\r\n", "/proxy/?c"},
		"a control path goes as it is":        {"GET /sandboxes/s1?a=%2F HTTP/1.1\r\nHost: h\r\n", "/sandboxes/s1?a=%2F"},
	} {
		if _, got := s.ask(c.request + "Connection: close\r\n\r\n"); got != c.want {
			t.Errorf("%s: the node saw %q, want %q", name, got, c.want)
		}
	}
}

func TestTheNodeSeesOnePairAndOurHeaders(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.app(dump, "route_revision")
	// C-11: a client that names the gateway's headers in Connection.
	_, got := s.ask("GET /x?y HTTP/1.1\r\nHost: 3000-s1.sbx.test\r\nX-Mine: 1\r\nX-Kept: 2\r\nodd_name: 3\r\n" +
		"Connection: close, x-mine, e2b-sandbox-id, e2b-sandbox-port, x-agentenv-sandbox-id, x-forwarded-for, x-forwarded-host, berth-route-revision\r\n" +
		"e2b-sandbox-id: other\r\ne2b-sandbox-port: 9\r\nX-Forwarded-For: 6.6.6.6\r\nX-Forwarded-Prefix: /p\r\nForwarded: for=6.6.6.6\r\nX-Real-IP: 6.6.6.6\r\n" +
		"Keep-Alive: 1\r\nProxy-Authorization: p\r\nTE: gzip, trailers\r\nUpgrade: h2c\r\nBerth-Route-Revision: 99\r\nBerth-Reservation: r\r\n" +
		"X-API-Key: " + validKey + "\r\nX-Request-Id: my.id-1\r\n\r\n")
	for _, want := range []string{
		"GET /proxy/x?y HTTP/1.1\n", "Host: 3000-s1.sbx.test\n", "X-Agentenv-Sandbox-Id: s1\r\n", "X-Agentenv-Target-Port: 3000\r\n",
		"X-Forwarded-For: 127.0.0.1\r\n", "X-Forwarded-Host: 3000-s1.sbx.test\r\n", "X-Forwarded-Proto: http\r\n",
		"X-Forwarded-Method: GET\r\n", "X-Forwarded-Uri: /x?y\r\n", "Te: trailers\r\n", "X-Kept: 2\r\n", "Odd_name: 3\r\n",
		"Berth-Route-Revision: 7\r\n", "Berth-Incarnation: 1\r\n", "X-Request-Id: my.id-1\r\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("the node did not see %q in:\n%s", want, got)
		}
	}
	for _, unwanted := range []string{
		"X-Mine", "E2b-Sandbox", "6.6.6.6", "Keep-Alive", "Proxy-Auth", "Upgrade", "Connection", "Reservation", validKey, "X-Api-Key",
		"User-Agent", "Accept-Encoding", "X-Forwarded-Prefix",
	} {
		if strings.Contains(got, unwanted) {
			t.Errorf("the node saw %q in:\n%s", unwanted, got)
		}
	}
}

func TestAnApplicationKeepsItsOwnKeyAndMarkers(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.app(dump)
	_, got := s.ask("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "X-API-Key: the-apps-own\r\nIdempotency-Key: k1\r\nUser-Agent: me/1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
	for _, want := range []string{"X-Api-Key: the-apps-own\r\n", "Idempotency-Key: k1\r\n", "User-Agent: me/1\r\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("the node did not see %q in:\n%s", want, got)
		}
	}
	if strings.Contains(got, "Berth-") {
		t.Errorf("a node without route_revision saw a Berth header:\n%s", got)
	}
	_, got = s.ask("POST /sandboxes/s1/pause HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "X-API-Key: " + validKey + "\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
	if !strings.Contains(got, "X-Api-Key: "+nodeKey+"\r\n") || strings.Contains(got, validKey) || strings.Contains(got, "Sandbox-Id") || !strings.HasSuffix(got, "\n{}") {
		t.Errorf("on the control plane the node saw:\n%s", got)
	}
}

func TestC06TheAppsOwnErrorsStayTheApps(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	sent := 0
	status := 0
	s.app(func(w http.ResponseWriter, _ *http.Request) {
		sent++
		h := w.Header()
		h.Set("Content-Type", "application/problem+json")
		h.Set("X-App", "1")
		h.Set("Retry-After", "7")
		h.Set("Berth-Error", "forged")
		h.Set("Berth-Node", "stale; revision=99")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, `{"app":true}`)
	})
	for _, status = range []int{400, 401, 404, 409, 418, 421, 429, 431, 500, 502, 503, 504} {
		sent = 0
		resp, got := s.ask("GET / HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Connection: close\r\n\r\n")
		if resp.StatusCode != status || got != `{"app":true}` || resp.Header.Get("X-App") != "1" || resp.Header.Get("Retry-After") != "7" ||
			resp.Header.Get("Content-Type") != "application/problem+json" || sent != 1 {
			t.Errorf("the app's %d came as %d %q %v after %d requests", status, resp.StatusCode, got, resp.Header, sent)
		}
		if resp.Header.Get("Berth-Error") != "" || resp.Header.Get("Berth-Node") != "" {
			t.Errorf("the app's marks went on: %v", resp.Header)
		}
	}
	if len(s.routes.rechecks) != 0 {
		t.Errorf("the app made the gateway look again: %v", s.routes.rechecks)
	}
}

func TestC09CompressedBodiesAreNotTouched(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.app(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Asked", strings.Join(r.Header["Accept-Encoding"], "|"))
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Set("Content-Length", "9")
		_, _ = io.WriteString(w, "not-gzip!")
	})
	for _, accept := range []string{"", "gzip", "br, zstd"} {
		line := ""
		if accept != "" {
			line = "Accept-Encoding: " + accept + "\r\n"
		}
		resp, got := s.ask("GET / HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + line + "Connection: close\r\n\r\n")
		if resp.Header.Get("X-Asked") != accept || got != "not-gzip!" || resp.Header.Get("Content-Encoding") != "gzip" || resp.ContentLength != 9 {
			t.Errorf("with %q: app was asked %q, client got %q %v", accept, resp.Header.Get("X-Asked"), got, resp.Header)
		}
	}
}

func TestC15Trailers(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	seen := make(chan string, 1)
	s.rawNode(func(c net.Conn) {
		r := bufio.NewReader(c)
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, req.Body)
		seen <- fmt.Sprint(req.Header.Get("Te"), req.Trailer)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n2\r\nhi\r\n0\r\nX-Sum: 9\r\nX-Late: 1\r\nContent-Length: 7\r\n\r\n")
	})
	for name, trailer := range map[string]string{"announced": "Trailer: X-Req-Sum\r\n", "not announced": ""} {
		resp, got := s.ask("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "TE: trailers\r\n" + trailer +
			"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n0\r\nX-Req-Sum: 2\r\n\r\n")
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: the client got %d %q", name, resp.StatusCode, got)
		}
		if saw := waittest.Receive(t, "what the app saw", seen); saw != "trailersmap[X-Req-Sum:[2]]" {
			t.Errorf("%s: the app saw %s", name, saw)
		}
		if got != "hi" || resp.Trailer.Get("X-Sum") != "9" || resp.Trailer.Get("X-Late") != "1" || resp.Trailer.Get("Content-Length") != "" {
			t.Errorf("%s: the client got %q with trailers %v", name, got, resp.Trailer)
		}
	}
}

func TestTrailersLookTheSameWithoutABody(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.rawNode(func(c net.Conn) {
		if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nGrpc-Status: 5\r\n\r\n")
		}
	})
	resp, got := s.ask("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "TE: trailers\r\nContent-Type: application/grpc\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
	if got != "" || resp.Trailer.Get("Grpc-Status") != "5" {
		t.Errorf("got %q, trailers %v", got, resp.Trailer)
	}
}

func TestC16RedirectsAreAnswersNotInstructions(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	elsewhere, visits := listen(t, func(net.Conn) {})
	status := 0
	s.app(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Location", "http://"+elsewhere+"/")
		w.WriteHeader(status)
	})
	for _, status = range []int{301, 302, 307, 308} {
		resp, _ := s.ask("GET / HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Connection: close\r\n\r\n")
		if resp.StatusCode != status || resp.Header.Get("Location") != "http://"+elsewhere+"/" {
			t.Errorf("data plane: %d %v, want %d", resp.StatusCode, resp.Header, status)
		}
		resp, got := s.ask("GET /sandboxes/s1 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
		if resp.StatusCode != http.StatusBadGateway || resp.Header.Get("Location") != "" || !strings.Contains(got, `"error_code":"bad_answer"`) {
			t.Errorf("control plane: a %d came as %d %v %s", status, resp.StatusCode, resp.Header, got)
		}
	}
	if visits.Load() != 0 {
		t.Errorf("the redirect was followed %d times", visits.Load())
	}
}

func TestInformationalAnswersPassWithoutHopByHop(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.rawNode(func(c net.Conn) {
		if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
			_, _ = io.WriteString(c, "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nConnection: x-hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nBerth-Node: full\r\n\r\n"+
				"HTTP/1.1 201 Created\r\nContent-Length: 2\r\nX-Final: 1\r\n\r\nok")
		}
	})
	c := s.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "\r\n")
	hints := c.answer("GET")
	if hints.StatusCode != http.StatusEarlyHints || hints.Header.Get("Link") != "</a>" || len(hints.Header) != 1 {
		t.Errorf("first answer %d %v, want 103 with Link alone", hints.StatusCode, hints.Header)
	}
	final := c.answer("GET")
	if got := body(t, final); final.StatusCode != http.StatusCreated || got != "ok" || final.Header.Get("Link") != "" {
		t.Errorf("final answer %d %q %v", final.StatusCode, got, final.Header)
	}
}

func TestHeadAndEmptyAnswersPass(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.app(func(w http.ResponseWriter, r *http.Request) {
		status, _ := strconv.Atoi(r.URL.Path[len("/proxy/"):])
		w.Header().Set("X-App", "1")
		if r.Method == http.MethodHead {
			w.Header().Set("Content-Length", "1234")
		}
		w.WriteHeader(status)
	})
	c := s.dial() // all on one connection: a body where none belongs would break the next
	for _, tt := range []struct{ method, path, length string }{
		{"HEAD", "200", "1234"}, {"GET", "204", ""}, {"GET", "304", ""}, {"GET", "200", "0"}, {"DELETE", "204", ""},
	} {
		c.send(tt.method + " /" + tt.path + " HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "\r\n")
		resp := c.answer(tt.method)
		if got := body(t, resp); strconv.Itoa(resp.StatusCode) != tt.path || got != "" || resp.Header.Get("Content-Length") != tt.length || resp.Header.Get("X-App") != "1" {
			t.Errorf("%s %s: %d %q %v", tt.method, tt.path, resp.StatusCode, got, resp.Header)
		}
	}
}

func TestAnAnswerWithoutATypeStaysWithoutOne(t *testing.T) {
	t.Parallel()
	s := newStack(t, nil)
	s.app(func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Content-Type"] = nil
		_, _ = io.WriteString(w, "<html>")
	})
	for plane, request := range map[string]string{
		"data":    "GET /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1,
		"control": "GET /sandboxes/s1/logs HTTP/1.1\r\nHost: h\r\n",
	} {
		resp, got := s.ask(request + "Connection: close\r\n\r\n")
		if values, typed := resp.Header["Content-Type"]; typed || got != "<html>" {
			t.Errorf("%s: %q came as %q", plane, got, values)
		}
	}
}
