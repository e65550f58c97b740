package api

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"berth/pkg/waittest"
	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/scheduler/internal/placement"
)

// everything is a call of each method that needs the database, on a harness where n1 is ready.
func everything() map[string]proto.Message {
	at := &schedulerv1.Node{NodeId: "n1", Endpoint: listed}
	return map[string]proto.Message{
		"Schedule":         hinted(),
		"ListNodes":        &schedulerv1.ListNodesRequest{},
		"LookupNode":       &schedulerv1.LookupNodeRequest{SandboxId: "a"},
		"RecordAssignment": &schedulerv1.RecordAssignmentRequest{SandboxId: "b", Node: at},
		"Heartbeat":        &schedulerv1.HeartbeatRequest{NodeId: "n1", ServiceInstanceId: "i1", ClusterId: "c", SandboxIds: []string{"d"}},
		"ReportSandboxEvent": &schedulerv1.ReportSandboxEventRequest{NodeId: "n1", ServiceInstanceId: "i1", ClusterId: "c", Events: []*schedulerv1.SandboxEvent{
			{SandboxId: "e", EventType: schedulerv1.SandboxEventType_SANDBOX_EVENT_TYPE_CREATE},
		}},
		"ListObservedNodes": &schedulerv1.ListObservedNodesRequest{},
		"ListP2pPeers":      &schedulerv1.ListP2PPeersRequest{},
		"RecordP2pArtifact": &schedulerv1.RecordP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "k", NodeId: "n1"},
		"ForgetP2pArtifact": &schedulerv1.ForgetP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "k", NodeId: "n1"},
		"LookupP2pArtifact": &schedulerv1.LookupP2PArtifactRequest{ClusterId: "c", Backend: "b", Key: "k"},
		"GetNode":           &schedulerv1.GetNodeRequest{NodeId: "n1"},
		"UnregisterNode":    &schedulerv1.UnregisterNodeRequest{NodeId: "n1", ServiceInstanceId: "i1"},
	}
}

// TestNoMethodTellsWhatIsWrongInside takes the tables away from under every method.
func TestNoMethodTellsWhatIsWrongInside(t *testing.T) {
	t.Parallel()
	h := newHarness(t, allTokens(), placement.Limits{})
	h.ready(t, "n1", 9)
	for _, table := range []string{"nodes", "node_leases", "bindings", "reservations", "peer_endpoints", "p2p_artifacts", "sandbox_events"} {
		if _, err := h.db.Exec(t.Context(), "ALTER TABLE "+table+" RENAME TO secret_"+table); err != nil {
			t.Fatal(err)
		}
	}
	calls := everything()
	if methods := schedulerv1.File_scheduler_v1_scheduler_proto.Services().ByName("Scheduler").Methods().Len(); len(calls) != methods {
		t.Fatalf("%d calls for %d methods", len(calls), methods)
	}
	want := outcome{"internal", "internal error", "internal", false}
	for rpc, request := range calls {
		for _, transport := range transports {
			got := h.call(t, transport, scheduler+rpc, "", request, answerOf(t, scheduler+rpc))
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s over %s (-want +got):\n%s", rpc, transport, diff)
			}
		}
	}
	if !strings.Contains(h.log.String(), "42P01") {
		t.Error("the log does not have the cause")
	}
}

// writes are the methods that change something in everything.
var writes = []string{"Schedule", "RecordAssignment", "Heartbeat", "ReportSandboxEvent", "RecordP2pArtifact", "UnregisterNode"}

// TestACallWhoseCallerIsGoneCommitsNothing lets every writing call wait for a lock until its caller has
// left or its deadline has passed, and then looks for what it would have written.
func TestACallWhoseCallerIsGoneCommitsNothing(t *testing.T) {
	t.Parallel()
	h := newHarness(t, allTokens(), placement.Limits{})
	h.ready(t, "n1", 9)
	const stateSQL = `
SELECT  (SELECT count(*) FROM bindings) || ' bindings, ' || (SELECT count(*) FROM reservations) || ' holds, ' ||
        (SELECT count(*) FROM placements) || ' placements, ' || (SELECT count(*) FROM sandbox_events) || ' events, ' ||
        (SELECT count(*) FROM p2p_artifacts) || ' artifacts, ' || (SELECT count(*) FROM node_leases WHERE ended_at IS NULL) || ' leases'`
	state := func() (text string) {
		t.Helper()
		if err := h.db.QueryRow(t.Context(), stateSQL).Scan(&text); err != nil {
			t.Fatal(err)
		}
		return text
	}
	calls := everything()
	before := state()
	for _, leave := range []string{"left", "deadline"} {
		for _, rpc := range writes {
			t.Run(fmt.Sprintf("%s, %s", rpc, leave), func(t *testing.T) {
				h.blocked(t, func() {
					ctx, cancel := context.WithCancel(t.Context())
					if leave == "deadline" {
						ctx, cancel = context.WithTimeout(t.Context(), 500*time.Millisecond)
					}
					defer cancel()
					ended := make(chan error, 1)
					go func() {
						ended <- h.conn.Invoke(ctx, "/"+scheduler+rpc, calls[rpc], answerOf(t, scheduler+rpc))
					}()
					if leave == "left" {
						h.awaitWaiter(t)
						cancel()
					}
					if err := waittest.Receive(t, "the end of a call", ended); err == nil {
						t.Errorf("%s = OK, want it to wait for the lock until its end", rpc)
					}
					// Whoever still works for it would get the lock later: nobody may be left.
					h.awaitNobody(t)
				})
			})
		}
	}
	if after := state(); after != before {
		t.Errorf("%s, want %s", after, before)
	}
}

// blocked runs f while no row of any table can be written or locked.
func (h *harness) blocked(t *testing.T, f func()) {
	t.Helper()
	tx, err := h.db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := tx.Exec(t.Context(), `LOCK TABLE bindings, reservations, placements, node_leases, p2p_artifacts, p2p_holders, sandbox_events IN EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	f()
}

const waitersSQL = `
SELECT  count(*) FROM pg_stat_activity
WHERE   datname = current_database() AND pid <> pg_backend_pid() AND wait_event_type = 'Lock'`

// awaitWaiter waits until somebody waits for a lock in this database.
func (h *harness) awaitWaiter(t *testing.T) {
	t.Helper()
	h.awaitWaiters(t, func(n int) bool { return n > 0 })
}

// awaitNobody waits until nobody does.
func (h *harness) awaitNobody(t *testing.T) {
	t.Helper()
	h.awaitWaiters(t, func(n int) bool { return n == 0 })
}

func (h *harness) awaitWaiters(t *testing.T, enough func(int) bool) {
	t.Helper()
	end := time.NewTimer(eventLimit)
	defer end.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		var n int
		if err := h.db.QueryRow(t.Context(), waitersSQL).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if enough(n) {
			return
		}
		select {
		case <-tick.C:
		case <-end.C:
			t.Fatalf("%v passed with %d waiting for locks", eventLimit, n)
		}
	}
}
