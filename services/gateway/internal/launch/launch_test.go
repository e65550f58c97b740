package launch_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/gateway/internal/gatewaytest"
	"berth/services/gateway/internal/launch"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

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
