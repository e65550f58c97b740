package launch_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"berth/pkg/twirpkit"
	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/gateway/internal/gatewaytest"
	"berth/services/gateway/internal/launch"
	"berth/services/gateway/internal/proxy"
	"berth/services/gateway/internal/routecache"
	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
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

func TestACreateIsBoundBeforeItIsAnswered(t *testing.T) {
	t.Parallel()
	n := gatewaytest.NewNode(t, "n1", gatewaytest.BerthCapabilities()...)
	s := newStand(t, gatewaytest.NewScheduler(n), launch.Config{})
	created, err := s.Create(t.Context(), ask(t))
	if err != nil {
		t.Fatal(err)
	}
	defer created.Close()
	body, err := io.ReadAll(created.Response.Body)
	if err != nil {
		t.Fatal(err)
	}
	records := s.scheduler.Calls("RecordAssignment")
	if len(records) != 1 {
		t.Fatalf("%d recordings, want 1", len(records))
	}
	schedule := s.scheduler.Calls("Schedule")[0].Request.(*schedulerv1.ScheduleRequest)
	record := records[0].Request.(*schedulerv1.RecordAssignmentRequest)
	id := record.GetSandboxId()
	want := []string{id}
	if diff := cmp.Diff(want, n.Sandboxes()); diff != "" {
		t.Errorf("sandboxes on the node against what was recorded (-want +got):\n%s", diff)
	}
	if created.Response.StatusCode != http.StatusCreated || !bytes.Contains(body, []byte(id)) {
		t.Errorf("answer = %d %s, want 201 with %s", created.Response.StatusCode, body, id)
	}
	if schedule.GetTenantId() != "a" || schedule.GetRequestId() == "" || schedule.GetHint().GetNewSandbox().GetMetadata()["a"] != "b" {
		t.Errorf("schedule = %v, want tenant, request id and metadata", schedule)
	}
	if record.GetTenantId() != "a" || record.GetReservationId() == "" || record.GetNode().GetEndpoint() != n.URL {
		t.Errorf("record = %v, want tenant, reservation and the node as placed", record)
	}
	seen := n.Seen()[0]
	if seen.Target != "/v2/sandboxes?x=%2f&" || seen.Body != string(ask(t).Body) || seen.Header.Get("X-Mine") != "1" {
		t.Errorf("node saw %+v, want the client's bytes", seen)
	}
	if seen.Header.Get("Berth-Sandbox-Id") != id || seen.Header.Get("Berth-Reservation") != record.GetReservationId() {
		t.Errorf("node was given %v, want the drawn id and the reservation", seen.Header)
	}
	for _, name := range []string{"Idempotency-Key", "X-Idempotency-Key"} {
		if seen.Header.Get(name) != "" {
			t.Errorf("the node got the client's %s", name)
		}
	}
	kept := s.routes.routes()
	if len(kept) != 1 || kept[0].Sandbox != sandbox.ID(id) || kept[0].State != sandbox.Bound || kept[0].Tenant != "a" {
		t.Errorf("own cache has %v, want the route", kept)
	}
}

func TestANodeThatDrawsItsOwnIdsIsToldNone(t *testing.T) {
	t.Parallel()
	n := gatewaytest.NewNode(t, "n1")
	s := newStand(t, gatewaytest.NewScheduler(n), launch.Config{})
	created, err := s.Create(t.Context(), ask(t))
	if err != nil {
		t.Fatal(err)
	}
	created.Close()
	if h := n.Seen()[0].Header; h.Get("Berth-Sandbox-Id") != "" || h.Get("Berth-Reservation") != "" {
		t.Errorf("the node was given %v", h)
	}
	record := s.scheduler.Calls("RecordAssignment")[0].Request.(*schedulerv1.RecordAssignmentRequest)
	if diff := cmp.Diff(n.Sandboxes(), []string{record.GetSandboxId()}); diff != "" {
		t.Errorf("recorded against what the node drew (-want +got):\n%s", diff)
	}
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

// Case C-32.
func TestTheNextCandidateIsAskedWhereANodeTookNothing(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		spoil  func(*testing.T, *gatewaytest.Node)
		reason schedulerv1.ReleaseReason
	}{
		"the dial is refused": {
			func(t *testing.T, n *gatewaytest.Node) { n.URL = gatewaytest.Refusing(t) },
			schedulerv1.ReleaseReason_RELEASE_REASON_DIAL_FAILED,
		},
		"the node says it is full": {
			func(_ *testing.T, n *gatewaytest.Node) { n.Script = script(full) },
			schedulerv1.ReleaseReason_RELEASE_REASON_NODE_FULL,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bad := gatewaytest.NewNode(t, "bad", gatewaytest.BerthCapabilities()...)
			tt.spoil(t, bad)
			good := gatewaytest.NewNode(t, "good", gatewaytest.BerthCapabilities()...)
			s := newStand(t, gatewaytest.NewScheduler(bad, good), launch.Config{})
			for range 20 {
				created, err := s.Create(t.Context(), ask(t))
				if err != nil {
					t.Fatal(err)
				}
				created.Close()
				if created.Node != "good" {
					t.Fatalf("created on %s", created.Node)
				}
			}
			reasons := releases(s.scheduler)
			if len(reasons) == 0 || s.scheduler.Open() != 0 {
				t.Errorf("%d releases, %d reservations left; want some and none", len(reasons), s.scheduler.Open())
			}
			for _, r := range reasons {
				if r != tt.reason {
					t.Errorf("released with %s, want %s", r, tt.reason)
				}
			}
		})
	}
}

