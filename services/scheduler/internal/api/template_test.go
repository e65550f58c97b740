package api

import (
	"crypto/sha256"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/scheduler/internal/placement"
)

// A cluster's template from its nodes' configurations to a create that asks for it, as the wire has it.
func TestATemplateGoesFromNodesToNodesAndCreates(t *testing.T) {
	t.Parallel()
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, allTokens(), placement.Limits{})
			call := func(rpc, token string, request, response proto.Message) {
				t.Helper()
				if got := h.call(t, transport, scheduler+rpc, token, request, response); got.Code != "ok" {
					t.Fatalf("%s(%v) = %+v, want ok", rpc, request, got)
				}
			}
			beat := func(id, instance, config string, more ...func(*schedulerv1.HeartbeatRequest)) string {
				t.Helper()
				r := &schedulerv1.HeartbeatRequest{
					NodeId: id, ServiceInstanceId: instance, ClusterId: "c", Endpoint: "http://10.0.0." + strings.TrimPrefix(id, "n") + ":8000",
					MachineInfo: &schedulerv1.MachineInfo{CpuConfigJson: config},
					Snapshot:    &schedulerv1.NodeSnapshot{Status: schedulerv1.NodeStatus_NODE_STATUS_READY, CpuCount: 64, MemoryTotalBytes: 1 << 40},
				}
				for _, f := range more {
					f(r)
				}
				var answer schedulerv1.HeartbeatResponse
				call("Heartbeat", nodeToken, r, &answer)
				return answer.GetCpuConfigJson()
			}
			want := func(what, got, want string) {
				t.Helper()
				if got != want {
					t.Errorf("%s: cpu_config_json = %q, want %q", what, got, want)
				}
			}
			const (
				one  = `{"kvm_capabilities":["b","a"],"cpuid_modifiers":[{"leaf":"0x1","subleaf":"0x0","flags":0,"modifiers":[{"register":"ecx","bitmap":"0b111"}]},{"leaf":"0xb","subleaf":"0x0","flags":1,"modifiers":[]}],"msr_modifiers":[]}`
				two  = `{"kvm_capabilities":["a"],"cpuid_modifiers":[{"leaf":"1","subleaf":"0","flags":0,"modifiers":[{"register":"ecx","bitmap":"101"}]}]}`
				both = `{"kvm_capabilities":["a"],"cpuid_modifiers":[{"leaf":"0x1","subleaf":"0x0","flags":0,"modifiers":[{"register":"ecx","bitmap":"0b00000000000000000000000000000101"}]}],"msr_modifiers":[]}`
			)
			want("a node before another has sent its own", beat("n1", "i1", ""), "")
			want("the other", beat("n2", "i1", two), "")
			want("the last to send its own", beat("n1", "i1", one), both)
			want("the same again", beat("n1", "i1", ""), "")
			want("the other again", beat("n2", "i1", ""), both)
			want("a restart", beat("n2", "i2", two), both)

			digest := sha256.Sum256([]byte(both))
			berth := func(r *schedulerv1.HeartbeatRequest) { r.Capabilities = []string{"create_key"} }
			echo := func(r *schedulerv1.HeartbeatRequest) { r.CpuTemplateDigest = digest[:16] }
			want("a Berth node that has not echoed", beat("n3", "i1", two, berth), both)
			want("a Berth node that has not echoed", beat("n3", "i1", two, berth), both)
			want("a Berth node that echoes", beat("n3", "i1", two, berth, echo), "")

			var placed schedulerv1.ScheduleResponse
			asks := func(digest []byte) *schedulerv1.ScheduleRequest {
				return &schedulerv1.ScheduleRequest{
					ClusterId: "c", DryRun: true, Resources: &schedulerv1.Resources{CpuMillis: 1, MemoryBytes: 1},
					Constraints: &schedulerv1.Constraints{CpuTemplateDigest: digest},
				}
			}
			call("Schedule", gatewayToken, asks(digest[:16]), &placed)
			if got := h.call(t, transport, scheduler+"Schedule", gatewayToken, asks([]byte{1}), &placed); got.Code == "ok" {
				t.Error("a create for a template that no cluster has was placed")
			}

			beat("n2", "i2", `{"cpuid_modifiers":[{"leaf":"x"}]}`)
			var shown schedulerv1.GetNodeResponse
			call("GetNode", "", &schedulerv1.GetNodeRequest{NodeId: "n2"}, &shown)
			if got := shown.GetNode().GetCpuConfigError(); !strings.Contains(got, "cpuid_modifiers[0].leaf") {
				t.Errorf("cpu_config_error = %q, want it to say where", got)
			}
			if got := h.call(t, transport, scheduler+"Schedule", gatewayToken, asks(digest[:16]), &placed); got.Code == "ok" {
				t.Error("a create for a template that is withheld now was placed")
			}
		})
	}
}
