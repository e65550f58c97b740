package api

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/node"
	"berth/services/scheduler/internal/nodes"
	"berth/services/scheduler/internal/placement"
)

const (
	scheduler  = "scheduler.v1.Scheduler/"
	placements = "scheduler.v1.Placements/"
	listed     = "http://10.0.0.9:8000"
)

// ready makes id a listed node that is heard and has room for capacity sandboxes.
func (h *harness) ready(t *testing.T, id string, capacity uint32) {
	t.Helper()
	if err := h.nodes.ApplyStatic(t.Context(), []nodes.StaticNode{{ID: node.ID(id), Endpoint: listed}}); err != nil {
		t.Fatal(err)
	}
	h.must(t, scheduler+"Heartbeat", nodeToken, &schedulerv1.HeartbeatRequest{
		NodeId: id, ServiceInstanceId: "i1", ClusterId: "c", Capacity: &schedulerv1.Capacity{Sandboxes: capacity},
		Snapshot: &schedulerv1.NodeSnapshot{Status: schedulerv1.NodeStatus_NODE_STATUS_READY, CpuCount: 4, MemoryTotalBytes: 8 << 30},
	}, &schedulerv1.HeartbeatResponse{})
}

func hinted() *schedulerv1.ScheduleRequest {
	return &schedulerv1.ScheduleRequest{Hint: &schedulerv1.ScheduleRequestHint{
		Kind: &schedulerv1.ScheduleRequestHint_NewSandbox{NewSandbox: &schedulerv1.NewSandboxHint{}},
	}}
}

