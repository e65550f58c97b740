package gateway_test

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

func TestAnAnswerDoesNotWaitForABodyNobodyReads(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"))
	r := s.start(s.config())
	for name, tt := range map[string]struct {
		head   string
		status int
	}{
		"wrong key":     {"POST /sandboxes HTTP/1.1\r\nX-API-Key: wrong\r\n", http.StatusUnauthorized},
		"unknown path":  {"POST /nope HTTP/1.1\r\nX-API-Key: " + apiKey + "\r\n", http.StatusNotFound},
		"bad route":     {"POST /x HTTP/1.1\r\nE2b-Sandbox-Id: a_b\r\n", http.StatusBadRequest},
		"list of nodes": {"GET /nodes HTTP/1.1\r\nX-API-Key: " + apiKey + "\r\n", http.StatusOK},
		"health":        {"POST /health HTTP/1.1\r\n", http.StatusNoContent},
		"wrong key, id": {"POST /sandboxes/nope/timeout HTTP/1.1\r\nX-API-Key: wrong\r\n", http.StatusUnauthorized},
	} {
		for framing, rest := range map[string]string{
			"length": "Content-Length: 100\r\n\r\nabc", "chunks": "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
		} {
			t.Run(name+", "+framing, func(t *testing.T) {
				t.Parallel()
				c, err := net.Dial("tcp", strings.TrimPrefix(r.URL, "http://"))
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = c.Close() }()
				if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
					t.Fatal(err)
				}
				if _, err := fmt.Fprint(c, tt.head+"Host: gw\r\n"+rest); err != nil {
					t.Fatal(err)
				}
				resp, err := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil {
					t.Fatalf("no answer: %v", err)
				}
				if _ = resp.Body.Close(); resp.StatusCode != tt.status {
					t.Errorf("%d, want %d", resp.StatusCode, tt.status)
				}
			})
		}
	}
}
