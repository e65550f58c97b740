package api

import (
	"context"
	"math"
	"strings"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/nodes"
)

// ReportSandboxEvent tells of changes between two rosters. Called by nodes, which never tell again: what is
// wrong in it is skipped and counted, and nothing is refused. Told twice, it changes nothing more.
func (s *Server) ReportSandboxEvent(ctx context.Context, r *schedulerv1.ReportSandboxEventRequest) (*schedulerv1.ReportSandboxEventResponse, error) {
	if err := s.Nodes.Tell(ctx, tellingOf(r)); err != nil {
		return nil, err
	}
	return &schedulerv1.ReportSandboxEventResponse{}, nil
}

// kinds has the events that a node may tell.
var kinds = map[schedulerv1.SandboxEventType]bindings.Kind{ //nolint:gochecknoglobals // a constant table
	schedulerv1.SandboxEventType_SANDBOX_EVENT_TYPE_CREATE: bindings.KindCreate,
	schedulerv1.SandboxEventType_SANDBOX_EVENT_TYPE_DELETE: bindings.KindDelete,
	schedulerv1.SandboxEventType_SANDBOX_EVENT_TYPE_PAUSE:  bindings.KindPause,
	schedulerv1.SandboxEventType_SANDBOX_EVENT_TYPE_RESUME: bindings.KindResume,
	schedulerv1.SandboxEventType_SANDBOX_EVENT_TYPE_FORK:   bindings.KindFork,
}

// tellingOf returns what r tells. Its cluster is not looked at: an event is of its node's cluster.
func tellingOf(r *schedulerv1.ReportSandboxEventRequest) nodes.Telling {
	t := nodes.Telling{Events: make([]bindings.Told, 0, len(r.GetEvents()))}
	if id, err := node.ParseID(r.GetNodeId()); err == nil {
		t.Node = id
	}
	if node.CheckTag("service_instance_id", r.GetServiceInstanceId()) == nil {
		t.Instance = r.GetServiceInstanceId()
	}
	for _, e := range r.GetEvents() {
		kind, known := kinds[e.GetEventType()]
		if !known {
			kind = bindings.KindUnknown
		}
		id, err := sandbox.ParseID(strings.TrimSpace(e.GetSandboxId()))
		if !known || err != nil || e.GetSeq() < 0 || e.GetIncarnation() < 0 {
			if t.Malformed == nil {
				t.Malformed = map[bindings.Kind]int{}
			}
			t.Malformed[kind]++
			continue
		}
		t.Events = append(t.Events, bindings.Told{
			Kind: kind, Sandbox: id, Disk: saturated(e.GetRequestedDiskBytes(), math.MaxInt64),
			Size: sandbox.Size{
				CPUMillis:   min(int64(e.GetRequestedCpu())*1000, maxCPUMillis),
				MemoryBytes: saturated(e.GetRequestedMemoryBytes(), maxMemoryBytes),
			},
			Incarnation: sandbox.Incarnation(e.GetIncarnation()), Seq: e.GetSeq(),
		})
	}
	return t
}

func saturated(n uint64, most int64) int64 { return int64(min(n, uint64(most))) }