func TestWhereNobodyTakesItNothingIsLeft(t *testing.T) {
	t.Parallel()
	var nodes []*gatewaytest.Node
	for i := range 6 {
		n := gatewaytest.NewNode(t, node.ID(fmt.Sprintf("n%d", i)), gatewaytest.BerthCapabilities()...)
		n.Script = script(full)
		nodes = append(nodes, n)
	}
	s := newStand(t, gatewaytest.NewScheduler(nodes...), launch.Config{})
	_, err := s.Create(t.Context(), ask(t))
	refused, ok := errors.AsType[*node.Refused](err)
	if !ok || !errors.Is(err, node.ErrNoneReady) || refused.RetryAfter <= 0 {
		t.Fatalf("Create = %v, want no nodes available with a Retry-After", err)
	}
	if asked := len(s.scheduler.Calls("Schedule")); asked != 4 || s.scheduler.Open() != 0 {
		t.Errorf("%d nodes were asked, %d reservations left; want 4 and none", asked, s.scheduler.Open())
	}
	two := newStand(t, gatewaytest.NewScheduler(nodes[:2]...), launch.Config{})
	if _, err := two.Create(t.Context(), ask(t)); !errors.Is(err, node.ErrNoneReady) {
		t.Errorf("with two nodes: %v, want no nodes available", err)
	}
}

func TestTheNodesOwnAnswerIsTheClients(t *testing.T) {
	t.Parallel()
	for _, status := range []int{400, 404, 409, 422, 429, 500, 503} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			t.Parallel()
			n := gatewaytest.NewNode(t, "n1", gatewaytest.BerthCapabilities()...)
			n.Script = script(func(w http.ResponseWriter, _ gatewaytest.Seen) {
				w.Header().Set("X-Node", "1")
				gatewaytest.Answer(w, status, map[string]any{"code": status, "message": "no such template"})
			})
			s := newStand(t, gatewaytest.NewScheduler(n), launch.Config{})
			_, err := s.Create(t.Context(), ask(t))
			refusal, ok := errors.AsType[*launch.Refusal](err)
			if !ok {
				t.Fatalf("Create = %v, want the node's refusal", err)
			}
			body, readErr := io.ReadAll(refusal.Response.Body)
			closeErr := refusal.Response.Body.Close()
			if refusal.Response.StatusCode != status || !bytes.Contains(body, []byte("no such template")) ||
				refusal.Response.Header.Get("X-Node") != "1" || readErr != nil || closeErr != nil {
				t.Errorf("refusal = %d %s (%v, %v)", refusal.Response.StatusCode, body, readErr, closeErr)
			}
			if got := releases(s.scheduler); len(got) != 1 || got[0] != schedulerv1.ReleaseReason_RELEASE_REASON_NODE_ERROR {
				t.Errorf("released %v, want once with node_error", got)
			}
			if len(n.Seen()) != 1 {
				t.Errorf("the node was asked %d times", len(n.Seen()))
			}
		})
	}
}

