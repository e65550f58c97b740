package launch_test

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"berth/pkg/twirpkit"
	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/gateway/internal/gatewaytest"
	"berth/services/gateway/internal/launch"
	"berth/services/gateway/internal/proxy"
	"berth/services/gateway/internal/routecache"
	"berth/services/internal/route"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// nodes is the proxy that a gateway forwards with. Creates ask it for no routes.
func nodes(t *testing.T) *proxy.Forwarder {
	t.Helper()
	guard, err := route.NewGuard(route.GuardConfig{Schemes: route.DefaultSchemes, Loopback: true})
	if err != nil {
		t.Fatal(err)
	}
	f := proxy.New(proxy.Deps{
		Routes: noRoutes{}, Guard: guard, NodeKeys: []string{gatewaytest.NodeKey}, Log: slog.New(slog.DiscardHandler),
	}, proxy.DefaultConfig())
	t.Cleanup(func() {
		if err := f.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return f
}

type noRoutes struct{ *routecache.Cache }

func (noRoutes) Trusted(string) bool { return false }

// cache is what the gateway's own routes are kept in.
type cache struct {
	mu   sync.Mutex
	kept []route.Route
}

func (c *cache) Put(r route.Route) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.kept = append(c.kept, r)
}

func (c *cache) routes() []route.Route {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]route.Route(nil), c.kept...)
}

// stand is a launcher with a scheduler of these addresses.
type stand struct {
	*launch.Launcher
	scheduler *gatewaytest.Scheduler
	routes    *cache
}

func newStand(t *testing.T, s *gatewaytest.Scheduler, cfg launch.Config, urls ...string) *stand {
	t.Helper()
	if len(urls) == 0 {
		urls = []string{s.Serve(t)}
	}
	client, err := twirpkit.NewFailover(urls, twirpkit.FailoverOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.CloseIdleConnections)
	reg := prometheus.NewRegistry()
	routes := &cache{}
	return &stand{launch.New(launch.Deps{
		Scheduler: launch.NewScheduler(schedulerv1.NewSchedulerProtobufClient(client.Base(), client),
			schedulerv1.NewPlacementsProtobufClient(client.Base(), client), reg),
		Nodes: nodes(t), Routes: routes, Log: slog.New(slog.DiscardHandler), Registry: reg,
	}, cfg), s, routes}
}

func ask(t *testing.T) launch.Request {
	t.Helper()
	text := []byte(`{"templateID":"echo","metadata":{"a":"b"}}`)
	a, err := launch.ParseAsk(text, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	client := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v2/sandboxes?x=%2f&", nil)
	client.Header = http.Header{
		"Content-Type": {"application/json"}, "X-Mine": {"1"}, "X-Api-Key": {"the client's"},
		"Idempotency-Key": {"k"}, "X-Idempotency-Key": {"k"},
	}
	return launch.Request{Tenant: "a", Ask: a, Client: client, Raw: "/v2/sandboxes?x=%2f&", Body: text}
}

// script answers creates and leaves the rest.
func script(answer func(w http.ResponseWriter, r gatewaytest.Seen)) func(http.ResponseWriter, gatewaytest.Seen) bool {
	return func(w http.ResponseWriter, r gatewaytest.Seen) bool {
		if r.Method != http.MethodPost {
			return false
		}
		answer(w, r)
		return true
	}
}

func full(w http.ResponseWriter, _ gatewaytest.Seen) {
	w.Header().Set("Berth-Node", "full")
	gatewaytest.Answer(w, http.StatusServiceUnavailable, map[string]any{"code": 503, "message": "full"})
}

func releases(s *gatewaytest.Scheduler) (reasons []schedulerv1.ReleaseReason) {
	for _, c := range s.Calls("ReleasePlacement") {
		reasons = append(reasons, c.Request.(*schedulerv1.ReleasePlacementRequest).GetReason())
	}
	return reasons
}
