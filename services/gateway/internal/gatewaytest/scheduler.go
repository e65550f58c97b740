package gatewaytest

import (
	"context"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
	"berth/services/internal/sandbox"
)

// HoldMs is how long a fake scheduler's holds last, unless Scheduler.Hold says otherwise.
const HoldMs = 30_000

// Scheduler stands for a scheduler process, and for its replicas: they share what they know. The hooks
// are called without a lock; nil ones do the usual.
type Scheduler struct {
	schedulerv1.Scheduler // methods that no gateway calls

	OnSchedule func(*schedulerv1.ScheduleRequest) error
	OnRecord   func(context.Context, *schedulerv1.RecordAssignmentRequest) (revision int64, err error)
	OnEnd      func(context.Context, *schedulerv1.ReleaseSandboxRequest) (revision int64, err error)
	Hold       uint32

	mu       sync.Mutex
	nodes    []*schedulerv1.Node
	caps     map[string][]string
	next     int64
	open     map[string]*schedulerv1.ScheduleResponse // by reservation
	byReq    map[string]*schedulerv1.ScheduleResponse // by tenant and request id
	calls    []Call
	revision int64
}

// Call is one call that arrived, in order.
type Call struct {
	Method  string
	Request proto.Message
}

// NewScheduler returns a scheduler that places on nodes, round robin.
func NewScheduler(nodes ...*Node) *Scheduler {
	s := &Scheduler{
		Hold: HoldMs, caps: map[string][]string{},
		open: map[string]*schedulerv1.ScheduleResponse{}, byReq: map[string]*schedulerv1.ScheduleResponse{},
	}
	for _, n := range nodes {
		s.nodes = append(s.nodes, &schedulerv1.Node{NodeId: string(n.ID), Endpoint: n.URL})
		s.caps[string(n.ID)] = n.Capabilities
	}
	return s
}

// Serve starts a replica that ends with t, and returns its URL.
func (s *Scheduler) Serve(t testing.TB) string {
	t.Helper()
	scheduler := schedulerv1.NewSchedulerServer(s)
	placements := schedulerv1.NewPlacementsServer(s)
	mux := http.NewServeMux()
	mux.Handle(scheduler.PathPrefix(), scheduler)
	mux.Handle(placements.PathPrefix(), placements)
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL
}

// Calls returns the calls of these methods that have arrived, all without any.
func (s *Scheduler) Calls(methods ...string) []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []Call
	for _, c := range s.calls {
		if len(methods) == 0 || slices.Contains(methods, c.Method) {
			found = append(found, c)
		}
	}
	return found
}

// Open returns how many reservations are neither recorded nor released.
func (s *Scheduler) Open() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.open)
}

func (s *Scheduler) note(method string, r proto.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, Call{Method: method, Request: proto.Clone(r)})
}

// Schedule reserves on the next node that is not excluded; a request id that is open is answered again.
func (s *Scheduler) Schedule(_ context.Context, r *schedulerv1.ScheduleRequest) (*schedulerv1.ScheduleResponse, error) {
	s.note("Schedule", r)
	if s.OnSchedule != nil {
		if err := s.OnSchedule(r); err != nil {
			return nil, rpcerr.Twirp(err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := r.GetTenantId() + "/" + r.GetRequestId()
	if before, ok := s.byReq[key]; ok && s.open[before.GetReservationId()] != nil {
		return before, nil
	}
	delete(s.open, r.GetReplaceReservationId())
	for range s.nodes {
		n := s.nodes[int(s.next)%len(s.nodes)]
		s.next++
		if slices.Contains(r.GetExcludeNodeIds(), n.GetNodeId()) {
			continue
		}
		out := &schedulerv1.ScheduleResponse{
			Node: n, PlacementId: s.next, ReservationId: uuid.NewString(), HoldMs: s.Hold,
			State: schedulerv1.PlacementState_PLACEMENT_STATE_NEW, NodeCapabilities: s.caps[n.GetNodeId()],
		}
		if slices.Contains(out.GetNodeCapabilities(), "create_key") {
			id, err := sandbox.NewID()
			if err != nil {
				return nil, rpcerr.Twirp(err)
			}
			out.SandboxId = string(id)
		}
		s.open[out.GetReservationId()], s.byReq[key] = out, out
		return out, nil
	}
	return nil, rpcerr.Twirp(&node.Refused{Cause: node.ErrNoneReady})
}

// RecordAssignment confirms the reservation.
func (s *Scheduler) RecordAssignment(ctx context.Context, r *schedulerv1.RecordAssignmentRequest) (*schedulerv1.RecordAssignmentResponse, error) {
	s.note("RecordAssignment", r)
	s.mu.Lock()
	s.revision++
	revision := s.revision
	s.mu.Unlock()
	if s.OnRecord != nil {
		var err error
		if revision, err = s.OnRecord(ctx, r); err != nil {
			return nil, rpcerr.Twirp(err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, r.GetReservationId())
	out := &schedulerv1.RecordAssignmentResponse{}
	for _, id := range append([]string{r.GetSandboxId()}, r.GetMoreSandboxIds()...) {
		out.Assigned = append(out.Assigned, &schedulerv1.Assigned{SandboxId: id, Revision: revision, Incarnation: 1})
	}
	return out, nil
}

// ExtendPlacement extends an open reservation.
func (s *Scheduler) ExtendPlacement(_ context.Context, r *schedulerv1.ExtendPlacementRequest) (*schedulerv1.ExtendPlacementResponse, error) {
	s.note("ExtendPlacement", r)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[r.GetReservationId()] == nil {
		return nil, rpcerr.Twirp(node.ErrNotOpen)
	}
	return &schedulerv1.ExtendPlacementResponse{HoldMs: r.GetTtlMs()}, nil
}

// ReleasePlacement ends an open reservation.
func (s *Scheduler) ReleasePlacement(_ context.Context, r *schedulerv1.ReleasePlacementRequest) (*schedulerv1.ReleasePlacementResponse, error) {
	s.note("ReleasePlacement", r)
	s.mu.Lock()
	defer s.mu.Unlock()
	_, released := s.open[r.GetReservationId()]
	delete(s.open, r.GetReservationId())
	return &schedulerv1.ReleasePlacementResponse{Released: released}, nil
}

// ReleaseSandbox ends a binding.
func (s *Scheduler) ReleaseSandbox(ctx context.Context, r *schedulerv1.ReleaseSandboxRequest) (*schedulerv1.ReleaseSandboxResponse, error) {
	s.note("ReleaseSandbox", r)
	if s.OnEnd == nil {
		return &schedulerv1.ReleaseSandboxResponse{Revision: r.GetRevision() + 1}, nil
	}
	revision, err := s.OnEnd(ctx, r)
	if err != nil {
		return nil, rpcerr.Twirp(err)
	}
	return &schedulerv1.ReleaseSandboxResponse{Revision: revision}, nil
}

// Refusing returns the URL of an address nobody listens on.
func Refusing(t testing.TB) string {
	t.Helper()
	server := httptest.NewServer(http.NotFoundHandler())
	server.Close()
	return server.URL
}