// TestWhatIsRefusedAndHow walks the texts and codes of scheduler.md 1.3, on both transports.
func TestWhatIsRefusedAndHow(t *testing.T) {
	t.Parallel()
	h := newHarness(t, allTokens(), placement.Limits{})
	h.ready(t, "n1", 99)
	for _, instance := range []string{"i0", "i1"} { // i1 takes over at the same place
		h.must(t, scheduler+"Heartbeat", nodeToken, &schedulerv1.HeartbeatRequest{NodeId: "r1", ServiceInstanceId: instance, Endpoint: "http://10.0.0.6:8000"},
			&schedulerv1.HeartbeatResponse{})
	}
	at := &schedulerv1.Node{NodeId: "n1", Endpoint: listed}
	h.must(t, scheduler+"RecordAssignment", gatewayToken, &schedulerv1.RecordAssignmentRequest{
		SandboxId: "elsewhere", Node: &schedulerv1.Node{NodeId: "r1", Endpoint: "http://10.0.0.6:8000"}, TenantId: "t",
	}, &schedulerv1.RecordAssignmentResponse{})
	bad := func(text, reason string) outcome { return outcome{"invalid_argument", text, reason, false} }
	words := func(text string) outcome { return bad(text, "invalid") }
	unlisted := bad("node is not in scheduler node list", "node_not_listed")
	unknown := outcome{"not_found", "sandbox assignment not found", "unknown_sandbox", false}
	fine := outcome{"ok", "", "", false}
	long := strings.Repeat("x", 300)
	const (
		heldText   = "cluster_id, backend, key, and node_id are required"
		lookupText = "cluster_id, backend, and key are required"
	)

	tests := map[string]struct {
		method, token string
		request       proto.Message
		want          outcome
	}{
		"lookup: blank":         {"LookupNode", "", &schedulerv1.LookupNodeRequest{SandboxId: " "}, bad("sandbox_id is required", "sandbox_id_required")},
		"lookup: malformed":     {"LookupNode", "", &schedulerv1.LookupNodeRequest{SandboxId: "No Such"}, unknown},
		"lookup: unknown":       {"LookupNode", "", &schedulerv1.LookupNodeRequest{SandboxId: "nobody"}, unknown},
		"lookup: oversized":     {"LookupNode", "", &schedulerv1.LookupNodeRequest{SandboxId: long}, unknown},
		"record: blank id":      {"RecordAssignment", "", &schedulerv1.RecordAssignmentRequest{Node: at}, bad("sandbox_id is required", "sandbox_id_required")},
		"record: no node":       {"RecordAssignment", "", &schedulerv1.RecordAssignmentRequest{SandboxId: "a"}, bad("node_id and endpoint are required", "node_required")},
		"record: no endpoint":   {"RecordAssignment", "", &schedulerv1.RecordAssignmentRequest{SandboxId: "a", Node: &schedulerv1.Node{NodeId: "n1"}}, bad("node_id and endpoint are required", "node_required")},
		"record: malformed id":  {"RecordAssignment", "", &schedulerv1.RecordAssignmentRequest{SandboxId: "A_B", Node: at}, bad("sandbox_id is not valid", "sandbox_id_invalid")},
		"record: unknown node":  {"RecordAssignment", "", &schedulerv1.RecordAssignmentRequest{SandboxId: "a", Node: &schedulerv1.Node{NodeId: "n2", Endpoint: listed}}, unlisted},
		"record: other address": {"RecordAssignment", "", &schedulerv1.RecordAssignmentRequest{SandboxId: "a", Node: &schedulerv1.Node{NodeId: "n1", Endpoint: "http://10.0.0.8:8000"}}, unlisted},
		"record: odd node id":   {"RecordAssignment", "", &schedulerv1.RecordAssignmentRequest{SandboxId: "a", Node: &schedulerv1.Node{NodeId: "n 1", Endpoint: listed}}, unlisted},
		"record: ended reservation, no room": {
			"RecordAssignment", gatewayToken, &schedulerv1.RecordAssignmentRequest{SandboxId: "a", Node: at, ReservationId: uuid.NewString(), MoreSandboxIds: manyIDs(99)},
			outcome{"failed_precondition", "reservation has ended and the node has no room", "reservation_over", false},
		},
		"record: another revision": {
			"RecordAssignment", gatewayToken, &schedulerv1.RecordAssignmentRequest{SandboxId: "elsewhere", Node: at, ExpectedRevision: 1 << 40, TenantId: "t"},
			outcome{"failed_precondition", "binding has changed", "binding_changed", false},
		},
		"record: another tenant's": {
			"RecordAssignment", gatewayToken, &schedulerv1.RecordAssignmentRequest{SandboxId: "elsewhere", Node: at, TenantId: "u"},
			outcome{"already_exists", "sandbox_id is in use", "sandbox_in_use", false},
		},
		"record: odd reservation": {"RecordAssignment", gatewayToken, &schedulerv1.RecordAssignmentRequest{SandboxId: "a", Node: at, ReservationId: "x"}, words("reservation_id is not a reservation id")},
		"record: same id twice":   {"RecordAssignment", gatewayToken, &schedulerv1.RecordAssignmentRequest{SandboxId: "a", Node: at, MoreSandboxIds: []string{"b", "a"}}, words("more_sandbox_ids repeats a")},
		"record: 100 more":        {"RecordAssignment", gatewayToken, &schedulerv1.RecordAssignmentRequest{SandboxId: "a", Node: at, MoreSandboxIds: manyIDs(100)}, words("more_sandbox_ids has 100 ids, at most 99")},
		"record: negative size":   {"RecordAssignment", gatewayToken, &schedulerv1.RecordAssignmentRequest{SandboxId: "a", Node: at, Resources: &schedulerv1.Resources{MemoryBytes: -1}}, words("resources.memory_bytes must be 0 to 1125899906842624, not -1")},
		"record: token hashes":    {"RecordAssignment", gatewayToken, &schedulerv1.RecordAssignmentRequest{SandboxId: "a", Node: at, TokenHashes: []*schedulerv1.TokenHashes{{}}}, words("token_hashes is not supported yet")},

		"heartbeat: blank node":       {"Heartbeat", "", &schedulerv1.HeartbeatRequest{ServiceInstanceId: "i"}, bad("node_id and service_instance_id are required", "instance_required")},
		"heartbeat: blank instance":   {"Heartbeat", "", &schedulerv1.HeartbeatRequest{NodeId: "n1"}, bad("node_id and service_instance_id are required", "instance_required")},
		"heartbeat: unknown":          {"Heartbeat", "", &schedulerv1.HeartbeatRequest{NodeId: "n2", ServiceInstanceId: "i"}, unlisted},
		"heartbeat: odd id":           {"Heartbeat", "", &schedulerv1.HeartbeatRequest{NodeId: "n/1", ServiceInstanceId: "i"}, unlisted},
		"heartbeat: oversized tag":    {"Heartbeat", "", &schedulerv1.HeartbeatRequest{NodeId: "n1", ServiceInstanceId: long}, bad("field is not valid", "field_invalid")},
		"heartbeat: control byte":     {"Heartbeat", "", &schedulerv1.HeartbeatRequest{NodeId: "n1", ServiceInstanceId: "i\x01"}, bad("field is not valid", "field_invalid")},
		"heartbeat: another instance": {"Heartbeat", nodeToken, &schedulerv1.HeartbeatRequest{NodeId: "r1", ServiceInstanceId: "i2", Endpoint: "http://10.0.0.7:8000"}, outcome{"already_exists", "node_id is in use by another instance", "node_id_in_use", false}},
		"heartbeat: superseded":       {"Heartbeat", nodeToken, &schedulerv1.HeartbeatRequest{NodeId: "r1", ServiceInstanceId: "i0", Endpoint: "http://10.0.0.6:8000"}, outcome{"failed_precondition", "service instance superseded", "instance_superseded", false}},
		"heartbeat: bad endpoint":     {"Heartbeat", nodeToken, &schedulerv1.HeartbeatRequest{NodeId: "n3", ServiceInstanceId: "i", Endpoint: "http://8.8.8.8:80"}, bad("endpoint is not allowed", "endpoint_refused")},
		"heartbeat: no URL":           {"Heartbeat", nodeToken, &schedulerv1.HeartbeatRequest{NodeId: "n3", ServiceInstanceId: "i", Endpoint: "10.0.0.7"}, bad("endpoint is not allowed", "endpoint_refused")},

		"get: blank":              {"GetNode", "", &schedulerv1.GetNodeRequest{NodeId: "\t"}, bad("node_id is required", "node_id_required")},
		"get: unknown":            {"GetNode", "", &schedulerv1.GetNodeRequest{NodeId: "n2"}, outcome{"not_found", "observed node not found", "unknown_node", false}},
		"get: odd id":             {"GetNode", "", &schedulerv1.GetNodeRequest{NodeId: "n 2"}, outcome{"not_found", "observed node not found", "unknown_node", false}},
		"get: impossible cluster": {"GetNode", "", &schedulerv1.GetNodeRequest{NodeId: "n1", ClusterId: "c\x00"}, outcome{"not_found", "observed node not found", "unknown_node", false}},
		"get: other cluster":      {"GetNode", "", &schedulerv1.GetNodeRequest{NodeId: "n1", ClusterId: "d"}, outcome{"not_found", "observed node not found", "unknown_node", false}},

		"unregister: blank":          {"UnregisterNode", "", &schedulerv1.UnregisterNodeRequest{NodeId: "n1"}, bad("node_id and service_instance_id are required", "instance_required")},
		"unregister: other instance": {"UnregisterNode", "", &schedulerv1.UnregisterNodeRequest{NodeId: "n1", ServiceInstanceId: "i9"}, outcome{"failed_precondition", "service instance mismatch", "instance_mismatch", false}},
		"unregister: unknown":        {"UnregisterNode", "", &schedulerv1.UnregisterNodeRequest{NodeId: "n 9", ServiceInstanceId: "i9"}, outcome{"ok", "", "", false}},

		"schedule: oversized request id":         {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{RequestId: long}, words("request_id has 300 bytes, at most 255")},
		"schedule: control byte":                 {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{RequestId: "a\x00"}, words("request_id has a control character or is not UTF-8")},
		"schedule: oversized tenant":             {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{TenantId: long}, bad("field is not valid", "field_invalid")},
		"schedule: 101 at once":                  {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{Count: 101}, words("count must be 1 to 100, not 101")},
		"schedule: held too long":                {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{ReservationTtlMs: 900_001}, words("reservation_ttl_ms must be at most 900000, not 900001")},
		"schedule: negative CPU":                 {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{Resources: &schedulerv1.Resources{CpuMillis: -5}}, words("resources.cpu_millis must be 0 to 1000000000, not -5")},
		"schedule: absurd memory":                {"Schedule", "", cold(1, 1<<60), words("hint.new_cold_sandbox.memory_mb must be at most 1073741824, not 1152921504606846976")},
		"schedule: absurd CPU":                   {"Schedule", "", cold(1<<31, 1), words("hint.new_cold_sandbox.cpu_count must be at most 1000000, not 2147483648")},
		"schedule: odd pinned node":              {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{Constraints: &schedulerv1.Constraints{NodeId: "a b"}}, bad("node_id is not valid", "node_id_invalid")},
		"schedule: odd excluded node":            {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{ExcludeNodeIds: []string{"a b"}}, bad("node_id is not valid", "node_id_invalid")},
		"schedule: oversized label":              {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{Constraints: &schedulerv1.Constraints{Labels: map[string]string{"k": long}}}, words("constraints.labels has 300 bytes, at most 63")},
		"schedule: spread without key":           {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{Constraints: &schedulerv1.Constraints{MaxPerNode: 1}}, words("constraints.max_per_node needs constraints.spread_key")},
		"schedule: required artifact of no name": {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{Constraints: &schedulerv1.Constraints{Artifact: &schedulerv1.ArtifactAffinity{Required: true}}}, words("constraints.artifact needs backend and key")},
		"schedule: artifact without key":         {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{Constraints: &schedulerv1.Constraints{Artifact: &schedulerv1.ArtifactAffinity{Backend: "b", Key: " "}}}, words("constraints.artifact needs backend and key")},
		"schedule: artifact of nobody":           {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{Constraints: &schedulerv1.Constraints{Artifact: &schedulerv1.ArtifactAffinity{Backend: "b", Key: "k", Required: true}}}, outcome{"failed_precondition", "no node satisfies the constraints", "constraints", false}},
		"schedule: odd replacement":              {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{ReplaceReservationId: "x"}, words("replace_reservation_id is not a reservation id")},
		"schedule: create key without digest":    {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{CreateKey: "k"}, words("create_key and create_digest go together")},
		"schedule: digest without create key":    {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{CreateDigest: []byte{1}}, words("create_key and create_digest go together")},
		"schedule: oversized create key":         {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{CreateKey: long, CreateDigest: []byte{1}}, words("create_key has 300 bytes, at most 255")},
		"schedule: control byte in a create key": {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{CreateKey: "k\n", CreateDigest: []byte{1}}, words("create_key has a control character or is not UTF-8")},
		"schedule: oversized digest":             {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{CreateKey: "k", CreateDigest: make([]byte, 65)}, words("create_digest has 65 bytes, at most 64")},

		"events: none":                  {"ReportSandboxEvent", "", &schedulerv1.ReportSandboxEventRequest{}, fine},
		"events: of nobody":             {"ReportSandboxEvent", "", &schedulerv1.ReportSandboxEventRequest{Events: []*schedulerv1.SandboxEvent{{SandboxId: "a", EventType: 1}}}, fine},
		"events: of an unknown node":    {"ReportSandboxEvent", "", &schedulerv1.ReportSandboxEventRequest{NodeId: "n2", ServiceInstanceId: "i1", Events: []*schedulerv1.SandboxEvent{{SandboxId: "a", EventType: 1}}}, fine},
		"events: of an odd node":        {"ReportSandboxEvent", "", &schedulerv1.ReportSandboxEventRequest{NodeId: "n 1\x00", Events: []*schedulerv1.SandboxEvent{{SandboxId: "a", EventType: 1}}}, fine},
		"events: of another instance":   {"ReportSandboxEvent", "", &schedulerv1.ReportSandboxEventRequest{NodeId: "n1", ServiceInstanceId: long + "\x00", Events: []*schedulerv1.SandboxEvent{{SandboxId: "a", EventType: 1}}}, fine},
		"events: malformed":             {"ReportSandboxEvent", "", &schedulerv1.ReportSandboxEventRequest{NodeId: "n1", ServiceInstanceId: "i1", Events: []*schedulerv1.SandboxEvent{{}, {SandboxId: "A\x00", EventType: 1}, {SandboxId: "a"}, {SandboxId: "a", EventType: 77}, nil}}, fine},
		"events: of extreme sizes":      {"ReportSandboxEvent", "", &schedulerv1.ReportSandboxEventRequest{NodeId: "n1", ServiceInstanceId: "i1", Events: []*schedulerv1.SandboxEvent{{SandboxId: "vast", EventType: 1, RequestedCpu: 1<<32 - 1, RequestedMemoryBytes: 1<<64 - 1, RequestedDiskBytes: 1<<64 - 1}}}, fine},
		"events: numbers without token": {"ReportSandboxEvent", "", &schedulerv1.ReportSandboxEventRequest{NodeId: "n1", ServiceInstanceId: "i1", Events: []*schedulerv1.SandboxEvent{{SandboxId: "a", EventType: 1, Seq: 1}}}, outcome{"unauthenticated", "token is missing or wrong", "unauthenticated", false}},

		"peers: of anything":                  {"ListP2pPeers", "", &schedulerv1.ListP2PPeersRequest{}, fine},
		"peers: of what nobody can be in":     {"ListP2pPeers", "", &schedulerv1.ListP2PPeersRequest{ClusterId: long, Backend: "b\x00", ExcludeNodeId: "a b"}, fine},
		"artifact: no cluster":                {"RecordP2pArtifact", "", &schedulerv1.RecordP2PArtifactRequest{ClusterId: " ", Backend: "b", Key: "k", NodeId: "n1"}, words(heldText)},
		"artifact: no backend":                {"RecordP2pArtifact", "", &schedulerv1.RecordP2PArtifactRequest{ClusterId: "c", Backend: "\t", Key: "k", NodeId: "n1"}, words(heldText)},
		"artifact: no key":                    {"RecordP2pArtifact", "", &schedulerv1.RecordP2PArtifactRequest{ClusterId: "c", Backend: "b", NodeId: "n1"}, words(heldText)},
		"artifact: no node":                   {"RecordP2pArtifact", "", &schedulerv1.RecordP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "k", NodeId: " "}, words(heldText)},
		"artifact: unknown node":              {"RecordP2pArtifact", "", &schedulerv1.RecordP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "k", NodeId: "n2"}, unlisted},
		"artifact: odd node id":               {"RecordP2pArtifact", "", &schedulerv1.RecordP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "k", NodeId: "n 1"}, unlisted},
		"artifact: oversized cluster":         {"RecordP2pArtifact", "", &schedulerv1.RecordP2PArtifactRequest{ClusterId: long, Backend: "b", Key: "k", NodeId: "n1"}, bad("field is not valid", "field_invalid")},
		"artifact: control byte in a backend": {"RecordP2pArtifact", "", &schedulerv1.RecordP2PArtifactRequest{ClusterId: "c", Backend: "b\x01b", Key: "k", NodeId: "n1"}, bad("field is not valid", "field_invalid")},
		"artifact: oversized key":             {"RecordP2pArtifact", "", &schedulerv1.RecordP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: strings.Repeat("k", 1025), NodeId: "n1"}, words("key has 1025 bytes, at most 1024")},
		"artifact: control byte in a key":     {"RecordP2pArtifact", "", &schedulerv1.RecordP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "k\x00k", NodeId: "n1"}, words("key has a control character or is not UTF-8")},
		"artifact: largest key":               {"RecordP2pArtifact", "", &schedulerv1.RecordP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: strings.Repeat("k", 1024), NodeId: "n1"}, fine},
		"forget: no node":                     {"ForgetP2pArtifact", "", &schedulerv1.ForgetP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "k"}, words(heldText)},
		"forget: no key":                      {"ForgetP2pArtifact", "", &schedulerv1.ForgetP2PArtifactRequest{ClusterId: "c", Backend: "b", NodeId: "n1"}, words(heldText)},
		"forget: oversized key":               {"ForgetP2pArtifact", "", &schedulerv1.ForgetP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: strings.Repeat("k", 1025), NodeId: "n1"}, words("key has 1025 bytes, at most 1024")},
		"forget: what nobody recorded":        {"ForgetP2pArtifact", "", &schedulerv1.ForgetP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "k", NodeId: "n2"}, fine},
		"forget: of no node at all":           {"ForgetP2pArtifact", "", &schedulerv1.ForgetP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "k", NodeId: "n 2"}, fine},
		"look up: no cluster":                 {"LookupP2pArtifact", "", &schedulerv1.LookupP2PArtifactRequest{Backend: "b", Key: "k"}, words(lookupText)},
		"look up: no backend":                 {"LookupP2pArtifact", "", &schedulerv1.LookupP2PArtifactRequest{ClusterId: "c", Backend: " ", Key: "k"}, words(lookupText)},
		"look up: no key":                     {"LookupP2pArtifact", "", &schedulerv1.LookupP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "\n"}, words(lookupText)},
		"look up: oversized backend":          {"LookupP2pArtifact", "", &schedulerv1.LookupP2PArtifactRequest{ClusterId: "c", Backend: long, Key: "k"}, bad("field is not valid", "field_invalid")},
		"look up: what nobody recorded":       {"LookupP2pArtifact", "", &schedulerv1.LookupP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "k", ExcludeNodeId: "a b"}, fine},
		"look up: with a gateway's token":     {"LookupP2pArtifact", gatewayToken, &schedulerv1.LookupP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "k"}, fine},

		"extend: nothing open":        {"Placements/ExtendPlacement", gatewayToken, &schedulerv1.ExtendPlacementRequest{PlacementId: 1 << 40, ReservationId: uuid.NewString(), TtlMs: 5}, outcome{"failed_precondition", "reservation is not open", "reservation_not_open", false}},
		"extend: no time":             {"Placements/ExtendPlacement", gatewayToken, &schedulerv1.ExtendPlacementRequest{PlacementId: 1, ReservationId: uuid.NewString()}, words("ttl_ms must be 1 to 900000")},
		"extend: too long":            {"Placements/ExtendPlacement", gatewayToken, &schedulerv1.ExtendPlacementRequest{PlacementId: 1, ReservationId: uuid.NewString(), TtlMs: 1 << 30}, words("ttl_ms must be at most 900000, not 1073741824")},
		"release: unknown":            {"Placements/ReleasePlacement", gatewayToken, &schedulerv1.ReleasePlacementRequest{PlacementId: 1 << 40, ReservationId: uuid.NewString()}, outcome{"ok", "", "", false}},
		"release: unknown reason":     {"Placements/ReleasePlacement", gatewayToken, &schedulerv1.ReleasePlacementRequest{PlacementId: 1, ReservationId: uuid.NewString(), Reason: 77}, words("reason 77 is not known")},
		"release sandbox: blank":      {"Placements/ReleaseSandbox", gatewayToken, &schedulerv1.ReleaseSandboxRequest{}, bad("sandbox_id is required", "sandbox_id_required")},
		"release sandbox: malformed":  {"Placements/ReleaseSandbox", gatewayToken, &schedulerv1.ReleaseSandboxRequest{SandboxId: "A"}, bad("sandbox_id is not valid", "sandbox_id_invalid")},
		"release sandbox: gone":       {"Placements/ReleaseSandbox", gatewayToken, &schedulerv1.ReleaseSandboxRequest{SandboxId: "nobody"}, outcome{"ok", "", "", false}},
		"release sandbox: changed":    {"Placements/ReleaseSandbox", gatewayToken, &schedulerv1.ReleaseSandboxRequest{SandboxId: "elsewhere", Revision: 1 << 40}, outcome{"failed_precondition", "binding has changed", "binding_changed", false}},
		"release sandbox: backwards":  {"Placements/ReleaseSandbox", gatewayToken, &schedulerv1.ReleaseSandboxRequest{SandboxId: "nobody", Revision: -1}, words("revision must not be negative")},
		"list observed never refuses": {"ListObservedNodes", "", &schedulerv1.ListObservedNodesRequest{ClusterId: " c "}, outcome{"ok", "", "", false}},
		"list never refuses":          {"ListNodes", "", &schedulerv1.ListNodesRequest{}, outcome{"ok", "", "", false}},
	}
	for name, tt := range tests {
		for _, transport := range transports {
			t.Run(name+" over "+transport, func(t *testing.T) {
				method := scheduler + tt.method
				if rpc, ok := strings.CutPrefix(tt.method, "Placements/"); ok {
					method = placements + rpc
				}
				got := h.call(t, transport, method, tt.token, tt.request, answerOf(t, method))
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Errorf("%s(%v) (-want +got):\n%s", method, tt.request, diff)
				}
			})
		}
	}
}

