package api

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/scheduler/internal/placement"
)

// TestNodesShareArtifacts plays AgentENV's nodes, which have no token: they beat, record, look up, forget
// and unregister, and are told of the others what is true then. Everything but the key's own text comes
// with blanks around it.
func TestNodesShareArtifacts(t *testing.T) {
	t.Parallel()
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, allTokens(), placement.Limits{})
			call := func(rpc string, request, response proto.Message) {
				t.Helper()
				if got := h.call(t, transport, scheduler+rpc, "", request, response); got.Code != "ok" {
					t.Fatalf("%s(%v) = %+v, want ok", rpc, request, got)
				}
			}
			beat := func(id, instance string) {
				t.Helper()
				h.must(t, scheduler+"Heartbeat", nodeToken, &schedulerv1.HeartbeatRequest{
					NodeId: id, ServiceInstanceId: instance, ClusterId: " c ", Endpoint: "http://10.0.0.1:8000",
					P2PEndpoint: &schedulerv1.P2PEndpoint{Backend: "b", Address: id + ":9"},
					Snapshot:    &schedulerv1.NodeSnapshot{Status: schedulerv1.NodeStatus_NODE_STATUS_READY},
				}, &schedulerv1.HeartbeatResponse{})
			}
			peer := func(id string) *schedulerv1.P2PPeer {
				return &schedulerv1.P2PPeer{NodeId: id, Endpoint: &schedulerv1.P2PEndpoint{Backend: "b", Address: id + ":9"}}
			}
			same := func(what string, got []*schedulerv1.P2PPeer, want ...*schedulerv1.P2PPeer) {
				t.Helper()
				sorted := protocmp.SortRepeated(func(a, b *schedulerv1.P2PPeer) bool { return a.GetNodeId() < b.GetNodeId() })
				if diff := cmp.Diff(&schedulerv1.LookupP2PArtifactResponse{Peers: want}, &schedulerv1.LookupP2PArtifactResponse{Peers: got}, protocmp.Transform(), sorted); diff != "" {
					t.Errorf("%s (-want +got):\n%s", what, diff)
				}
			}
			peers := func(r *schedulerv1.ListP2PPeersRequest) []*schedulerv1.P2PPeer {
				t.Helper()
				var answer schedulerv1.ListP2PPeersResponse
				call("ListP2pPeers", r, &answer)
				return answer.GetPeers()
			}
			holders := func(exclude string) []*schedulerv1.P2PPeer {
				t.Helper()
				var answer schedulerv1.LookupP2PArtifactResponse
				call("LookupP2pArtifact", &schedulerv1.LookupP2PArtifactRequest{ClusterId: "c", Backend: "b\t", Key: "\nsha256:1", ExcludeNodeId: exclude}, &answer)
				return answer.GetPeers()
			}

			for _, id := range []string{"n1", "n2", "n3"} {
				beat(id, "i1")
			}
			same("all peers", peers(&schedulerv1.ListP2PPeersRequest{}), peer("n1"), peer("n2"), peer("n3"))
			same("the others", peers(&schedulerv1.ListP2PPeersRequest{ClusterId: "c ", Backend: " b", ExcludeNodeId: " n2 "}), peer("n1"), peer("n3"))
			same("of another cluster", peers(&schedulerv1.ListP2PPeersRequest{ClusterId: "C"}))
			same("of another backend", peers(&schedulerv1.ListP2PPeersRequest{ClusterId: "c", Backend: "x"}))

			same("before anybody recorded it", holders(""))
			for _, id := range []string{"n1", "n2", "n1"} {
				call("RecordP2pArtifact", &schedulerv1.RecordP2PArtifactRequest{ClusterId: " c", Backend: "b ", Key: " sha256:1 ", NodeId: id}, &schedulerv1.RecordP2PArtifactResponse{})
			}
			same("holders", holders(""), peer("n1"), peer("n2"))
			same("other holders", holders("n1 "), peer("n2"))

			for range 2 {
				call("ForgetP2pArtifact", &schedulerv1.ForgetP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "sha256:1", NodeId: "n1"}, &schedulerv1.ForgetP2PArtifactResponse{})
			}
			same("after n1 forgot it", holders(""), peer("n2"))

			call("UnregisterNode", &schedulerv1.UnregisterNodeRequest{NodeId: "n2", ServiceInstanceId: "i1"}, &schedulerv1.UnregisterNodeResponse{})
			same("after n2 unregistered", holders(""))
			same("peers without n2", peers(&schedulerv1.ListP2PPeersRequest{}), peer("n1"), peer("n3"))
			beat("n2", "i2")
			same("peers with the new n2", peers(&schedulerv1.ListP2PPeersRequest{}), peer("n1"), peer("n2"), peer("n3"))
			same("what the former n2 held", holders(""))
		})
	}
}
