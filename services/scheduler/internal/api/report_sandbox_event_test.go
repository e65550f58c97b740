package api

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/placement"
)

const (
	create = schedulerv1.SandboxEventType_SANDBOX_EVENT_TYPE_CREATE
	remove = schedulerv1.SandboxEventType_SANDBOX_EVENT_TYPE_DELETE
	pause  = schedulerv1.SandboxEventType_SANDBOX_EVENT_TYPE_PAUSE
	resume = schedulerv1.SandboxEventType_SANDBOX_EVENT_TYPE_RESUME
	fork   = schedulerv1.SandboxEventType_SANDBOX_EVENT_TYPE_FORK
)

// eventCounts returns events_total by kind and effect, as "kind effect".
func (h *harness) eventCounts(t *testing.T) map[string]float64 {
	t.Helper()
	return gathered(t, h.registry, "berth_scheduler_events_total")
}

func gathered(t *testing.T, registry *prometheus.Registry, name string) map[string]float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]float64{}
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, metric := range family.GetMetric() {
			words := map[string]string{}
			for _, label := range metric.GetLabel() {
				words[label.GetName()] = label.GetValue()
			}
			counts[words["kind"]+" "+words["effect"]] = metric.GetCounter().GetValue()
		}
	}
	return counts
}

// TestAnAgentENVNodeTellsWithItsOwnFields plays a node's day over each transport, without a token.
func TestAnAgentENVNodeTellsWithItsOwnFields(t *testing.T) {
	t.Parallel()
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, allTokens(), placement.Limits{})
			h.ready(t, "n1", 9)
			tell := func(events ...*schedulerv1.SandboxEvent) {
				t.Helper()
				got := h.call(t, transport, scheduler+"ReportSandboxEvent", "", &schedulerv1.ReportSandboxEventRequest{
					NodeId: "n1", ClusterId: "c", ServiceInstanceId: "i1", Events: events,
				}, &schedulerv1.ReportSandboxEventResponse{})
				if got.Code != "ok" {
					t.Fatalf("ReportSandboxEvent = %+v, want ok", got)
				}
			}
			where := func(id string) string {
				t.Helper()
				var found schedulerv1.LookupNodeResponse
				got := h.call(t, transport, scheduler+"LookupNode", "", &schedulerv1.LookupNodeRequest{SandboxId: id}, &found)
				if got.Code != "ok" {
					return got.Code
				}
				return found.GetNode().GetNodeId()
			}
			h.must(t, scheduler+"Schedule", "", hinted(), &schedulerv1.ScheduleResponse{})
			tell(&schedulerv1.SandboxEvent{SandboxId: "box", EventType: create, RequestedCpu: 2, RequestedMemoryBytes: 1 << 30})
			h.must(t, scheduler+"RecordAssignment", "", &schedulerv1.RecordAssignmentRequest{
				SandboxId: "box", Node: &schedulerv1.Node{NodeId: "n1", Endpoint: listed},
			}, &schedulerv1.RecordAssignmentResponse{})
			tell(
				&schedulerv1.SandboxEvent{SandboxId: "child-1", EventType: fork, RequestedCpu: 1},
				&schedulerv1.SandboxEvent{SandboxId: " child-2 ", EventType: fork},
				&schedulerv1.SandboxEvent{SandboxId: "box", EventType: pause}, &schedulerv1.SandboxEvent{SandboxId: "box", EventType: resume})
			for _, id := range []string{"box", "child-1", "child-2"} {
				if got := where(id); got != "n1" {
					t.Errorf("LookupNode(%s) = %s, want n1", id, got)
				}
			}
			var holds, open int
			if err := h.db.QueryRow(t.Context(), "SELECT count(sandbox_id), count(*) FILTER (WHERE sandbox_id IS NULL) FROM reservations").Scan(&holds, &open); err != nil || holds != 3 || open != 0 {
				t.Errorf("%d confirmed and %d open holds (%v), want one a sandbox and none open", holds, open, err)
			}
			tell(&schedulerv1.SandboxEvent{SandboxId: "box", EventType: remove}, &schedulerv1.SandboxEvent{SandboxId: "child-1", EventType: remove})
			for id, want := range map[string]string{"box": "not_found", "child-1": "not_found", "child-2": "n1"} {
				if got := where(id); got != want {
					t.Errorf("after the deletes LookupNode(%s) = %s, want %s", id, got, want)
				}
			}
			want := map[string]float64{"create bound": 1, "fork bound": 2, "pause noted": 1, "resume noted": 1, "delete ended": 2}
			if diff := cmp.Diff(want, h.eventCounts(t)); diff != "" {
				t.Errorf("events_total (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWhatIsNoEventIsSkippedCountedAndLoggedOnce(t *testing.T) {
	t.Parallel()
	h := newHarness(t, allTokens(), placement.Limits{})
	h.ready(t, "n1", 9)
	request := &schedulerv1.ReportSandboxEventRequest{NodeId: "n1", ServiceInstanceId: "i1", Events: []*schedulerv1.SandboxEvent{
		{SandboxId: "", EventType: create},
		{SandboxId: "No Label", EventType: create},
		{SandboxId: strings.Repeat("a", 58), EventType: remove},
		{SandboxId: "good", EventType: create},
		{SandboxId: "good"},
		{SandboxId: "good", EventType: 99},
		{SandboxId: "other", EventType: fork, Seq: -1},
		{SandboxId: "other", EventType: fork, Incarnation: -1},
	}}
	for range 2 {
		h.must(t, scheduler+"ReportSandboxEvent", nodeToken, request, &schedulerv1.ReportSandboxEventResponse{})
	}
	request.NodeId = "n9"
	h.must(t, scheduler+"ReportSandboxEvent", nodeToken, request, &schedulerv1.ReportSandboxEventResponse{})
	want := map[string]float64{
		"create bound": 1, "create already": 1, "create unknown_node": 1,
		"create malformed": 6, "delete malformed": 3, "unknown malformed": 6, "fork malformed": 6,
	}
	if diff := cmp.Diff(want, h.eventCounts(t)); diff != "" {
		t.Errorf("events_total (-want +got):\n%s", diff)
	}
	var stored int
	if err := h.db.QueryRow(t.Context(), "SELECT count(*) FROM sandbox_events").Scan(&stored); err != nil || stored != 2 {
		t.Errorf("%d events are stored (%v), want the two of the good sandbox", stored, err)
	}
	if got := strings.Count(h.log.String(), "a node tells what is no event"); got != 2 {
		t.Errorf("%d lines in the log, want one for each node:\n%s", got, h.log)
	}
}

func TestSizesSaturate(t *testing.T) {
	t.Parallel()
	h := newHarness(t, allTokens(), placement.Limits{})
	h.ready(t, "n1", 9)
	h.must(t, scheduler+"ReportSandboxEvent", nodeToken, &schedulerv1.ReportSandboxEventRequest{
		NodeId: "n1", ServiceInstanceId: "i1",
		Events: []*schedulerv1.SandboxEvent{{SandboxId: "vast", EventType: create, RequestedCpu: 1<<32 - 1, RequestedMemoryBytes: 1<<64 - 1, RequestedDiskBytes: 1<<64 - 1, Seq: 1<<63 - 1}},
	}, &schedulerv1.ReportSandboxEventResponse{})
	var cpu, memory, disk, seq int64
	const sql = `SELECT r.cpu_millis, r.memory_bytes, e.disk_bytes, l.event_seq FROM reservations AS r
		JOIN sandbox_events AS e ON e.sandbox_id = r.sandbox_id JOIN node_leases AS l ON l.node_id = r.node_id`
	if err := h.db.QueryRow(t.Context(), sql).Scan(&cpu, &memory, &disk, &seq); err != nil {
		t.Fatal(err)
	}
	if cpu != maxCPUMillis || memory != maxMemoryBytes || disk != 1<<63-1 || seq != 1<<63-1 {
		t.Errorf("stored %d millis, %d and %d bytes, seq %d; want the widest that are stored", cpu, memory, disk, seq)
	}
}

func FuzzTellingOf(f *testing.F) {
	f.Add("n1", "i1", "s", int32(1), uint32(1), uint64(1), int64(1), int64(1))
	f.Add("n 1", "i\x00", " S", int32(-1), ^uint32(0), ^uint64(0), int64(-1), int64(-1<<63))
	f.Fuzz(func(t *testing.T, id, instance, box string, kind int32, cpu uint32, memory uint64, seq, incarnation int64) {
		got := tellingOf(&schedulerv1.ReportSandboxEventRequest{NodeId: id, ServiceInstanceId: instance, Events: []*schedulerv1.SandboxEvent{{
			SandboxId: box, EventType: schedulerv1.SandboxEventType(kind), RequestedCpu: cpu, RequestedMemoryBytes: memory, RequestedDiskBytes: memory,
			Seq: seq, Incarnation: incarnation,
		}}})
		malformed := 0
		for _, count := range got.Malformed {
			malformed += count
		}
		if len(got.Events)+malformed != 1 {
			t.Fatalf("tellingOf = %+v, want the event once", got)
		}
		for _, e := range got.Events {
			if _, err := sandbox.ParseID(string(e.Sandbox)); err != nil || e.Kind == bindings.KindUnknown || e.Seq < 0 || e.Incarnation < 0 || e.Disk < 0 ||
				e.Size.CPUMillis < 0 || e.Size.CPUMillis > maxCPUMillis || e.Size.MemoryBytes < 0 || e.Size.MemoryBytes > maxMemoryBytes {
				t.Errorf("tellingOf = %+v, which may not be stored", e)
			}
		}
	})
}