// manyIDs are valid sandbox ids.
func manyIDs(n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = uuid.NewString()
	}
	return ids
}

func cold(cpus uint32, memoryMB uint64) *schedulerv1.ScheduleRequest {
	return &schedulerv1.ScheduleRequest{Hint: &schedulerv1.ScheduleRequestHint{
		Kind: &schedulerv1.ScheduleRequestHint_NewColdSandbox{NewColdSandbox: &schedulerv1.NewColdSandboxHint{CpuCount: cpus, MemoryMb: memoryMB}},
	}}
}

// answerOf returns an empty answer of a method.
func answerOf(t *testing.T, method string) proto.Message {
	t.Helper()
	service, rpc, _ := strings.Cut(strings.TrimPrefix(method, "scheduler.v1."), "/")
	descriptor := schedulerv1.File_scheduler_v1_scheduler_proto.Services().ByName(protoName(service)).Methods().ByName(protoName(rpc))
	if descriptor == nil {
		t.Fatalf("%s is no method", method)
	}
	return newMessage(t, descriptor.Output().FullName())
}

// TestWhyNoNodeTakesACreate walks scheduler.md 2.4 for both kinds of callers on both transports.
func TestWhyNoNodeTakesACreate(t *testing.T) {
	t.Parallel()
	none := outcome{"unavailable", "no nodes available", "no_ready_node", true}
	tests := map[string]struct {
		setup   func(t *testing.T, h *harness)
		token   string
		request *schedulerv1.ScheduleRequest
		want    outcome
	}{
		"nobody is there, AgentENV's pick":   {request: &schedulerv1.ScheduleRequest{}, want: none},
		"nobody is there, AgentENV's create": {request: hinted(), want: none},
		"nobody is there":                    {token: gatewayToken, request: &schedulerv1.ScheduleRequest{Count: 1}, want: none},
		"no room":                            {setup: fill, token: gatewayToken, request: &schedulerv1.ScheduleRequest{Count: 1}, want: outcome{"resource_exhausted", "no node has room", "capacity", true}},
		"no room, AgentENV's create":         {setup: fill, request: hinted(), want: none},
		"no such cluster": {
			setup: func(t *testing.T, h *harness) { h.ready(t, "n1", 5) }, token: gatewayToken, request: &schedulerv1.ScheduleRequest{ClusterId: "nowhere"},
			want: outcome{"failed_precondition", "no node satisfies the constraints", "constraints", false},
		},
		"over the quota": {
			setup: func(t *testing.T, h *harness) {
				h.ready(t, "n1", 5)
				if _, err := h.db.Exec(t.Context(), "INSERT INTO tenant_quotas (tenant_id, max_sandboxes) VALUES ('t', 0)"); err != nil {
					t.Fatal(err)
				}
			}, token: gatewayToken, request: &schedulerv1.ScheduleRequest{TenantId: "t"},
			want: outcome{"resource_exhausted", "tenant quota exceeded", "quota", true},
		},
		"the key was used": {
			setup: func(t *testing.T, h *harness) {
				h.ready(t, "n1", 5)
				h.must(t, scheduler+"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{RequestId: "r"}, &schedulerv1.ScheduleResponse{})
			}, token: gatewayToken, request: &schedulerv1.ScheduleRequest{RequestId: "r", Resources: &schedulerv1.Resources{CpuMillis: 1}},
			want: outcome{"already_exists", "request_id was used for a different request", "request_reused", false},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, allTokens(), placement.Limits{})
			if tt.setup != nil {
				tt.setup(t, h)
			}
			for _, transport := range transports {
				got := h.call(t, transport, scheduler+"Schedule", tt.token, tt.request, &schedulerv1.ScheduleResponse{})
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Errorf("over %s (-want +got):\n%s", transport, diff)
				}
			}
		})
	}
}

