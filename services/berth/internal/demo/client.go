package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/coder/websocket"
)

const (
	appPort     = "3000" // where the template echo listens
	callLimit   = 20 * time.Second
	answerLimit = 1 << 20
)

// client speaks to one gateway.
type client struct {
	name string
	base string // http://127.0.0.1:PORT
	key  string
	http *http.Client
}

func (s *story) newClient(gateway int) *client {
	base := s.info.Gateways[gateway]
	address := strings.TrimPrefix(base, "http://")
	dialer := &net.Dialer{}
	return &client{name: fmt.Sprintf("gateway-%d", gateway+1), base: base, key: s.info.APIKey, http: &http.Client{
		Timeout: callLimit,
		// Whatever host a URL names, the bytes go to this gateway; so no name server is needed.
		Transport: &http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, address)
		}},
	}}
}

func (c *client) close() { c.http.CloseIdleConnections() }

// answer is what came back.
type answer struct {
	status int
	body   string
}

func (c *client) do(ctx context.Context, method, url, body string, header map[string]string) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	for name, value := range header {
		req.Header.Set(name, value)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return answer{}, fmt.Errorf("%s %s through %s: %w", method, req.URL.Path, c.name, err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(resp.Body, answerLimit))
	if err != nil {
		return answer{}, fmt.Errorf("%s %s through %s: read the answer: %w", method, req.URL.Path, c.name, err)
	}
	return answer{status: resp.StatusCode, body: string(text)}, nil
}

// want is do for one expected status.
func (c *client) want(ctx context.Context, status int, method, url, body string, header map[string]string) (string, error) {
	got, err := c.do(ctx, method, url, body, header)
	if err != nil {
		return "", err
	}
	if got.status != status {
		return "", fmt.Errorf("%s %s through %s: status %d, want %d: %s", method, url, c.name, got.status, status, got.body)
	}
	return got.body, nil
}

func pair(sandbox string) map[string]string {
	return map[string]string{"x-agentenv-sandbox-id": sandbox, "x-agentenv-target-port": appPort}
}

// host is the sandbox's address at this gateway.
func (c *client) host(sandbox, domain string) string {
	u, err := url.Parse(c.base)
	if err != nil {
		return ""
	}
	return appPort + "-" + sandbox + "." + domain + ":" + u.Port()
}

// create makes a sandbox and returns its id.
func (c *client) create(ctx context.Context) (string, error) {
	body, err := c.want(ctx, http.StatusCreated, "POST", c.base+"/sandboxes", createBody,
		map[string]string{"X-API-Key": c.key, "Content-Type": "application/json"})
	if err != nil {
		return "", err
	}
	var made struct {
		SandboxID string `json:"sandboxID"`
	}
	if err := json.Unmarshal([]byte(body), &made); err != nil || made.SandboxID == "" {
		return "", fmt.Errorf("create through %s: no sandboxID in %q", c.name, body)
	}
	return made.SandboxID, nil
}

const createBody = `{"templateID":"echo","timeout":300}`

// dump is what the template echo says about a request.
type dump struct {
	Sandbox string `json:"sandbox"`
	Method  string `json:"method"`
	Target  string `json:"target"`
	Body    string `json:"body"`
}

// ask sends a GET to the application by the pair and returns its dump.
func (c *client) ask(ctx context.Context, sandbox, target string) (dump, error) {
	body, err := c.want(ctx, http.StatusOK, "GET", c.base+target, "", pair(sandbox))
	if err != nil {
		return dump{}, err
	}
	var got dump
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		return dump{}, fmt.Errorf("GET %s through %s: not what echo answers: %q", target, c.name, body)
	}
	if got.Target != target {
		return dump{}, fmt.Errorf("GET %s through %s: the application saw %q", target, c.name, got.Target)
	}
	return got, nil
}

// talk sends text over a WebSocket and returns what comes back.
func (c *client) talk(ctx context.Context, url, text string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	conn, resp, err := websocket.Dial(ctx, url, &websocket.DialOptions{HTTPClient: &http.Client{Transport: c.http.Transport}})
	if resp != nil && resp.Body != nil {
		defer func() { _ = resp.Body.Close() }()
	}
	if err != nil {
		return "", fmt.Errorf("open WebSocket through %s: %w", c.name, err)
	}
	defer func() { _ = conn.CloseNow() }()
	if err := conn.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
		return "", fmt.Errorf("write to WebSocket through %s: %w", c.name, err)
	}
	_, got, err := conn.Read(ctx)
	if err != nil {
		return "", fmt.Errorf("read from WebSocket through %s: %w", c.name, err)
	}
	return string(got), conn.Close(websocket.StatusNormalClosure, "")
}