func TestWhatANodeMayNotAnswer(t *testing.T) {
	t.Parallel()
	long := "a123456789b123456789c123456789d123456789e123456789f1234567" // 58
	created := func(body string) func(http.ResponseWriter, gatewaytest.Seen) {
		return func(w http.ResponseWriter, _ gatewaytest.Seen) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, body)
		}
	}
	tests := map[string]struct {
		takesIDs bool
		answer   func(http.ResponseWriter, gatewaytest.Seen)
		text     string
		deleted  []string // targets; the given id stands as "given"
	}{
		"a redirect": {
			true, func(w http.ResponseWriter, _ gatewaytest.Seen) {
				w.Header().Set("Location", "http://127.0.0.1:1/")
				w.WriteHeader(http.StatusTemporaryRedirect)
			}, "unexpected upstream status", nil,
		},
		"a 2xx without an id": {false, created(`{"ok":true}`), "node answered without a sandbox id", nil},
		"no JSON":             {false, created(`hello`), "node answered without a sandbox id", nil},
		"an id that fits no host name (C-18)": {
			false, created(`{"sandboxID":"` + long + `"}`),
			"node answered with a sandbox id that is none: 1 to 57 of a-z, 0-9 and inner hyphens are wanted",
			[]string{"/sandboxes/" + long},
		},
		"an id with a slash": {
			false, created(`{"sandboxID":"a/../b"}`),
			"node answered with a sandbox id that is none: 1 to 57 of a-z, 0-9 and inner hyphens are wanted",
			[]string{"/sandboxes/a%2F..%2Fb"},
		},
		"another id than it was given": {
			true, created(`{"sandboxID":"mine"}`), "node answered with another sandbox id than it was given",
			[]string{"/sandboxes/mine", "given"},
		},
		"two ids in its header": {
			false, func(w http.ResponseWriter, _ gatewaytest.Seen) {
				w.Header().Set("X-Agentenv-Sandbox-Id", "one")
				w.Header().Set("E2b-Sandbox-Id", "two")
				w.WriteHeader(http.StatusCreated)
			}, "node answered with two sandbox ids", []string{"/sandboxes/one", "/sandboxes/two"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var caps []string
			if tt.takesIDs {
				caps = gatewaytest.BerthCapabilities()
			}
			n := gatewaytest.NewNode(t, "n1", caps...)
			n.Script = script(tt.answer)
			s := newStand(t, gatewaytest.NewScheduler(n), launch.Config{})
			_, err := s.Create(t.Context(), ask(t))
			bad, ok := errors.AsType[*launch.BadAnswer](err)
			if !ok || bad.Text != tt.text {
				t.Fatalf("Create = %v, want %q", err, tt.text)
			}
			var deleted []string
			given := ""
			for _, r := range n.Seen() {
				if r.Method == http.MethodDelete {
					deleted = append(deleted, r.Target)
				} else {
					given = "/sandboxes/" + r.Header.Get("Berth-Sandbox-Id")
				}
			}
			for i, d := range deleted {
				if d == given {
					deleted[i] = "given"
				}
			}
			if diff := cmp.Diff(tt.deleted, deleted); diff != "" {
				t.Errorf("deleted on the node (-want +got):\n%s", diff)
			}
			if s.scheduler.Open() != 0 || len(s.scheduler.Calls("RecordAssignment")) != 0 {
				t.Errorf("%d reservations left, %d recordings; want none of both", s.scheduler.Open(), len(s.scheduler.Calls("RecordAssignment")))
			}
		})
	}
}

func TestALostAnswerIsAskedForOnceMoreWithTheSameId(t *testing.T) {
	t.Parallel()
	n := gatewaytest.NewNode(t, "n1", gatewaytest.BerthCapabilities()...)
	other := gatewaytest.NewNode(t, "n2", gatewaytest.BerthCapabilities()...)
	var first atomic.Bool
	n.Script = script(func(w http.ResponseWriter, r gatewaytest.Seen) {
		id := r.Header.Get("Berth-Sandbox-Id")
		n.Add(sandbox.ID(id), time.Now())
		if first.CompareAndSwap(false, true) {
			gatewaytest.Cut(w)
			return
		}
		gatewaytest.Answer(w, http.StatusCreated, map[string]any{"sandboxID": id})
	})
	s := newStand(t, gatewaytest.NewScheduler(n, other), launch.Config{})
	created, err := s.Create(t.Context(), ask(t))
	if err != nil {
		t.Fatal(err)
	}
	created.Close()
	if len(n.Sandboxes()) != 1 || len(n.Seen()) != 2 || len(other.Seen()) != 0 {
		t.Errorf("%d sandboxes after %d calls, %d elsewhere; want 1 after 2, none", len(n.Sandboxes()), len(n.Seen()), len(other.Seen()))
	}
}

