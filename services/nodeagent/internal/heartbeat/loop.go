// Package heartbeat tells the schedulers who this node is, how it is and which sandboxes live here.
package heartbeat

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
	"berth/services/internal/sandbox"
	"berth/services/nodeagent/internal/sandboxes"
)

// Times of heartbeats; the schedulers may ask for another period.
const (
	firstAfter   = 100 * time.Millisecond
	defaultEvery = 5 * time.Second
	leastEvery   = 100 * time.Millisecond
	mostEvery    = time.Minute
	callLimit    = 10 * time.Second
	firstBackoff = 5 * time.Second
	mostBackoff  = time.Minute
)

// Identity is who this node says it is.
type Identity struct {
	NodeID       string
	ClusterID    string
	InstanceID   string // of this process
	Version      string
	Commit       string
	Endpoint     string
	Labels       map[string]string
	Capabilities []string
	Capacity     *schedulerv1.Capacity
	P2P          *schedulerv1.P2PEndpoint // nil: none
}

// Living is whose roster goes out, and who ends what must not live here.
type Living interface {
	List() []sandboxes.View
	Usage() sandboxes.Usage
	Delete(ctx context.Context, id sandbox.ID) error
}

// Reporter sends heartbeats. Run it once.
type Reporter struct {
	identity  Identity
	scheduler Scheduler
	living    Living
	machine   *Machine
	metrics   *Metrics
	log       *slog.Logger

	seq int64 // Run's own

	mu      sync.Mutex
	trusted time.Time // until then the last lease holds, by our clock
	lastErr error
	known   bool // a heartbeat was accepted
}

// Deps is what a Reporter works with.
type Deps struct {
	Identity  Identity
	Scheduler Scheduler
	Living    Living
	Machine   *Machine
	Metrics   *Metrics
	Log       *slog.Logger
}

// New returns a reporter that has said nothing yet.
func New(d Deps) *Reporter {
	return &Reporter{identity: d.Identity, scheduler: d.Scheduler, living: d.Living, machine: d.Machine, metrics: d.Metrics, log: d.Log}
}

// Run sends heartbeats until ctx ends. A failure is logged, told by Ready, and tried again after a growing pause; it never ends
// the node, whose sandboxes can be reached without a scheduler.
func (r *Reporter) Run(ctx context.Context) error {
	timer := time.NewTimer(firstAfter)
	defer timer.Stop()
	backoff := firstBackoff
	for {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return nil
		}
		answer, err := r.beat(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			r.log.WarnContext(ctx, "heartbeat failed", slog.String("todo", advice(err)), slog.Duration("again_after", backoff), slog.Any("error", err))
			timer.Reset(backoff)
			backoff = min(2*backoff, mostBackoff)
			continue
		}
		backoff = firstBackoff
		r.endOrphans(ctx, answer.GetOrphanSandboxIds())
		timer.Reset(period(answer.GetNextHeartbeatMs()))
	}
}

// period is the pause the scheduler asks for, within reason, less a little so that nodes do not march in step.
func period(ms uint32) time.Duration {
	every := defaultEvery
	if ms > 0 {
		every = min(max(time.Duration(ms)*time.Millisecond, leastEvery), mostEvery)
	}
	return every - time.Duration(rand.Int64N(int64(every/10)+1)) //nolint:gosec // jitter is no secret
}

// beat sends one heartbeat. The time it is trusted counts from before the question left.
func (r *Reporter) beat(ctx context.Context) (*schedulerv1.HeartbeatResponse, error) {
	limited, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	asked := time.Now()
	answer, err := r.scheduler.Heartbeat(limited, r.request())
	if err != nil {
		err = rpcerr.Decode(err)
	}
	r.metrics.beat(time.Since(asked), err)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lastErr = err
	if err != nil {
		return nil, err
	}
	if !r.known {
		r.known = true
		r.log.InfoContext(ctx, "node is registered", slog.String("node", r.identity.NodeID), slog.Int64("epoch", answer.GetEpoch()))
	}
	lease := time.Duration(answer.GetLeaseTtlMs()) * time.Millisecond
	if lease == 0 {
		lease = 30 * time.Second // a scheduler that says none: its default
	}
	r.trusted = asked.Add(lease)
	return answer, nil
}

func (r *Reporter) request() *schedulerv1.HeartbeatRequest {
	r.seq++
	views := r.living.List()
	req := &schedulerv1.HeartbeatRequest{
		NodeId: r.identity.NodeID, ClusterId: r.identity.ClusterID, ServiceInstanceId: r.identity.InstanceID,
		Version: r.identity.Version, Commit: r.identity.Commit, MachineInfo: r.machine.Info(), Snapshot: r.snapshot(),
		P2PEndpoint: r.identity.P2P, Endpoint: r.identity.Endpoint, Labels: r.identity.Labels, Capacity: r.identity.Capacity,
		Seq: r.seq, Capabilities: r.identity.Capabilities,
	}
	details := make([]node.Entry, 0, len(views))
	for _, v := range views {
		details = append(details, node.Entry{Sandbox: v.ID})
		req.SandboxIds = append(req.SandboxIds, string(v.ID))
		req.Roster = append(req.Roster, &schedulerv1.RosterEntry{
			SandboxId: string(v.ID), ReservationId: v.Reservation, CpuMillis: v.CPUMillis, MemoryBytes: v.MemoryBytes,
		})
	}
	roster, _ := node.NewRoster(nil, details)
	req.RosterDigest = roster.Digest()
	return req
}

