package gateway_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/pkg/waittest"
	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/gateway/internal/gatewaytest"
)

// Case C-30.
func TestBothGenerationsLandOnTheOwningNode(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"), berthNode(t, "n2"))
	one, two := s.start(s.config()), s.start(s.config())
	gateways := []*replica{one, two}
	for i, paths := range [][2]string{{"/v2/sandboxes", "/v2"}, {"/sandboxes", ""}, {"/v2/sandboxes", ""}, {"/sandboxes", "/v2"}} {
		a := gateways[i%2].do(ask{method: "POST", path: paths[0], body: `{"templateID":"base"}`, chunked: true})
		id, _ := a.field(t, "sandboxID").(string)
		if a.Status != 201 {
			t.Fatalf("POST %s = %d %s", paths[0], a.Status, a.Body)
		}
		var bound string
		if err := s.db.QueryRow(t.Context(), `SELECT node_id FROM bindings WHERE sandbox_id = $1 AND state = 'bound'`, id).Scan(&bound); err != nil {
			t.Fatalf("no binding when the 201 was read: %v", err)
		}
		home := a.field(t, "clientID")
		for j, call := range []ask{
			{method: "GET", path: "/sandboxes/" + id},
			{method: "POST", path: paths[1] + "/sandboxes/" + id + "/connect", body: `{"timeout":300}`, chunked: true},
			{method: "POST", path: paths[1] + "/sandboxes/" + id + "/connect", body: `{"timeout":300}`, chunked: true},
		} {
			a := gateways[(i+j+1)%2].do(call)
			if a.Status != 200 || a.field(t, "clientID") != home || bound != home {
				t.Errorf("%s %s = %d %s, want 200 by %s", call.method, call.path, a.Status, a.Body, home)
			}
		}
	}
}

func TestADeletedSandboxIsUnboundBeforeTheAnswer(t *testing.T) {
	t.Parallel()
	n := berthNode(t, "n1")
	s := newStand(t, n)
	r := s.start(s.config())
	state := func(id string) (state string) {
		if err := s.db.QueryRow(t.Context(), `SELECT state FROM bindings WHERE sandbox_id = $1`, id).Scan(&state); err != nil {
			t.Fatal(err)
		}
		return state
	}
	t.Run("also when the node has forgotten it", func(t *testing.T) {
		id := r.create()
		n.Script = says(404, `{"code":404,"message":"sandbox not found"}`)
		a := r.do(ask{method: "DELETE", path: "/sandboxes/" + id})
		n.Script = nil
		if a.Status != 404 || state(id) != "gone" {
			t.Errorf("delete = %d %s, binding %s; want the node's 404, gone", a.Status, a.Body, state(id))
		}
	})
	t.Run("not when the node failed", func(t *testing.T) {
		id := r.create()
		n.Script = says(500, `{"code":500,"message":"broken"}`)
		a := r.do(ask{method: "DELETE", path: "/sandboxes/" + id})
		n.Script = nil
		if a.Status != 500 || state(id) != "bound" {
			t.Errorf("delete = %d %s, binding %s; want the node's 500, bound", a.Status, a.Body, state(id))
		}
	})
	t.Run("by its new revision when it changed meanwhile", func(t *testing.T) {
		id := r.create()
		n.Script = func(w http.ResponseWriter, seen gatewaytest.Seen) bool {
			if seen.Method == http.MethodDelete {
				if _, err := s.bind(t.Context(), id, "n1", "default"); err != nil { // another revision, the same node
					t.Error(err)
				}
			}
			return false
		}
		a := r.do(ask{method: "DELETE", path: "/sandboxes/" + id})
		n.Script = nil
		if a.Status != 204 || state(id) != "gone" {
			t.Errorf("delete = %d %s, binding %s; want 204, gone", a.Status, a.Body, state(id))
		}
	})
	t.Run("or the client is told to ask again", func(t *testing.T) {
		id := r.create()
		s.scheduler.OnEnd = func(context.Context, *schedulerv1.ReleaseSandboxRequest) (int64, error) {
			return 0, fmt.Errorf("broken: %w", context.DeadlineExceeded)
		}
		a := r.do(ask{method: "DELETE", path: "/sandboxes/" + id})
		s.scheduler.OnEnd = s.end
		if a.Status != 503 || a.Header.Get("Retry-After") != "1" || strings.Contains(a.Body, "broken") {
			t.Errorf("delete = %d %s, want 503 with Retry-After", a.Status, a.Body)
		}
		if again := r.do(ask{method: "DELETE", path: "/sandboxes/" + id}); again.Status != 404 || state(id) != "gone" {
			t.Errorf("asked again = %d, binding %s; want the node's 404, gone", again.Status, state(id))
		}
	})
}

