package api

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"berth/migrations"
	"berth/pkg/pgtest"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/nodes"
	"berth/services/scheduler/internal/p2p"
	"berth/services/scheduler/internal/placement"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, goleak.IgnoreCurrent()) }

// The tokens of the harness, by role.
const (
	nodeToken       = "node-token"
	gatewayToken    = "gateway-token"
	dispatcherToken = "dispatcher-token"
	operatorToken   = "operator-token"
)

// harness is a Server on two real listeners over a database of its own.
type harness struct {
	db       *pgtest.Database
	server   *Server
	nodes    *nodes.Nodes
	registry *prometheus.Registry
	log      *bytes.Buffer
	twirpURL string
	conn     *grpc.ClientConn
}

func allTokens() TokenConfig {
	return TokenConfig{
		Node: []string{"old", nodeToken}, Gateway: []string{gatewayToken},
		Dispatcher: []string{dispatcherToken}, Operator: []string{operatorToken},
	}
}

// newHarness serves with tokens; change adapts what the server works with.
func newHarness(t *testing.T, tokens TokenConfig, limits placement.Limits, change ...func(*Deps)) *harness {
	t.Helper()
	h := &harness{db: pgtest.New(t, migrations.FS), registry: prometheus.NewRegistry(), log: &bytes.Buffer{}}
	db := h.db.As(t, "berth_scheduler")
	log := slog.New(slog.NewTextHandler(&locked{w: h.log}, &slog.HandlerOptions{Level: slog.LevelWarn}))
	guard, err := route.NewGuard(route.GuardConfig{CIDRs: route.DefaultCIDRs, Schemes: route.DefaultSchemes, Loopback: true})
	if err != nil {
		t.Fatal(err)
	}
	cfg := placement.DefaultConfig()
	cfg.Limits = limits
	placer := placement.New(db, cfg, log, h.registry)
	routes := bindings.New(db, bindings.DefaultConfig(), log, h.registry)
	h.nodes = nodes.New(db, routes, nodes.DefaultConfig(), guard, log, h.registry)
	deps := Deps{
		Placer: placer, Bindings: routes, Nodes: h.nodes, P2P: p2p.New(db, p2p.DefaultConfig(), log, h.registry),
		Tokens: NewTokens(tokens), Register: true,
		DefaultSize: sandbox.Size{CPUMillis: 2000, MemoryBytes: 512 << 20}, Log: log, Registry: h.registry,
	}
	for _, f := range change {
		f(&deps)
	}
	h.server = New(deps)

	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	for _, run := range []func(context.Context) error{placer.Run, h.nodes.Batcher().Run, routes.Doorbell().Run, routes.RecordLoop, routes.LookupLoop} {
		running.Go(func() {
			if err := run(ctx); err != nil {
				t.Errorf("a loop ended with %v", err)
			}
		})
	}
	twirp := httptest.NewServer(h.server.Twirp())
	h.twirpURL = twirp.URL
	g := h.server.GRPC(nil)
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	running.Go(func() {
		if err := g.Serve(listener); err != nil {
			t.Errorf("gRPC: %v", err)
		}
	})
	h.conn, err = grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = h.conn.Close()
		twirp.Close()
		limited, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
		defer cancel()
		_ = g.Shut(limited)
		stop()
		running.Wait()
	})
	return h
}

// locked lets several goroutines log into one buffer.
type locked struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// outcome is what a caller sees of a call, the same on both transports.
type outcome struct {
	Code   string // as Twirp spells it; "ok"
	Text   string
	Reason string
	Hint   bool // a time to try again is given
}

var transports = []string{"twirp", "grpc"}

// call sends request to a method such as scheduler.v1.Scheduler/Schedule.
func (h *harness) call(t *testing.T, transport, method, token string, request, response proto.Message) outcome {
	t.Helper()
	if transport == "grpc" {
		return h.callGRPC(t, method, token, request, response)
	}
	return h.callTwirp(t, method, token, request, response)
}

func (h *harness) callGRPC(t *testing.T, method, token string, request, response proto.Message) outcome {
	t.Helper()
	ctx := t.Context()
	if token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	err := h.conn.Invoke(ctx, "/"+method, request, response)
	if err == nil {
		return outcome{Code: "ok"}
	}
	s := status.Convert(err)
	got := outcome{Code: snake(s.Code().String()), Text: s.Message()}
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			got.Reason = d.GetReason()
			if d.GetDomain() != "berth" {
				t.Errorf("%s: domain %q, want berth", method, d.GetDomain())
			}
		case *errdetails.RetryInfo:
			got.Hint = d.GetRetryDelay().AsDuration() > 0
		}
	}
	return got
}

func snake(s string) string {
	var out strings.Builder
	for i, c := range s {
		if c >= 'A' && c <= 'Z' {
			if i > 0 {
				out.WriteByte('_')
			}
			c += 'a' - 'A'
		}
		out.WriteRune(c)
	}
	return out.String()
}

func (h *harness) callTwirp(t *testing.T, method, token string, request, response proto.Message) outcome {
	t.Helper()
	body, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.twirpURL+"/twirp/"+method, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatalf("%s: %v", method, err)
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatalf("%s: %v", method, err)
	}
	if answer.StatusCode == http.StatusOK {
		if err := protojson.Unmarshal(text, response); err != nil {
			t.Fatalf("%s: %v", method, err)
		}
		return outcome{Code: "ok"}
	}
	var refused struct {
		Code string            `json:"code"`
		Msg  string            `json:"msg"`
		Meta map[string]string `json:"meta"`
	}
	if err := json.Unmarshal(text, &refused); err != nil {
		t.Fatalf("%s: %s: %v", method, text, err)
	}
	return outcome{Code: refused.Code, Text: refused.Msg, Reason: refused.Meta["reason"], Hint: refused.Meta["retry_after_ms"] != ""}
}

// must fails the test unless the call went well.
func (h *harness) must(t *testing.T, method, token string, request, response proto.Message) {
	t.Helper()
	if got := h.call(t, "grpc", method, token, request, response); got.Code != "ok" {
		t.Fatalf("%s = %+v, want ok", method, got)
	}
}