func (r *Reporter) snapshot() *schedulerv1.NodeSnapshot {
	u := r.living.Usage()
	s := &schedulerv1.NodeSnapshot{
		Status:       schedulerv1.NodeStatus_NODE_STATUS_READY,
		AllocatedCpu: wholeCPUs(u.CPUMillis), AllocatedMemoryBytes: uint64(u.MemoryBytes),
		SandboxCount: uint32(u.Running), SandboxStartingCount: uint32(u.Starting), PausedSandboxCount: uint32(u.Paused),
		PausedAllocatedCpu: wholeCPUs(u.PausedCPUMillis), PausedAllocatedMemoryBytes: uint64(u.PausedMemoryBytes),
		CreateSuccesses: u.Created, CreateFails: u.Failed, ReportedAtUnixMs: time.Now().UnixMilli(),
	}
	r.machine.Measure(s)
	return s
}

func wholeCPUs(millis int64) uint32 { return uint32((millis + 999) / 1000) }

// endOrphans ends what the schedulers say must not live here: it lives elsewhere, or was deleted.
func (r *Reporter) endOrphans(ctx context.Context, ids []string) {
	for _, text := range ids {
		id, err := sandbox.ParseID(text)
		if err != nil {
			continue
		}
		err = r.living.Delete(ctx, id)
		if errors.Is(err, sandboxes.ErrNotFound) {
			continue
		}
		if err != nil {
			r.log.ErrorContext(ctx, "orphan could not be ended", slog.Any("sandbox", id), slog.Any("error", err))
			continue
		}
		r.log.WarnContext(ctx, "sandbox ended: the scheduler says that it must not live here", slog.Any("sandbox", id))
	}
}

// advice says what an operator can do about a refused heartbeat.
func advice(err error) string {
	switch {
	case errors.Is(err, node.ErrSuperseded):
		return "a newer agent runs under this node id; stop this one"
	case errors.Is(err, node.ErrIDInUse):
		return "another machine uses this node id, or this node's endpoint changed while its lease lived: set another --node-id, or wait until the lease has ended"
	case errors.Is(err, node.ErrBadEndpoint):
		return "the schedulers do not allow --endpoint: set BERTH_ENDPOINT_CIDRS and BERTH_ENDPOINT_SCHEMES there, or BERTH_ENDPOINT_LOOPBACK for one machine"
	case errors.Is(err, node.ErrNotListed):
		return "the schedulers take listed nodes only: list this one, or start them with --register"
	case errors.Is(err, rpcerr.ErrUnauthenticated), errors.Is(err, rpcerr.ErrDenied):
		return "set BERTH_SCHEDULER_TOKEN to one of the schedulers' BERTH_SCHEDULER_NODE_TOKENS"
	case errors.Is(err, rpcerr.ErrUnavailable):
		return "the schedulers cannot reach PostgreSQL"
	case unanswered(err):
		return "no scheduler answers: check the addresses and that one runs"
	}
	return "none if it heals by itself"
}

// unanswered reports whether a call ended without any scheduler's word.
func unanswered(err error) bool {
	if _, network := errors.AsType[net.Error](err); network { // a deadline of ours is one, too
		return true
	}
	code := status.Code(err)
	return code == codes.DeadlineExceeded || code == codes.Unavailable
}

// errNoLease is what Ready says before the first heartbeat was accepted.
var errNoLease = errors.New("no heartbeat was accepted yet")

// Ready reports whether the schedulers have accepted a heartbeat within the lease.
func (r *Reporter) Ready(context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.known && time.Now().Before(r.trusted):
		return nil
	case r.lastErr != nil:
		return fmt.Errorf("heartbeat: %s", advice(r.lastErr)) // not the cause, which may hold addresses
	case r.known:
		return errors.New("the lease has ended")
	}
	return errNoLease
}

// Unregister tells the schedulers that this node leaves, so that nobody waits for its lease to end. It does nothing if they never
// knew it.
func (r *Reporter) Unregister(ctx context.Context) error {
	r.mu.Lock()
	known := r.known
	r.mu.Unlock()
	if !known {
		return nil
	}
	_, err := r.scheduler.UnregisterNode(ctx, &schedulerv1.UnregisterNodeRequest{NodeId: r.identity.NodeID, ServiceInstanceId: r.identity.InstanceID})
	if err != nil {
		return fmt.Errorf("unregister: %w", rpcerr.Decode(err))
	}
	return nil
}
