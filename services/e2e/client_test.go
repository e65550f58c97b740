package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
)

const (
	appPort   = "3000" // of the built-in templates
	callLimit = 60 * time.Second
)

// client speaks to one gateway, whatever host a URL names.
type client struct {
	base, key, domain string
	http              *http.Client
}

func (s *stack) client(gateway int) *client {
	base := s.Gateways[gateway]
	dialer := &net.Dialer{}
	transport := &http.Transport{
		MaxIdleConnsPerHost: 64,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, strings.TrimPrefix(base, "http://"))
		},
	}
	s.t.Cleanup(transport.CloseIdleConnections)
	return &client{base: base, key: s.APIKey, domain: s.Domain, http: &http.Client{Transport: transport, Timeout: callLimit}}
}

// do sends one request and returns status and body.
func (c *client) do(ctx context.Context, method, url, body string, header ...string) (int, string, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

// api calls the control plane.
func (c *client) api(ctx context.Context, method, path, body string) (int, string, error) {
	return c.do(ctx, method, c.base+path, body, "X-API-Key", c.key, "Content-Type", "application/json")
}

// create makes a sandbox and returns its id.
func (c *client) create(ctx context.Context, template string) (string, error) {
	status, body, err := c.api(ctx, "POST", "/sandboxes", `{"templateID":"`+template+`","timeout":600}`)
	if err != nil {
		return "", err
	}
	if status != http.StatusCreated {
		return "", fmt.Errorf("create: status %d: %s", status, body)
	}
	var made struct {
		SandboxID string `json:"sandboxID"`
	}
	if err := json.Unmarshal([]byte(body), &made); err != nil || made.SandboxID == "" {
		return "", fmt.Errorf("create: no sandboxID in %s", body)
	}
	return made.SandboxID, nil
}

// byPair asks the application by headers and returns the target it saw.
func (c *client) byPair(ctx context.Context, id, target string) (string, error) {
	status, body, err := c.do(ctx, "GET", c.base+target, "", "x-agentenv-sandbox-id", id, "x-agentenv-target-port", appPort)
	return seen(status, body, err)
}

// byHost asks the application by host name and returns the target it saw.
func (c *client) byHost(ctx context.Context, id, target string) (string, error) {
	status, body, err := c.do(ctx, "GET", "http://"+c.host(id)+target, "")
	return seen(status, body, err)
}

func seen(status int, body string, err error) (string, error) {
	if err != nil {
		return "", err
	}
	var dump struct {
		Target string `json:"target"`
	}
	if err := json.Unmarshal([]byte(body), &dump); status != http.StatusOK || err != nil {
		return "", fmt.Errorf("status %d: %s", status, body)
	}
	return dump.Target, nil
}

func (c *client) host(id string) string {
	u, err := url.Parse(c.base)
	if err != nil {
		return ""
	}
	return appPort + "-" + id + "." + c.domain + ":" + u.Port()
}

// chat sends text over a WebSocket by host name and returns what comes back.
func (c *client) chat(ctx context.Context, id, text string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	conn, _, err := websocket.Dial(ctx, "ws://"+c.host(id)+"/chat", &websocket.DialOptions{HTTPClient: &http.Client{Transport: c.http.Transport}})
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.CloseNow() }()
	if err := conn.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
		return "", err
	}
	_, got, err := conn.Read(ctx)
	return string(got), err
}

// remove deletes a sandbox.
func (c *client) remove(ctx context.Context, id string) error {
	status, body, err := c.api(ctx, "DELETE", "/sandboxes/"+id, "")
	if err == nil && status != http.StatusNoContent {
		err = fmt.Errorf("delete: status %d: %s", status, body)
	}
	return err
}

// life creates, uses and deletes one sandbox.
func (c *client) life(ctx context.Context) error {
	id, err := c.create(ctx, "echo")
	if err != nil {
		return err
	}
	target, err := c.byPair(ctx, id, "/life")
	if err != nil || target != "/life" {
		return fmt.Errorf("use %s: %q, %w", id, target, err)
	}
	return c.remove(ctx, id)
}

func must[T any](t *testing.T) func(value T, err error) T {
	return func(value T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}
