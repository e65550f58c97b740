package conformance

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	schedulerv1 "berth/rpc/scheduler/v1"
)

// firstOfOurs is the lowest field number in AgentENV's messages that is not AgentENV's.
const firstOfOurs = 100

// rpcs are the methods as they stand in gRPC paths.
var rpcs = []string{
	"Schedule", "ListNodes", "LookupNode", "RecordAssignment", "Heartbeat", "ReportSandboxEvent", "ListObservedNodes",
	"ListP2pPeers", "RecordP2pArtifact", "ForgetP2pArtifact", "LookupP2pArtifact", "GetNode", "UnregisterNode",
}

// frozenMessages is what AgentENV's processes send and understand: a message a line, its fields by name,
// number and type. Map is map<string, string>; kind/ puts a field into a oneof of that name.
const frozenMessages = `
ScheduleRequest: hint 2 ScheduleRequestHint
ScheduleRequestHint: kind/new_cold_sandbox 1 NewColdSandboxHint, kind/new_sandbox 2 NewSandboxHint
NewColdSandboxHint: cpu_count 1 uint32, memory_mb 2 uint64, images 3 []string, metadata 4 map
NewSandboxHint: metadata 1 map
ScheduleResponse: node 1 Node
Node: node_id 1 string, endpoint 2 string
ListNodesRequest:
ListNodesResponse: nodes 1 []Node
LookupNodeRequest: sandbox_id 1 string
LookupNodeResponse: node 1 Node
RecordAssignmentRequest: sandbox_id 1 string, node 2 Node
RecordAssignmentResponse:
MachineInfo: cpu_family 1 string, cpu_model 2 string, cpu_model_name 3 string, cpu_architecture 4 string, cpu_config_json 5 string
DiskMetric: mount_point 1 string, device 2 string, filesystem_type 3 string, used_bytes 4 uint64, total_bytes 5 uint64
P2pEndpoint: backend 1 string, address 2 string
NodeSnapshot: status 1 NodeStatus, allocated_cpu 2 uint32, allocated_memory_bytes 3 uint64, cpu_percent 4 uint32, cpu_count 5 uint32, memory_used_bytes 6 uint64, memory_total_bytes 7 uint64, disks 8 []DiskMetric, sandbox_count 9 uint32, sandbox_starting_count 10 uint32, create_successes 11 uint64, create_fails 12 uint64, reported_at_unix_ms 13 int64, paused_sandbox_count 14 uint32, paused_allocated_cpu 15 uint32, paused_allocated_memory_bytes 16 uint64
ObservedNode: node_id 1 string, endpoint 2 string, cluster_id 3 string, service_instance_id 4 string, version 5 string, commit 6 string, machine_info 7 MachineInfo, snapshot 8 NodeSnapshot, last_seen_unix_ms 9 int64
HeartbeatRequest: node_id 1 string, cluster_id 2 string, service_instance_id 3 string, version 4 string, commit 5 string, machine_info 6 MachineInfo, snapshot 7 NodeSnapshot, sandbox_ids 8 []string, p2p_endpoint 9 P2pEndpoint
HeartbeatResponse: cpu_config_json 1 string
ReportSandboxEventRequest: node_id 1 string, cluster_id 2 string, service_instance_id 3 string, events 4 []SandboxEvent
ReportSandboxEventResponse:
SandboxEvent: sandbox_id 1 string, event_type 2 SandboxEventType, requested_cpu 3 uint32, requested_memory_bytes 4 uint64, requested_disk_bytes 5 uint64
ListObservedNodesRequest: cluster_id 1 string
ListObservedNodesResponse: nodes 1 []ObservedNode
GetNodeRequest: node_id 1 string, cluster_id 2 string
GetNodeResponse: node 1 ObservedNode
UnregisterNodeRequest: node_id 1 string, service_instance_id 2 string
UnregisterNodeResponse:
ListP2pPeersRequest: cluster_id 1 string, backend 2 string, exclude_node_id 3 string
ListP2pPeersResponse: peers 1 []P2pPeer
P2pPeer: node_id 1 string, endpoint 2 P2pEndpoint
RecordP2pArtifactRequest: cluster_id 1 string, backend 2 string, key 3 string, node_id 4 string
RecordP2pArtifactResponse:
ForgetP2pArtifactRequest: cluster_id 1 string, backend 2 string, key 3 string, node_id 4 string
ForgetP2pArtifactResponse:
LookupP2pArtifactRequest: cluster_id 1 string, backend 2 string, key 3 string, exclude_node_id 4 string
LookupP2pArtifactResponse: peers 1 []P2pPeer
`