func fill(t *testing.T, h *harness) {
	t.Helper()
	h.ready(t, "n1", 1)
	h.must(t, scheduler+"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{Count: 1}, &schedulerv1.ScheduleResponse{})
}

// TestAnAgentENVGatewayIsServedByItsOwnFields plays its calls with what it knows, without a token.
func TestAnAgentENVGatewayIsServedByItsOwnFields(t *testing.T) {
	t.Parallel()
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, allTokens(), placement.Limits{})
			h.ready(t, "n1", 2)
			want := &schedulerv1.Node{NodeId: "n1", Endpoint: listed}
			for name, request := range map[string]*schedulerv1.ScheduleRequest{"a pick": {}, "a create": hinted()} {
				var placed schedulerv1.ScheduleResponse
				if got := h.call(t, transport, scheduler+"Schedule", "", request, &placed); got.Code != "ok" {
					t.Fatalf("%s: Schedule = %+v", name, got)
				}
				if !proto.Equal(&placed, &schedulerv1.ScheduleResponse{Node: want}) {
					t.Errorf("%s: Schedule = %v, want the node and nothing that AgentENV does not know", name, &placed)
				}
			}
			if got := h.call(t, transport, scheduler+"RecordAssignment", "", &schedulerv1.RecordAssignmentRequest{SandboxId: "box", Node: want}, &schedulerv1.RecordAssignmentResponse{}); got.Code != "ok" {
				t.Fatalf("RecordAssignment = %+v", got)
			}
			var found schedulerv1.LookupNodeResponse
			if got := h.call(t, transport, scheduler+"LookupNode", "", &schedulerv1.LookupNodeRequest{SandboxId: "box"}, &found); got.Code != "ok" || !proto.Equal(found.GetNode(), want) {
				t.Errorf("LookupNode = %+v, %v", got, &found)
			}
			var holds int
			if err := h.db.QueryRow(t.Context(), "SELECT count(*) FROM reservations WHERE sandbox_id = 'box' AND NOT named").Scan(&holds); err != nil || holds != 1 {
				t.Errorf("%d holds of the create became the sandbox's (%v), want 1", holds, err)
			}
		})
	}
}