// A redirect is never followed, and a node that refuses our key is our fault.
func TestWhatANodeMayNotTellAClient(t *testing.T) {
	t.Parallel()
	n := berthNode(t, "n1")
	s := newStand(t, n)
	r := s.start(s.config())
	id := r.create()
	for status, want := range map[int]string{301: "bad_answer", 302: "bad_answer", 307: "bad_answer", 308: "bad_answer", 401: "scheduler_error", 403: "scheduler_error"} {
		n.Script = func(w http.ResponseWriter, _ gatewaytest.Seen) bool {
			w.Header().Set("Location", "http://127.0.0.1:1/")
			w.Header().Set("WWW-Authenticate", "Node")
			w.WriteHeader(status)
			return true
		}
		for _, call := range []ask{
			{method: "GET", path: "/sandboxes/" + id},
			{method: "POST", path: "/sandboxes", body: `{"templateID":"echo"}`},
		} {
			a := r.do(call)
			if a.Status != 502 || a.field(t, "error_code") != want || a.Header.Get("Location") != "" || a.Header.Get("Berth-Error") != want {
				t.Errorf("a node's %d to %s %s = %d %v %s, want 502 %s", status, call.method, call.path, a.Status, a.Header, a.Body, want)
			}
		}
	}
	if s.scheduler.Open() != 0 {
		t.Errorf("%d reservations left", s.scheduler.Open())
	}
}

func TestTheNodeGetsTheNodeKeyAndNothingReserved(t *testing.T) {
	t.Parallel()
	n := berthNode(t, "n1")
	s := newStand(t, n)
	r := s.start(s.config())
	a := r.do(ask{method: "POST", path: "/v2/sandboxes?a=%2F&b", body: `{"templateID":"echo"}`, header: http.Header{
		"X-Api-Key": {apiKey}, "Idempotency-Key": {"k1"}, "X-Idempotency-Key": {"k2"}, "Berth-Sandbox-Id": {"mine"}, "Berth-Anything": {"x"},
		"E2b-Sandbox-Id": {"mine"}, "X-Forwarded-For": {"203.0.113.9"}, "Lang_version": {"20"}, "X-Request-Id": {"req-1"},
	}})
	// An id header with no port is half a pair: the create is not an id row, so it is refused.
	if a.Status != 400 {
		t.Fatalf("half a pair on a create = %d %s, want 400", a.Status, a.Body)
	}
	a = r.do(ask{method: "POST", path: "/v2/sandboxes?a=%2F&b", body: `{"templateID":"echo"}`, header: http.Header{
		"X-Api-Key": {apiKey}, "Idempotency-Key": {"k1"}, "X-Idempotency-Key": {"k2"}, "Berth-Sandbox-Id": {"mine"}, "Berth-Anything": {"x"},
		"X-Forwarded-For": {"203.0.113.9"}, "Lang_version": {"20"}, "X-Request-Id": {"req-1"},
	}})
	if a.Status != 201 || a.Header.Get("X-Request-Id") != "req-1" {
		t.Fatalf("create = %d %v %s", a.Status, a.Header, a.Body)
	}
	seen := n.Seen()[0]
	for name, want := range map[string]string{
		"X-Api-Key": gatewaytest.NodeKey, "X-Request-Id": "req-1", "Lang_version": "20", "Idempotency-Key": "", "X-Idempotency-Key": "",
		"Berth-Anything": "", "Berth-Sandbox-Id": fmt.Sprint(a.field(t, "sandboxID")), "X-Forwarded-For": "127.0.0.1",
		"X-Forwarded-Method": "POST", "X-Forwarded-Uri": "/v2/sandboxes?a=%2F&b",
	} {
		if got := seen.Header.Get(name); got != want {
			t.Errorf("the node saw %s: %q, want %q", name, got, want)
		}
	}
	if seen.Target != "/v2/sandboxes?a=%2F&b" {
		t.Errorf("the node saw %s", seen.Target)
	}
	id := fmt.Sprint(a.field(t, "sandboxID"))
	r.do(ask{method: "GET", path: "/sandboxes/" + id, header: http.Header{"X-Api-Key": {apiKey}, "E2b-Sandbox-Id": {"other"}, "E2b-Sandbox-Port": {"1"}}})
	last := n.Seen()[len(n.Seen())-1]
	if last.Header.Get("X-Api-Key") != gatewaytest.NodeKey || last.Header.Get("E2b-Sandbox-Id") != "" || last.Header.Get("X-Agentenv-Sandbox-Id") != "" {
		t.Errorf("an id row: the node saw %v", last.Header)
	}
	if last.Header.Get("Berth-Route-Revision") == "" || last.Header.Get("Berth-Incarnation") != "1" {
		t.Errorf("an id row: the node saw revision %q, incarnation %q", last.Header.Get("Berth-Route-Revision"), last.Header.Get("Berth-Incarnation"))
	}
}

