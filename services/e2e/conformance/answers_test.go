package conformance

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/migrations"
	"berth/pkg/pgtest"
)

// answer is what AgentENV's clients make of an answer.
type answer struct {
	code    codes.Code
	text    string
	gateway int // what AgentENV's gateway passes on
}

var (
	good      = answer{codes.OK, "", http.StatusOK}
	unlisted  = answer{codes.InvalidArgument, "node is not in scheduler node list", http.StatusBadRequest}
	unknown   = answer{codes.NotFound, "sandbox assignment not found", http.StatusNotFound}
	nobody    = answer{codes.Unavailable, "no nodes available", http.StatusServiceUnavailable}
	elsewhere = fields{"node_id": "n1", "endpoint": "http://10.9.9.9:8000"}
)

func bad(text string) answer {
	return answer{codes.InvalidArgument, text, http.StatusBadRequest}
}

// TestEveryReplicaAnswersEveryCallAlikeOnEveryTransport walks what AgentENV's clients can be told, with
// nothing but their own fields, on both replicas and all four ways.
func TestEveryReplicaAnswersEveryCallAlikeOnEveryTransport(t *testing.T) {
	t.Parallel()
	s := newStack(t, pgtest.New(t, migrations.FS), "n1", "n2")
	beat := func(id, instance string, roster ...string) fields {
		return fields{
			"node_id": id, "service_instance_id": instance, "cluster_id": "c", "sandbox_ids": roster,
			"snapshot": fields{"status": "NODE_STATUS_READY", "cpu_count": 8},
		}
	}
	for _, w := range s.everybody() { // n1 lives; n2 is listed and silent
		if _, err := ask(t.Context(), w, "Heartbeat", beat("n1", "i1")); err != nil {
			t.Fatalf("Heartbeat = %v", err)
		}
	}
	here := fields{"node_id": "n1", "endpoint": endpoint("n1")}
	long := strings.Repeat("x", 300)
	tests := []struct {
		name, rpc string
		set       fields
		want      answer
	}{
		{"a pick", "Schedule", nil, good},
		{"a cold create", "Schedule", fields{"hint": cold}, good},
		{"a create from a template", "Schedule", fields{"hint": sandbox}, good},
		{"a list", "ListNodes", nil, good},
		{"a lookup of nothing", "LookupNode", nil, bad("sandbox_id is required")},
		{"a lookup of blanks", "LookupNode", fields{"sandbox_id": " \t"}, bad("sandbox_id is required")},
		{"a lookup of an unknown sandbox", "LookupNode", fields{"sandbox_id": "unknown"}, unknown},
		{"a lookup of what no sandbox is called", "LookupNode", fields{"sandbox_id": "No Such_One"}, unknown},
		{"a lookup of a long text", "LookupNode", fields{"sandbox_id": long}, unknown},
		{"a record", "RecordAssignment", fields{"sandbox_id": "box", "node": here}, good},
		{"a record of nothing", "RecordAssignment", fields{"node": here}, bad("sandbox_id is required")},
		{"a record nowhere", "RecordAssignment", fields{"sandbox_id": "box"}, bad("node_id and endpoint are required")},
		{"a record without an endpoint", "RecordAssignment", fields{"sandbox_id": "box", "node": fields{"node_id": "n1"}}, bad("node_id and endpoint are required")},
		{"a record elsewhere", "RecordAssignment", fields{"sandbox_id": "box", "node": elsewhere}, unlisted},
		{"a record of a bad id", "RecordAssignment", fields{"sandbox_id": "A b", "node": here}, bad("sandbox_id is not valid")},
		{"a lookup of what was recorded", "LookupNode", fields{"sandbox_id": "box"}, good},
		{"a heartbeat", "Heartbeat", beat("n1", "i1"), good},
		{"a heartbeat of nobody", "Heartbeat", nil, bad("node_id and service_instance_id are required")},
		{"a heartbeat of an unknown node", "Heartbeat", beat("n9", "i1"), unlisted},
		{"a malformed sandbox in a roster", "Heartbeat", beat("n1", "i1", "box", "", "No Such"), good},
		{"an unknown node's events", "ReportSandboxEvent", fields{"node_id": "n9", "service_instance_id": "i"}, good},
		{"observed nodes", "ListObservedNodes", fields{"cluster_id": " c "}, good},
		{"observed nodes of no cluster", "ListObservedNodes", fields{"cluster_id": long}, good},
		{"one node", "GetNode", fields{"node_id": "n1"}, good},
		{"no node", "GetNode", nil, bad("node_id is required")},
		{"a silent node", "GetNode", fields{"node_id": "n2"}, answer{codes.NotFound, "observed node not found", http.StatusNotFound}},
		{"a node of another cluster", "GetNode", fields{"node_id": "n1", "cluster_id": "d"}, answer{codes.NotFound, "observed node not found", http.StatusNotFound}},
		{"peers", "ListP2pPeers", nil, good},
		{"an artifact's holder", "RecordP2pArtifact", fields{"cluster_id": "c", "backend": "b", "key": "k", "node_id": "n1"}, good},
		{"an artifact's holder that is unknown", "RecordP2pArtifact", fields{"cluster_id": "c", "backend": "b", "key": "k", "node_id": "n9"}, unlisted},
		{"an artifact without a key", "RecordP2pArtifact", fields{"cluster_id": "c", "backend": "b", "node_id": "n1"}, bad("cluster_id, backend, key, and node_id are required")},
		{"an artifact to forget without a node", "ForgetP2pArtifact", fields{"cluster_id": "c", "backend": "b", "key": "k"}, bad("cluster_id, backend, key, and node_id are required")},
		{"an artifact to forget", "ForgetP2pArtifact", fields{"cluster_id": "c", "backend": "b", "key": "k", "node_id": "n9"}, good},
		{"an artifact to look up without a backend", "LookupP2pArtifact", fields{"cluster_id": "c", "key": "k"}, bad("cluster_id, backend, and key are required")},
		{"an unknown artifact", "LookupP2pArtifact", fields{"cluster_id": "c", "backend": "b", "key": "none"}, good},
		{"an end without an instance", "UnregisterNode", fields{"node_id": "n1"}, bad("node_id and service_instance_id are required")},
		{"an end by another instance", "UnregisterNode", fields{"node_id": "n1", "service_instance_id": "i2"}, answer{codes.FailedPrecondition, "service instance mismatch", http.StatusBadGateway}},
		{"an end of a silent node", "UnregisterNode", fields{"node_id": "n2", "service_instance_id": "i"}, good},
	}
	for name, w := range s.everybody() {
		for _, tt := range tests {
			_, err := ask(t.Context(), w, tt.rpc, tt.set)
			code, text := refused(err)
			if got := (answer{code, text, httpStatus(err)}); got != tt.want {
				t.Errorf("%s: %s: %s = %+v, want %+v", name, tt.name, tt.rpc, got, tt.want)
			}
		}
	}
}