func TestAnUnknownOutcomeIsNotTriedElsewhere(t *testing.T) {
	t.Parallel()
	cut := func(w http.ResponseWriter, _ gatewaytest.Seen) { gatewaytest.Cut(w) }
	tests := map[string]struct {
		caps   []string
		answer func(http.ResponseWriter, gatewaytest.Seen)
		asked  int
		silent bool
	}{
		"a node that draws its ids is asked once": {nil, cut, 1, false},
		"a node that takes ids is asked twice":    {gatewaytest.BerthCapabilities(), cut, 2, false},
		"half an answer is none": {nil, func(w http.ResponseWriter, _ gatewaytest.Seen) {
			w.Header().Set("Content-Length", "100")
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, `{"sandboxID":`)
		}, 1, false},
		"silence is 504": {nil, nil, 1, true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := gatewaytest.NewNode(t, "n1", tt.caps...)
			if tt.answer == nil {
				release := make(chan struct{})
				t.Cleanup(func() { close(release) })
				tt.answer = func(http.ResponseWriter, gatewaytest.Seen) { <-release }
			}
			n.Script = script(tt.answer)
			other := gatewaytest.NewNode(t, "n2")
			s := newStand(t, gatewaytest.NewScheduler(n, other), launch.Config{HeaderLimit: time.Second})
			_, err := s.Create(t.Context(), ask(t))
			if !errors.Is(err, launch.ErrUnknown) || errors.Is(err, launch.ErrSilent) != tt.silent {
				t.Fatalf("Create = %v, want ErrUnknown, silent %t", err, tt.silent)
			}
			if len(n.Seen()) != tt.asked || len(other.Seen()) != 0 {
				t.Errorf("asked %d times, elsewhere %d; want %d, 0", len(n.Seen()), len(other.Seen()), tt.asked)
			}
			// The node may have it: its room is kept until the roster says or the hold ends.
			if s.scheduler.Open() != 1 {
				t.Errorf("%d reservations left, want the one", s.scheduler.Open())
			}
		})
	}
}

func TestWhatCannotBeRecordedIsDeleted(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		answer error
		calls  int
		ended  int // ReleaseSandbox calls: the recording may have been committed
	}{
		"the node has no room any more": {node.ErrReservationOver, 1, 0},
		"the store is away":             {errors.New("connection refused"), 1, 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := gatewaytest.NewNode(t, "n1", gatewaytest.BerthCapabilities()...)
			scheduler := gatewaytest.NewScheduler(n)
			scheduler.OnRecord = func(context.Context, *schedulerv1.RecordAssignmentRequest) (int64, error) { return 0, tt.answer }
			s := newStand(t, scheduler, launch.Config{})
			_, err := s.Create(t.Context(), ask(t))
			if !errors.Is(err, launch.ErrUnrecorded) {
				t.Fatalf("Create = %v, want ErrUnrecorded", err)
			}
			if got := n.Sandboxes(); len(got) != 0 {
				t.Errorf("on the node: %v, want nothing", got)
			}
			if len(scheduler.Calls("RecordAssignment")) != tt.calls || len(scheduler.Calls("ReleaseSandbox")) != tt.ended || scheduler.Open() != 0 {
				t.Errorf("%d recordings, %d ends, %d open; want %d, %d, 0", len(scheduler.Calls("RecordAssignment")),
					len(scheduler.Calls("ReleaseSandbox")), scheduler.Open(), tt.calls, tt.ended)
			}
			if len(s.routes.routes()) != 0 {
				t.Errorf("own cache has %v", s.routes.routes())
			}
		})
	}
}