func TestAClientThatLeavesItsCreateLeavesNothing(t *testing.T) {
	t.Parallel()
	n := berthNode(t, "n1")
	s := newStand(t, n)
	r := s.start(s.config())
	working, finish, deleted := make(chan struct{}), make(chan struct{}), make(chan struct{})
	n.Script = func(_ http.ResponseWriter, seen gatewaytest.Seen) bool {
		switch seen.Method {
		case http.MethodPost:
			close(working)
			<-finish
		case http.MethodDelete:
			defer close(deleted)
		}
		return false
	}
	ctx, leave := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.URL+"/sandboxes", strings.NewReader(`{"templateID":"echo"}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Api-Key", apiKey)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if resp, err := r.client.Do(req); err == nil {
			_ = resp.Body.Close()
		}
	}()
	waittest.Receive(t, "the create to reach the node", working)
	leave()
	waittest.Receive(t, "the end of the create", gone)
	// The end of the connection is an event of the gateway's network poller; so is each of these, later.
	for range 50 {
		if got := r.status(r.URL + "/health"); got != http.StatusNoContent {
			t.Fatalf("/health = %d", got)
		}
	}
	close(finish)
	select {
	case <-deleted:
	case <-time.After(10 * time.Second):
		t.Fatal("the sandbox was not deleted")
	}
	if err := r.stop(); err != nil { // what is open ends first
		t.Fatal(err)
	}
	if len(n.Sandboxes()) != 0 || s.scheduler.Open() != 0 || len(s.scheduler.Calls("RecordAssignment")) != 1 || len(s.scheduler.Calls("ReleaseSandbox")) != 1 {
		t.Errorf("left: %v on the node, %d open, calls %v", n.Sandboxes(), s.scheduler.Open(), s.scheduler.Calls())
	}
	if !strings.Contains(r.Access.String(), `"status":499`) {
		t.Errorf("access log: %s", r.Access)
	}
}

func TestManyCreatesThroughTwoGatewaysWithADeadScheduler(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"), berthNode(t, "n2"), berthNode(t, "n3"))
	live := s.scheduler.Serve(t)
	one, two := s.start(s.config(gatewaytest.Refusing(t), live)), s.start(s.config(live, gatewaytest.Refusing(t)))
	const creates = 60
	answers := make([]answer, creates)
	var working sync.WaitGroup
	for i := range creates {
		working.Go(func() {
			r := []*replica{one, two}[i%2]
			a, err := r.try(ask{method: "POST", path: "/v2/sandboxes", body: `{"templateID":"echo"}`})
			if err != nil {
				t.Error(err)
			}
			answers[i] = a
		})
	}
	working.Wait()
	made := map[string]bool{}
	for _, a := range answers {
		if a.Status != 201 {
			t.Fatalf("a create = %d %s", a.Status, a.Body)
		}
		made[fmt.Sprint(a.field(t, "sandboxID"))] = true
	}
	var bound int
	if err := s.db.QueryRow(t.Context(), `SELECT count(*) FROM bindings WHERE state = 'bound'`).Scan(&bound); err != nil {
		t.Fatal(err)
	}
	requests := map[string]bool{}
	for _, c := range s.scheduler.Calls("Schedule") {
		if r, ok := c.Request.(*schedulerv1.ScheduleRequest); ok {
			requests[r.GetRequestId()] = true
		}
	}
	if len(made) != creates || bound != creates || len(requests) != creates || s.scheduler.Open() != 0 {
		t.Errorf("%d sandboxes, %d bindings, %d request ids, %d open; want %d, %d, %d, 0", len(made), bound, len(requests), s.scheduler.Open(), creates, creates, creates)
	}
}

func TestNodesChangeTheirKeyOneAfterTheOther(t *testing.T) {
	t.Parallel()
	old, changed := berthNode(t, "old"), berthNode(t, "changed")
	changed.Key = "next-node-key-0123456789-0123456789"
	s := newStand(t, old, changed)
	cfg := s.config()
	cfg.NodeKeys = []string{gatewaytest.NodeKey, changed.Key}
	r := s.start(cfg)
	for range 4 {
		id := r.create()
		for _, call := range []ask{
			{method: "GET", path: "/sandboxes/" + id},
			{method: "POST", path: "/sandboxes/" + id + "/timeout", body: `{"timeout":60}`},
			{method: "GET", path: "/v2/sandboxes?strict=true"},
			{method: "DELETE", path: "/sandboxes/" + id},
		} {
			if a := r.do(call); a.Status != 200 && a.Status != 204 {
				t.Errorf("%s %s = %d %s", call.method, call.path, a.Status, a.Body)
			}
		}
	}
}

// Case C-08, on the control plane: a pooled connection that the node closed costs nobody a create.
func TestAConnectionThatDiedWhileIdleIsNotNoticed(t *testing.T) {
	t.Parallel()
	n := gatewaytest.NewNode(t, "n1") // draws its own ids, so a create is never repeated once it may have arrived
	s := newStand(t, n)
	r := s.start(s.config())
	for range 30 {
		r.create()
		n.CloseConnections()
	}
	if got := len(n.Sandboxes()); got != 30 {
		t.Errorf("%d sandboxes, want 30", got)
	}
}
