package nodeagent_test

import (
	"context"
	"net"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/rpcerr"
)

// fakeScheduler stands for another process: it takes heartbeats and remembers them.
type fakeScheduler struct {
	schedulerv1.UnimplementedSchedulerServer

	mu        sync.Mutex
	changed   chan struct{} // replaced with each event
	beats     []*schedulerv1.HeartbeatRequest
	tokens    []string
	unreg     []*schedulerv1.UnregisterNodeRequest
	orphans   []string
	refuse    error
	onUnreg   func()
	heartbeat uint32 // ms asked for
}

func newFakeScheduler() *fakeScheduler {
	return &fakeScheduler{changed: make(chan struct{}), heartbeat: 200}
}

func (f *fakeScheduler) event() { close(f.changed); f.changed = make(chan struct{}) }

func (f *fakeScheduler) Heartbeat(ctx context.Context, r *schedulerv1.HeartbeatRequest) (*schedulerv1.HeartbeatResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		f.tokens = append(f.tokens, md.Get("authorization")...)
	}
	f.beats = append(f.beats, r)
	f.event()
	if f.refuse != nil {
		return nil, rpcerr.GRPC(f.refuse)
	}
	return &schedulerv1.HeartbeatResponse{LeaseTtlMs: 30_000, NextHeartbeatMs: f.heartbeat, OrphanSandboxIds: f.orphans, Epoch: 1}, nil
}

func (f *fakeScheduler) UnregisterNode(_ context.Context, r *schedulerv1.UnregisterNodeRequest) (*schedulerv1.UnregisterNodeResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unreg = append(f.unreg, r)
	if f.onUnreg != nil {
		f.onUnreg()
	}
	f.event()
	return &schedulerv1.UnregisterNodeResponse{}, nil
}

func (f *fakeScheduler) set(change func(*fakeScheduler)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

// wait waits until ok is true of what was heard.
func (f *fakeScheduler) wait(t testing.TB, what string, ok func(*fakeScheduler) bool) {
	t.Helper()
	limit := time.After(30 * time.Second)
	for {
		f.mu.Lock()
		done, changed := ok(f), f.changed
		f.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-limit:
			t.Fatalf("the scheduler never heard: %s", what)
		}
	}
}

func (f *fakeScheduler) waitRoster(t testing.TB, ids ...string) {
	t.Helper()
	slices.Sort(ids)
	f.wait(t, "a roster of exactly those sandboxes", func(f *fakeScheduler) bool {
		return len(f.beats) > 0 && slices.Equal(f.beats[len(f.beats)-1].GetSandboxIds(), ids)
	})
}

// serveGRPC serves the scheduler on a free port.
func serveGRPC(t testing.TB, f *fakeScheduler) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	schedulerv1.RegisterSchedulerServer(server, f)
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(l) })
	t.Cleanup(func() { server.Stop(); served.Wait() })
	return l.Addr().String()
}

// serveTwirp serves it over Twirp.
func serveTwirp(t testing.TB, f *fakeScheduler) string {
	t.Helper()
	server := httptest.NewServer(schedulerv1.NewSchedulerServer(f))
	t.Cleanup(server.Close)
	return server.URL
}