// frozenEnums have their values in order of their numbers, from 0.
var frozenEnums = map[string][]string{
	"NodeStatus":       {"NODE_STATUS_UNSPECIFIED", "NODE_STATUS_READY", "NODE_STATUS_CONNECTING", "NODE_STATUS_UNHEALTHY", "NODE_STATUS_LINGERING"},
	"SandboxEventType": {"SANDBOX_EVENT_TYPE_UNSPECIFIED", "SANDBOX_EVENT_TYPE_CREATE", "SANDBOX_EVENT_TYPE_DELETE", "SANDBOX_EVENT_TYPE_PAUSE", "SANDBOX_EVENT_TYPE_RESUME", "SANDBOX_EVENT_TYPE_FORK"},
}

var scalars = map[string]descriptorpb.FieldDescriptorProto_Type{
	"string": descriptorpb.FieldDescriptorProto_TYPE_STRING, "uint32": descriptorpb.FieldDescriptorProto_TYPE_UINT32,
	"uint64": descriptorpb.FieldDescriptorProto_TYPE_UINT64, "int64": descriptorpb.FieldDescriptorProto_TYPE_INT64,
}

// frozen is AgentENV's scheduler.v1 as its own processes were built with it.
var frozen = sync.OnceValue(func() protoreflect.FileDescriptor {
	file := &descriptorpb.FileDescriptorProto{
		Name: new("agentenv/scheduler.proto"), Package: new("scheduler.v1"), Syntax: new("proto3"),
	}
	for line := range strings.Lines(strings.TrimSpace(frozenMessages)) {
		file.MessageType = append(file.MessageType, frozenMessage(strings.TrimSpace(line)))
	}
	for name, values := range frozenEnums {
		enum := &descriptorpb.EnumDescriptorProto{Name: new(name)}
		for i, value := range values {
			enum.Value = append(enum.Value, &descriptorpb.EnumValueDescriptorProto{Name: new(value), Number: new(int32(i))})
		}
		file.EnumType = append(file.EnumType, enum)
	}
	service := &descriptorpb.ServiceDescriptorProto{Name: new("Scheduler")}
	for _, rpc := range rpcs {
		service.Method = append(service.Method, &descriptorpb.MethodDescriptorProto{
			Name: new(rpc), InputType: new(".scheduler.v1." + rpc + "Request"), OutputType: new(".scheduler.v1." + rpc + "Response"),
		})
	}
	file.Service = append(file.Service, service)
	made, err := protodesc.NewFile(file, nil)
	if err != nil {
		panic(fmt.Sprintf("the frozen table is not a contract: %v", err))
	}
	return made
})

func frozenMessage(line string) *descriptorpb.DescriptorProto {
	name, fields, _ := strings.Cut(line, ":")
	m := &descriptorpb.DescriptorProto{Name: new(name)}
	for text := range strings.SplitSeq(fields, ", ") {
		words := strings.Fields(text)
		if len(words) == 0 {
			continue
		}
		number, err := strconv.ParseInt(words[1], 10, 32)
		if err != nil {
			panic(fmt.Sprintf("%s: %s: %v", name, text, err))
		}
		f := &descriptorpb.FieldDescriptorProto{
			Number: new(int32(number)), Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum(),
		}
		fieldName := words[0]
		if oneof, inside, ok := strings.Cut(fieldName, "/"); ok {
			fieldName = inside
			if len(m.OneofDecl) == 0 {
				m.OneofDecl = append(m.OneofDecl, &descriptorpb.OneofDescriptorProto{Name: new(oneof)})
			}
			f.OneofIndex = new(int32(0))
		}
		f.Name = new(fieldName)
		kind, repeated := strings.CutPrefix(words[2], "[]")
		if repeated {
			f.Label = descriptorpb.FieldDescriptorProto_LABEL_REPEATED.Enum()
		}
		scalar, isScalar := scalars[kind]
		switch {
		case kind == "map":
			f.Label = descriptorpb.FieldDescriptorProto_LABEL_REPEATED.Enum()
			f.Type, f.TypeName = descriptorpb.FieldDescriptorProto_TYPE_MESSAGE.Enum(), new(".scheduler.v1."+name+".MetadataEntry")
			m.NestedType = append(m.NestedType, textMap("MetadataEntry"))
		case isScalar:
			f.Type = scalar.Enum()
		case frozenEnums[kind] != nil:
			f.Type, f.TypeName = descriptorpb.FieldDescriptorProto_TYPE_ENUM.Enum(), new(".scheduler.v1."+kind)
		default:
			f.Type, f.TypeName = descriptorpb.FieldDescriptorProto_TYPE_MESSAGE.Enum(), new(".scheduler.v1."+kind)
		}
		m.Field = append(m.Field, f)
	}
	return m
}

