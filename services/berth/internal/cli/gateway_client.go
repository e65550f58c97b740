package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

const (
	defaultGatewayURL = "http://127.0.0.1:8080"
	maxAnswerBytes    = 64 << 20
	maxNameBytes      = 512 // of a word of an answer that is shown to people
)

// gatewayFlags is how a command finds a gateway and says who it is.
type gatewayFlags struct {
	url     string
	key     string
	timeout time.Duration
}

func (g *gatewayFlags) flags(fs *pflag.FlagSet, timeout time.Duration) {
	fs.StringVar(&g.url, "gateway-url", defaultGatewayURL, "base `URL` of a gateway")
	fs.StringVar(&g.key, "api-key", "", "API `key`; better given as a variable, for others see command lines")
	fs.DurationVar(&g.timeout, "request-timeout", timeout, "how long to wait for each answer")
}

// gatewayVariables are the variables of gatewayFlags.
func gatewayVariables() map[string][]string {
	return map[string][]string{"gateway-url": {"BERTH_GATEWAY_URL"}, "api-key": {"BERTH_API_KEY"}}
}

// client returns a client for what the flags and variables say.
func (g *gatewayFlags) client(cmd *cobra.Command) (*gatewayClient, error) {
	if err := applyVariables(cmd.Flags()); err != nil {
		return nil, err
	}
	base, err := url.Parse(strings.TrimSuffix(g.url, "/"))
	if err != nil || base.Scheme != "http" && base.Scheme != "https" || base.Host == "" {
		return nil, fmt.Errorf("BERTH_GATEWAY_URL (--gateway-url) %q: a URL like %s is wanted", g.url, defaultGatewayURL)
	}
	if g.key == "" {
		return nil, errors.New("no API key: set BERTH_API_KEY (or --api-key); \"berth dev\" prints the key of its stack")
	}
	if g.timeout <= 0 {
		return nil, fmt.Errorf("--request-timeout %v: a time above 0 is wanted", g.timeout)
	}
	return &gatewayClient{base: base, key: g.key, timeout: g.timeout, http: &http.Client{
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// gatewayClient calls the control plane of one gateway.
type gatewayClient struct {
	base    *url.URL
	key     string
	timeout time.Duration
	http    *http.Client
}

// apiError is an answer of the gateway that says no, by its own words.
type apiError struct {
	Status    int    `json:"-"`
	Message   string `json:"message"`
	ErrorCode string `json:"error_code"`
	RequestID string `json:"requestId"`
}

func (e *apiError) Error() string {
	text := e.Message
	if text == "" {
		text = http.StatusText(e.Status)
	}
	text = oneLine(cut(text, maxNameBytes))
	if e.ErrorCode != "" {
		text += " (" + oneLine(cut(e.ErrorCode, maxNameBytes)) + ")"
	}
	switch e.Status {
	case http.StatusUnauthorized:
		return "the gateway refuses the API key: " + text + "; set BERTH_API_KEY (or --api-key) to a key of this cluster"
	case http.StatusForbidden:
		return "the API key may not do this: " + text + "; use a key that has the scope"
	}
	if e.RequestID != "" {
		text += ", request " + oneLine(cut(e.RequestID, maxNameBytes))
	}
	return fmt.Sprintf("the gateway answered %d: %s", e.Status, text)
}

func cut(s string, n int) string {
	if len(s) > n {
		return s[:n] + "…"
	}
	return s
}

// call sends body as JSON, if there is one, and returns the answer's body and headers. An answer other
// than 2xx is an *apiError.
func (g *gatewayClient) call(ctx context.Context, method, path string, body any) (json.RawMessage, http.Header, error) {
	ctx, cancel := context.WithTimeout(ctx, g.timeout)
	defer cancel()
	var reader io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return nil, nil, fmt.Errorf("write request: %w", err)
		}
		reader = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, g.base.String()+path, reader)
	if err != nil {
		return nil, nil, fmt.Errorf("write request: %w", err)
	}
	req.Header.Set("X-API-Key", g.key)
	req.Header.Set("User-Agent", "berth/"+Version)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := g.http.Do(req)
	if err != nil {
		return nil, nil, g.explain(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes+1))
	if err != nil {
		return nil, nil, fmt.Errorf("read the answer of %s: %w", g.base.Redacted(), err)
	}
	if len(text) > maxAnswerBytes {
		return nil, nil, fmt.Errorf("the answer of %s is larger than %s", g.base.Redacted(), size(maxAnswerBytes))
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return nil, nil, refusal(resp, text)
	}
	return text, resp.Header, nil
}

// refusal reads the error body; one that is not a gateway's stands as its status.
func refusal(resp *http.Response, text []byte) error {
	refused := &apiError{}
	if err := json.Unmarshal(text, refused); err != nil {
		refused = &apiError{Message: "not an answer of a Berth gateway; check BERTH_GATEWAY_URL (--gateway-url)"}
	}
	refused.Status = resp.StatusCode
	return refused
}

// explain says what to do about a gateway that did not answer.
func (g *gatewayClient) explain(err error) error {
	if urlErr, ok := errors.AsType[*url.Error](err); ok {
		err = urlErr.Err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("gateway %s did not answer within %v; try again, or with a longer --request-timeout", g.base.Redacted(), g.timeout)
	}
	if opErr, ok := errors.AsType[*net.OpError](err); ok && opErr.Op == "dial" {
		return fmt.Errorf("gateway %s cannot be reached: %w; start one (berth dev), or set BERTH_GATEWAY_URL (--gateway-url)",
			g.base.Redacted(), opErr.Err)
	}
	return fmt.Errorf("call gateway %s: %w", g.base.Redacted(), err)
}

// decode reads an answer into out; what does not fit is no answer of a gateway.
func decode(text json.RawMessage, out any) error {
	if err := json.Unmarshal(text, out); err != nil {
		return fmt.Errorf("read the gateway's answer: %w; check BERTH_GATEWAY_URL (--gateway-url)", err)
	}
	return nil
}