// TestInternalErrorsShowNothing breaks the schema under a running server.
func TestInternalErrorsShowNothing(t *testing.T) {
	t.Parallel()
	h := newHarness(t, allTokens(), placement.Limits{})
	h.ready(t, "n1", 5)
	if _, err := h.db.Exec(t.Context(), "ALTER TABLE reservations RENAME TO elsewhere"); err != nil {
		t.Fatal(err)
	}
	if _, err := h.db.Exec(t.Context(), "ALTER TABLE bindings RENAME COLUMN node_id TO nobody"); err != nil {
		t.Fatal(err)
	}
	want := outcome{"internal", "internal error", "internal", false}
	for _, transport := range transports {
		for method, request := range map[string]proto.Message{
			"Schedule": &schedulerv1.ScheduleRequest{Count: 1}, "LookupNode": &schedulerv1.LookupNodeRequest{SandboxId: "a"},
			"GetNode": &schedulerv1.GetNodeRequest{NodeId: "n1"},
		} {
			got := h.call(t, transport, scheduler+method, gatewayToken, request, answerOf(t, scheduler+method))
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s over %s (-want +got):\n%s", method, transport, diff)
			}
		}
	}
	if log := h.log.String(); !strings.Contains(log, "42P01") {
		t.Errorf("the log does not have the cause: %s", log)
	}
}
