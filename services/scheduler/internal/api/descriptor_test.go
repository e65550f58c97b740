package api

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/reflect/protoreflect"

	schedulerv1 "berth/rpc/scheduler/v1"
)

// TestAgentENVsFieldsAreFrozen compares what AgentENV's nodes and gateways speak with the list that was
// written down when they were built: names, numbers and types of the fields below 100, the values of
// their enums, the methods with their messages.
func TestAgentENVsFieldsAreFrozen(t *testing.T) {
	t.Parallel()
	frozen, err := os.ReadFile("testdata/agentenv.txt")
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Split(strings.TrimSpace(string(frozen)), "\n")
	if diff := cmp.Diff(want, describe(schedulerv1.File_scheduler_v1_scheduler_proto, func(n protoreflect.FieldNumber) bool { return n < firstBerthField })); diff != "" {
		t.Errorf("scheduler.v1 is not AgentENV's any more (-frozen +now):\n%s", diff)
	}
}

// berthMessages have no field that AgentENV knows, so their fields begin at 1.
var berthMessages = []string{
	"Resources", "Capacity", "NewSandbox", "TokenHashes", "ArtifactAffinity", "Constraints", "Assigned", "RosterEntry",
	"ExtendPlacementRequest", "ExtendPlacementResponse", "ReleasePlacementRequest", "ReleasePlacementResponse",
	"ReleaseSandboxRequest", "ReleaseSandboxResponse",
}

func TestBerthsFieldsInAgentENVsMessagesStartAt100(t *testing.T) {
	t.Parallel()
	file := schedulerv1.File_scheduler_v1_scheduler_proto
	messages := file.Messages()
	for i := range messages.Len() {
		m := messages.Get(i)
		for j := range m.Fields().Len() {
			f := m.Fields().Get(j)
			if f.Number() >= firstBerthField && f.Number() > 199 {
				t.Errorf("%s.%s has number %d: ours are 100 to 199", m.Name(), f.Name(), f.Number())
			}
		}
	}
}

func describe(file protoreflect.FileDescriptor, keep func(protoreflect.FieldNumber) bool) []string {
	var lines []string
	service := file.Services().ByName("Scheduler")
	for i := range service.Methods().Len() {
		m := service.Methods().Get(i)
		lines = append(lines, fmt.Sprintf("rpc %s(%s) %s", m.Name(), m.Input().Name(), m.Output().Name()))
	}
	for i := range file.Messages().Len() {
		m := file.Messages().Get(i)
		if slices.Contains(berthMessages, string(m.Name())) {
			continue
		}
		lines = append(lines, "message "+string(m.Name()))
		for j := range m.Fields().Len() {
			if f := m.Fields().Get(j); keep(f.Number()) {
				lines = append(lines, fmt.Sprintf("%s.%s %d %s", m.Name(), f.Name(), f.Number(), typeOf(f)))
			}
		}
	}
	for _, name := range []protoreflect.Name{"NodeStatus", "SandboxEventType"} {
		values := file.Enums().ByName(name).Values()
		for i := range values.Len() {
			lines = append(lines, fmt.Sprintf("%s %d", values.Get(i).Name(), values.Get(i).Number()))
		}
	}
	return lines
}

func typeOf(f protoreflect.FieldDescriptor) string {
	var kind string
	switch {
	case f.IsMap():
		return fmt.Sprintf("map<%s, %s>", f.MapKey().Kind(), f.MapValue().Kind())
	case f.Message() != nil:
		kind = string(f.Message().Name())
	case f.Enum() != nil:
		kind = string(f.Enum().Name())
	default:
		kind = f.Kind().String()
	}
	if f.IsList() {
		kind = "repeated " + kind
	}
	if oneof := f.ContainingOneof(); oneof != nil && !oneof.IsSynthetic() {
		kind += " oneof " + string(oneof.Name())
	}
	return kind
}
