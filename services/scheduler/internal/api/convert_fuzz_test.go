package api

import (
	"testing"

	"google.golang.org/protobuf/proto"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/sandbox"
)

// FuzzCreate sends any request through the checks of a create: it is refused with a typed error, or what
// comes out is within the bounds that placement relies on.
func FuzzCreate(f *testing.F) {
	for _, seed := range []*schedulerv1.ScheduleRequest{
		{},
		hinted(), cold(1<<31, 1<<63),
		{RequestId: "r", Count: 7, Resources: &schedulerv1.Resources{CpuMillis: -1}},
		{Constraints: &schedulerv1.Constraints{NodeId: "a b", MaxPerNode: 1}, ReplaceReservationId: "x"},
	} {
		wire, err := proto.Marshal(seed)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(wire)
	}
	s := &Server{Deps: Deps{DefaultSize: sandbox.Size{CPUMillis: 2000, MemoryBytes: 512 << 20}}}
	f.Fuzz(func(t *testing.T, wire []byte) {
		r := &schedulerv1.ScheduleRequest{}
		if proto.Unmarshal(wire, r) != nil {
			return
		}
		out, err := s.create(r, hasBerthField(r.ProtoReflect()))
		if err != nil {
			return
		}
		switch {
		case out.Count < 1 || out.Count > maxCount,
			out.Size.CPUMillis < 1 || out.Size.CPUMillis > maxCPUMillis,
			out.Size.MemoryBytes < 1 || out.Size.MemoryBytes > maxMemoryBytes,
			out.TTL < 0 || out.TTL > maxHold,
			len(out.RequestID) > maxKeyBytes,
			(out.RequestID != "") != (len(out.Fingerprint) > 0):
			t.Errorf("create(%v) = %+v, which is out of bounds", r, out)
		}
	})
}

// FuzzHeartbeat does the same for what a node sends.
func FuzzHeartbeat(f *testing.F) {
	for _, seed := range []*schedulerv1.HeartbeatRequest{
		{},
		{NodeId: "n", ServiceInstanceId: "i", SandboxIds: []string{"a", "A", " a ", ""}},
		{NodeId: "n", ServiceInstanceId: "i", Roster: []*schedulerv1.RosterEntry{{SandboxId: "a", Incarnation: -1, CpuMillis: -1, MemoryBytes: 1 << 62}}},
	} {
		wire, err := proto.Marshal(seed)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(wire)
	}
	f.Fuzz(func(t *testing.T, wire []byte) {
		r := &schedulerv1.HeartbeatRequest{}
		if proto.Unmarshal(wire, r) != nil {
			return
		}
		beat, _, err := beatOf(r, callerOf(t.Context()).address)
		if err != nil {
			return
		}
		for _, entry := range beat.Roster {
			if _, err := sandbox.ParseID(string(entry.Sandbox)); err != nil {
				t.Errorf("beatOf(%v) lists %q: %v", r, entry.Sandbox, err)
			}
			if entry.Size.CPUMillis < 0 || entry.Size.MemoryBytes < 0 || entry.Incarnation < 0 {
				t.Errorf("beatOf(%v) lists %+v", r, entry)
			}
		}
	})
}