// textMap is the entry of a map<string, string>.
func textMap(name string) *descriptorpb.DescriptorProto {
	entry := &descriptorpb.DescriptorProto{Name: new(name), Options: &descriptorpb.MessageOptions{MapEntry: new(true)}}
	for i, part := range []string{"key", "value"} {
		entry.Field = append(entry.Field, &descriptorpb.FieldDescriptorProto{
			Name: new(part), Number: new(int32(i + 1)), Type: descriptorpb.FieldDescriptorProto_TYPE_STRING.Enum(),
			Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum(),
		})
	}
	return entry
}

// TestTheServedContractHasAgentENVsFieldsAndNoOthersBelow100 compares the frozen table with what is
// served, both ways.
func TestTheServedContractHasAgentENVsFieldsAndNoOthersBelow100(t *testing.T) {
	t.Parallel()
	served := schedulerv1.File_scheduler_v1_scheduler_proto
	if diff := cmp.Diff(lines(frozen(), frozen()), lines(served, frozen())); diff != "" {
		t.Errorf("scheduler.v1 is not AgentENV's (-AgentENV's +served):\n%s", diff)
	}
}

// lines lists what file has of the messages, enums and methods that known has, fields below 100 only.
func lines(file, known protoreflect.FileDescriptor) []string {
	var out []string
	service := file.Services().ByName("Scheduler")
	for i := range service.Methods().Len() {
		m := service.Methods().Get(i)
		out = append(out, fmt.Sprintf("%s %s %s %t %t", m.FullName(), m.Input().FullName(), m.Output().FullName(), m.IsStreamingClient(), m.IsStreamingServer()))
	}
	for i := range known.Messages().Len() {
		name := known.Messages().Get(i).Name()
		message := file.Messages().ByName(name)
		if message == nil {
			out = append(out, fmt.Sprintf("no message %s", name))
			continue
		}
		for j := range message.Fields().Len() {
			f := message.Fields().Get(j)
			if f.Number() >= firstOfOurs {
				continue
			}
			kind := f.Kind().String()
			switch {
			case f.IsMap():
				kind = fmt.Sprintf("map %s %s", f.MapKey().Kind(), f.MapValue().Kind())
			case f.Message() != nil:
				kind = string(f.Message().FullName())
			case f.Enum() != nil:
				kind = string(f.Enum().FullName())
			}
			oneof := ""
			if in := f.ContainingOneof(); in != nil {
				oneof = string(in.FullName())
			}
			out = append(out, fmt.Sprintf("%s %d %s %s %s %s", f.FullName(), f.Number(), f.Cardinality(), kind, f.JSONName(), oneof))
		}
	}
	for i := range known.Enums().Len() {
		enum := file.Enums().ByName(known.Enums().Get(i).Name())
		for j := range enum.Values().Len() {
			out = append(out, fmt.Sprintf("%s %d", enum.Values().Get(j).FullName(), enum.Values().Get(j).Number()))
		}
	}
	slices.Sort(out)
	return out
}

// TestTheFrozenTableNoticesAChange is the control of the test above.
func TestTheFrozenTableNoticesAChange(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*descriptorpb.FileDescriptorProto){
		"a number": func(f *descriptorpb.FileDescriptorProto) { f.MessageType[5].Field[1].Number = new(int32(3)) },
		"a name":   func(f *descriptorpb.FileDescriptorProto) { f.MessageType[5].Field[1].Name = new("address") },
		"a type": func(f *descriptorpb.FileDescriptorProto) {
			f.MessageType[5].Field[1].Type = descriptorpb.FieldDescriptorProto_TYPE_BYTES.Enum()
		},
		"a value":  func(f *descriptorpb.FileDescriptorProto) { f.EnumType[0].Value = f.EnumType[0].Value[:2] },
		"a method": func(f *descriptorpb.FileDescriptorProto) { f.Service[0].Method = f.Service[0].Method[1:] },
	} {
		changed, ok := proto.Clone(protodesc.ToFileDescriptorProto(frozen())).(*descriptorpb.FileDescriptorProto)
		if !ok {
			t.Fatal("a clone is of another type")
		}
		change(changed)
		file, err := protodesc.NewFile(changed, nil)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if cmp.Equal(lines(frozen(), frozen()), lines(file, frozen())) {
			t.Errorf("%s was changed and nothing differs", name)
		}
	}
}