func TestARecordingWhoseAnswerIsLostIsRepeatedAndThenUndone(t *testing.T) {
	t.Parallel()
	n := gatewaytest.NewNode(t, "n1", gatewaytest.BerthCapabilities()...)
	scheduler := gatewaytest.NewScheduler(n)
	var failing atomic.Int32
	failing.Store(1)
	scheduler.OnRecord = func(context.Context, *schedulerv1.RecordAssignmentRequest) (int64, error) {
		if failing.Add(-1) >= 0 {
			return 0, fmt.Errorf("record: %w", context.DeadlineExceeded)
		}
		return 7, nil
	}
	s := newStand(t, scheduler, launch.Config{})
	if _, err := s.Create(t.Context(), ask(t)); !errors.Is(err, launch.ErrUnrecorded) {
		t.Errorf("a deadline is an answer of the scheduler: %v", err)
	}
	if ended := len(scheduler.Calls("ReleaseSandbox")); ended != 1 {
		t.Errorf("%d ends, want 1: the recording may have been committed", ended)
	}
	created, err := s.Create(t.Context(), ask(t))
	if err != nil {
		t.Fatal(err)
	}
	created.Close()
	if created.Revision != 7 {
		t.Errorf("revision = %d, want 7", created.Revision)
	}
}

func TestACreateEndsWithoutItsClient(t *testing.T) {
	t.Parallel()
	for name, keep := range map[string]bool{"and is deleted, for nobody knows its id": false, "and stays where that is asked for": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := gatewaytest.NewNode(t, "n1", gatewaytest.BerthCapabilities()...)
			ctx, leave := context.WithCancel(t.Context())
			n.Script = func(_ http.ResponseWriter, r gatewaytest.Seen) bool {
				if r.Method == http.MethodPost {
					leave()
				}
				return false
			}
			s := newStand(t, gatewaytest.NewScheduler(n), launch.Config{KeepOrphans: keep})
			created, err := s.Create(ctx, ask(t))
			if keep {
				if err != nil {
					t.Fatal(err)
				}
				created.Close()
			} else if !errors.Is(err, launch.ErrClientGone) {
				t.Fatalf("Create = %v, want ErrClientGone", err)
			}
			if recorded := len(s.scheduler.Calls("RecordAssignment")); recorded != 1 {
				t.Errorf("%d recordings, want 1", recorded)
			}
			want := 0
			if keep {
				want = 1
			}
			if got := len(n.Sandboxes()); got != want {
				t.Errorf("%d sandboxes on the node, want %d", got, want)
			}
			if ended := len(s.scheduler.Calls("ReleaseSandbox")); ended != 1-want {
				t.Errorf("%d bindings ended, want %d", ended, 1-want)
			}
		})
	}
}

func TestAClientThatLeftBeforeANodeWasAskedCostsNothing(t *testing.T) {
	t.Parallel()
	n := gatewaytest.NewNode(t, "n1", gatewaytest.BerthCapabilities()...)
	scheduler := gatewaytest.NewScheduler(n)
	ctx, leave := context.WithCancel(t.Context())
	scheduler.OnSchedule = func(*schedulerv1.ScheduleRequest) error { leave(); return nil }
	s := newStand(t, scheduler, launch.Config{})
	if _, err := s.Create(ctx, ask(t)); !errors.Is(err, launch.ErrClientGone) {
		t.Fatalf("Create = %v, want ErrClientGone", err)
	}
	if len(n.Seen()) != 0 || scheduler.Open() != 0 {
		t.Errorf("the node saw %d requests, %d reservations left; want none", len(n.Seen()), scheduler.Open())
	}
}

func TestAHoldIsExtendedWhileANodeWorks(t *testing.T) {
	t.Parallel()
	n := gatewaytest.NewNode(t, "n1", gatewaytest.BerthCapabilities()...)
	scheduler := gatewaytest.NewScheduler(n)
	scheduler.Hold = 90
	n.Script = script(func(w http.ResponseWriter, r gatewaytest.Seen) {
		for len(scheduler.Calls("ExtendPlacement")) < 3 {
			select {
			case <-t.Context().Done():
				return
			case <-time.After(time.Millisecond):
			}
		}
		gatewaytest.Answer(w, http.StatusCreated, map[string]any{"sandboxID": r.Header.Get("Berth-Sandbox-Id")})
	})
	s := newStand(t, scheduler, launch.Config{})
	created, err := s.Create(t.Context(), ask(t))
	if err != nil {
		t.Fatal(err)
	}
	created.Close()
	extend := scheduler.Calls("ExtendPlacement")[0].Request.(*schedulerv1.ExtendPlacementRequest)
	if extend.GetTtlMs() != 90 {
		t.Errorf("extended by %d ms, want 90", extend.GetTtlMs())
	}
}

