//go:build containers

package containers

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/coder/websocket"
)

const (
	domain       = "berth.localhost"
	sandboxPort  = 3000
	requestLimit = 20 * time.Second
	createLimit  = time.Minute
	retryPause   = 200 * time.Millisecond
)

// client speaks to one gateway, whatever the host name says.
type client struct {
	t    *testing.T
	addr string
	key  string
	http *http.Client
}

func (s *stack) gateway(n int) *client {
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(s.ports[n-1]))
	transport := &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		},
	}
	s.t.Cleanup(transport.CloseIdleConnections)
	return &client{t: s.t, addr: addr, key: s.secret("BERTH_API_KEY"), http: &http.Client{Transport: transport, Timeout: requestLimit}}
}

// call sends one request and returns status and body; status 0: nobody answered, and the body says why.
func (c *client) call(method, url string, header map[string]string, body any) (int, []byte) {
	c.t.Helper()
	var payload io.Reader = http.NoBody
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			c.t.Fatal(err)
		}
		payload = bytes.NewReader(text)
	}
	request, err := http.NewRequestWithContext(c.t.Context(), method, url, payload)
	if err != nil {
		c.t.Fatal(err)
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	for name, value := range header {
		request.Header.Set(name, value)
	}
	answer, err := c.http.Do(request)
	if err != nil {
		return 0, []byte(err.Error())
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return 0, []byte(err.Error())
	}
	return answer.StatusCode, text
}

// api calls the control plane.
func (c *client) api(method, path string, body any) (int, []byte) {
	c.t.Helper()
	return c.call(method, "http://"+c.addr+path, map[string]string{"X-API-Key": c.key}, body)
}

// create makes a sandbox. While the stack comes up there may be no gateway or no node yet; it then asks again.
func (c *client) create() string {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), createLimit)
	defer cancel()
	for {
		status, body := c.api(http.MethodPost, "/sandboxes", map[string]any{"templateID": "echo", "timeout": 600})
		if status == http.StatusCreated {
			var made struct{ SandboxID string }
			if err := json.Unmarshal(body, &made); err != nil || made.SandboxID == "" {
				c.t.Fatalf("create answers %s: %v", body, err)
			}
			return made.SandboxID
		}
		if status != 0 && status < http.StatusInternalServerError {
			c.t.Fatalf("create answers %d %s, want 201", status, body)
		}
		select {
		case <-ctx.Done():
			c.t.Fatalf("no sandbox within %s; the last answer: %d %s", createLimit, status, body)
		case <-time.After(retryPause):
		}
	}
}

// use talks to the server in a sandbox in the three ways of a client and wants its own words back.
func (c *client) use(id string) {
	c.t.Helper()
	byPair := map[string]string{"x-agentenv-sandbox-id": id, "x-agentenv-target-port": strconv.Itoa(sandboxPort)}
	c.wantDump(id, "header pair", "http://"+c.addr+"/by-pair?x=1", byPair)
	host := fmt.Sprintf("%d-%s.%s", sandboxPort, id, domain)
	c.wantDump(id, "host name", "http://"+host+"/by-host", nil)

	ctx, cancel := context.WithTimeout(c.t.Context(), requestLimit)
	defer cancel()
	socket, _, err := websocket.Dial(ctx, "ws://"+host+"/socket", &websocket.DialOptions{HTTPClient: c.http})
	if err != nil {
		c.t.Fatalf("WebSocket to %s: %v", host, err)
	}
	defer socket.CloseNow()
	sent := "hello " + id
	if err := socket.Write(ctx, websocket.MessageText, []byte(sent)); err != nil {
		c.t.Fatalf("WebSocket to %s: %v", host, err)
	}
	if _, got, err := socket.Read(ctx); err != nil || string(got) != sent {
		c.t.Fatalf("WebSocket to %s: got %q, %v; want %q", host, got, err, sent)
	}
}

func (c *client) wantDump(id, way, url string, header map[string]string) {
	c.t.Helper()
	status, body := c.call(http.MethodGet, url, header, nil)
	var dump struct{ Sandbox, Path string }
	if err := json.Unmarshal(body, &dump); status != http.StatusOK || err != nil || dump.Sandbox != id {
		c.t.Fatalf("%s by %s: %d %s (%v), want 200 and the dump of sandbox %s", url, way, status, body, err, id)
	}
}

// remove deletes a sandbox and wants it gone for this gateway.
func (c *client) remove(id string) {
	c.t.Helper()
	if status, body := c.api(http.MethodDelete, "/sandboxes/"+id, nil); status != http.StatusNoContent {
		c.t.Fatalf("delete %s: %d %s, want 204", id, status, body)
	}
	if status, body := c.api(http.MethodGet, "/sandboxes/"+id, nil); status != http.StatusNotFound {
		c.t.Fatalf("get %s after its delete: %d %s, want 404", id, status, body)
	}
}
