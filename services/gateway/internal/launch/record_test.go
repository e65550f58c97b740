package launch_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/gateway/internal/gatewaytest"
	"berth/services/gateway/internal/launch"
	"berth/services/internal/node"
)

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