// TestNobodyIsReadyIsSaidAsAgentENVSaysIt has nodes and none that may take a create.
func TestNobodyIsReadyIsSaidAsAgentENVSaysIt(t *testing.T) {
	t.Parallel()
	s := newStack(t, pgtest.New(t, migrations.FS), "n1")
	for name, w := range s.everybody() {
		for _, hint := range []fields{nil, {"hint": cold}, {"hint": sandbox}} {
			_, err := ask(t.Context(), w, "Schedule", hint)
			code, text := refused(err)
			if got := (answer{code, text, httpStatus(err)}); got != nobody {
				t.Errorf("%s: Schedule(%v) = %+v, want %+v", name, hint, got, nobody)
			}
		}
	}
}

// TestMessagesOverFourMiBAreRefusedWithAType sends too much on every transport; the connection goes on.
func TestMessagesOverFourMiBAreRefusedWithAType(t *testing.T) {
	t.Parallel()
	s := newStack(t, pgtest.New(t, migrations.FS), "n1")
	roster := make([]any, 130_000)
	for i := range roster {
		roster[i] = fmt.Sprintf("%036d", i) // 38 bytes each on the wire
	}
	for name, w := range s.everybody() {
		_, err := ask(t.Context(), w, "Heartbeat", fields{"node_id": "n1", "service_instance_id": "i", "sandbox_ids": roster})
		if code, text := refused(err); code != codes.ResourceExhausted && code != codes.InvalidArgument || strings.Contains(text, "SELECT") {
			t.Errorf("%s: a heartbeat of 4.9 MB = %v, want a typed refusal", name, err)
		}
		if _, err := ask(t.Context(), w, "ListNodes", nil); err != nil {
			t.Errorf("%s: the call after it = %v", name, err)
		}
	}
}