func TestRefusalsOfTheSchedulerReachTheCaller(t *testing.T) {
	t.Parallel()
	tests := map[string]error{
		"nobody is ready":         &node.Refused{Cause: node.ErrNoneReady, RetryAfter: 400 * time.Millisecond},
		"nobody has room":         &node.Refused{Cause: node.ErrNoRoom, RetryAfter: 400 * time.Millisecond},
		"nobody is as asked for":  &node.Refused{Cause: node.ErrConstraints, Placement: 1},
		"the tenant has its fill": &node.Refused{Cause: node.ErrQuota, Placement: 1},
	}
	for name, refusal := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := gatewaytest.NewNode(t, "n1")
			scheduler := gatewaytest.NewScheduler(n)
			scheduler.OnSchedule = func(*schedulerv1.ScheduleRequest) error { return refusal }
			s := newStand(t, scheduler, launch.Config{})
			_, err := s.Create(t.Context(), ask(t))
			if !errors.Is(err, errors.Unwrap(refusal)) {
				t.Errorf("Create = %v, want %v", err, refusal)
			}
			if len(n.Seen()) != 0 || len(scheduler.Calls()) != 1 {
				t.Errorf("node saw %d, scheduler was called %d times; want 0 and 1", len(n.Seen()), len(scheduler.Calls()))
			}
		})
	}
}

func TestWithoutASchedulerNothingIsSent(t *testing.T) {
	t.Parallel()
	s := newStand(t, nil, launch.Config{}, gatewaytest.Refusing(t), gatewaytest.Refusing(t))
	if _, err := s.Create(t.Context(), ask(t)); !errors.Is(err, launch.ErrSchedulerAway) {
		t.Errorf("Create = %v, want ErrSchedulerAway", err)
	}
}

func TestManyCreatesDoNotNoticeADeadReplica(t *testing.T) {
	t.Parallel()
	n1 := gatewaytest.NewNode(t, "n1", gatewaytest.BerthCapabilities()...)
	n2 := gatewaytest.NewNode(t, "n2", gatewaytest.BerthCapabilities()...)
	scheduler := gatewaytest.NewScheduler(n1, n2)
	s := newStand(t, scheduler, launch.Config{}, gatewaytest.Refusing(t), scheduler.Serve(t))
	const creates = 200
	errs := make([]error, creates)
	var working sync.WaitGroup
	for i := range creates {
		working.Go(func() {
			created, err := s.Create(t.Context(), ask(t))
			if errs[i] = err; err == nil {
				created.Close()
			}
		})
	}
	working.Wait()
	for _, err := range errs {
		if err != nil {
			t.Fatalf("a create failed: %v", err)
		}
	}
	requests := map[string]int{}
	for _, c := range scheduler.Calls("Schedule") {
		requests[c.Request.(*schedulerv1.ScheduleRequest).GetRequestId()]++
	}
	if len(requests) != creates || len(n1.Sandboxes())+len(n2.Sandboxes()) != creates || scheduler.Open() != 0 {
		t.Errorf("%d request ids, %d sandboxes, %d open; want %d, %d, 0",
			len(requests), len(n1.Sandboxes())+len(n2.Sandboxes()), scheduler.Open(), creates, creates)
	}
}

// A replica is killed after it took the call: the connection breaks, nobody answers.
func TestAScheduleWhoseReplicaDiesIsAskedAgainWithTheSameId(t *testing.T) {
	t.Parallel()
	n := gatewaytest.NewNode(t, "n1", gatewaytest.BerthCapabilities()...)
	scheduler := gatewaytest.NewScheduler(n)
	dying, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	t.Cleanup(func() { _ = dying.Close(); served.Wait() })
	var taken atomic.Int32
	served.Go(func() {
		for {
			conn, err := dying.Accept()
			if err != nil {
				return
			}
			buffer := make([]byte, 1024)
			if _, err := conn.Read(buffer); err == nil {
				taken.Add(1)
			}
			_ = conn.Close()
		}
	})
	s := newStand(t, scheduler, launch.Config{}, "http://"+dying.Addr().String(), scheduler.Serve(t))
	created, err := s.Create(t.Context(), ask(t))
	if err != nil {
		t.Fatal(err)
	}
	created.Close()
	if taken.Load() == 0 || len(n.Sandboxes()) != 1 || scheduler.Open() != 0 {
		t.Errorf("%d calls died, %d sandboxes, %d open; want some, 1, 0", taken.Load(), len(n.Sandboxes()), scheduler.Open())
	}
}
