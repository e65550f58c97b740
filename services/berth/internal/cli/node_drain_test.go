package cli_test

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	adminv1 "berth/rpc/admin/v1"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
)

// scheduler answers what operators ask about nodes; a method without an answer here would panic.
type scheduler struct {
	adminv1.Nodes
	open   error // of StartDrain
	drains []*adminv1.Drain

	mu    sync.Mutex
	asked []string
}

func (s *scheduler) note(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, text)
}

// next returns the drains one after another, the last of them again and again.
func (s *scheduler) next() *adminv1.Drain {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.drains[0]
	if len(s.drains) > 1 {
		s.drains = s.drains[1:]
	}
	return d
}

func (s *scheduler) StartDrain(_ context.Context, r *adminv1.StartDrainRequest) (*adminv1.StartDrainResponse, error) {
	if r.GetRequestedBy() == "" {
		return nil, &rpcerr.Invalid{Text: "nobody asks"}
	}
	r.RequestedBy = ""
	s.note(strings.ReplaceAll(r.String(), "  ", " "))
	if s.open != nil {
		return nil, s.open
	}
	return &adminv1.StartDrainResponse{Drain: s.next()}, nil
}

func (s *scheduler) GetDrain(_ context.Context, r *adminv1.GetDrainRequest) (*adminv1.GetDrainResponse, error) {
	s.note("get " + r.GetNodeId())
	if len(s.drains) == 0 {
		return nil, rpcerr.Twirp(node.ErrNoDrain)
	}
	return &adminv1.GetDrainResponse{Drain: s.next()}, nil
}

func (s *scheduler) CancelDrain(context.Context, *adminv1.CancelDrainRequest) (*adminv1.CancelDrainResponse, error) {
	if s.open != nil {
		return nil, s.open
	}
	return &adminv1.CancelDrainResponse{Drain: s.next()}, nil
}

func (s *scheduler) ListDrains(_ context.Context, r *adminv1.ListDrainsRequest) (*adminv1.ListDrainsResponse, error) {
	return &adminv1.ListDrainsResponse{Drains: s.drains}, nil
}

func (s *scheduler) CordonNode(_ context.Context, r *adminv1.CordonNodeRequest) (*adminv1.CordonNodeResponse, error) {
	return &adminv1.CordonNodeResponse{Node: &adminv1.Node{NodeId: r.GetNodeId(), CordonReason: r.GetReason(), BoundSandboxes: 1}}, nil
}

func (s *scheduler) UncordonNode(context.Context, *adminv1.UncordonNodeRequest) (*adminv1.UncordonNodeResponse, error) {
	return &adminv1.UncordonNodeResponse{Node: &adminv1.Node{Status: "ready"}}, s.open
}

func (s *scheduler) ListNodes(context.Context, *adminv1.ListNodesRequest) (*adminv1.ListNodesResponse, error) {
	return &adminv1.ListNodesResponse{Nodes: []*adminv1.Node{{NodeId: "n1", Cordoned: true}, {NodeId: "n2", Cordoned: true, DrainId: 7}}}, nil
}

func (s *scheduler) ListOrphans(context.Context, *adminv1.ListOrphansRequest) (*adminv1.ListOrphansResponse, error) {
	return &adminv1.ListOrphansResponse{Orphans: []*adminv1.Orphan{{NodeId: "n1", SandboxId: "s1", Reason: "held_elsewhere", HolderNodeId: "n2"}}}, nil
}

func (s *scheduler) ListEvents(_ context.Context, r *adminv1.ListEventsRequest) (*adminv1.ListEventsResponse, error) {
	return &adminv1.ListEventsResponse{Events: []*adminv1.Event{{Kind: "node_drain", Effect: "done", NodeId: r.GetNodeId(), DetailJson: `{"drain":7}`}}}, nil
}

func (s *scheduler) serve(t *testing.T) []string {
	t.Helper()
	server := httptest.NewServer(adminv1.NewNodesServer(s))
	t.Cleanup(server.Close)
	return []string{"--scheduler-url", server.URL, "--scheduler-token", "t"}
}

// drainOf returns drain 7 of n1 in a state, of which so many are left.
func drainOf(state string, left, holds uint32) *adminv1.Drain {
	d := &adminv1.Drain{
		DrainId: 7, NodeId: "n1", State: state, Mode: "wait", Total: 4, Left: left, HoldsLeft: holds, TookMs: 90_000, Reason: "kernel",
		RequestedBy: "ann@ops",
	}
	if state != "closing" && state != "draining" {
		d.EndedUnixMs = 1
	}
	if left > 0 && state != "canceled" {
		d.Blockers = []*adminv1.Blocker{{SandboxId: "s1", Reason: "observed", TenantId: "t1"}, {Reason: "hold"}}
		d.MoreBlockers = 2
	}
	return d
}

func TestAWatchedDrainIsALineForEachChangeAndEndsWithItsOwnCode(t *testing.T) {
	t.Parallel()
	parked := drainOf("done", 0, 0)
	parked.Mode = "park"
	tests := map[string]struct {
		last   *adminv1.Drain
		code   int
		stdout string
		stderr string
	}{
		"done by parking": {parked, 0, "n1 has no routes left after 1m30s and stays cordoned. Take it down, or open it: berth node uncordon n1\n", ""},
		"done":            {drainOf("done", 0, 0), 0, "n1 is empty after 1m30s and stays cordoned. Take it down, or open it: berth node uncordon n1\n", ""},
		"expired": {
			drainOf("expired", 2, 0), 3, "s1           t1               runs there; its node alone decides about it, so it cannot be moved\n" +
				"-                             promised room; may still come\n… and 2 more\n",
			"berth: the deadline of drain 7 passed with 2 of 4 left; n1 stays cordoned.",
		},
		"canceled": {drainOf("canceled", 2, 0), 4, "", "berth: drain 7 of n1 was canceled with 2 of 4 left; the node takes creates again."},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &scheduler{drains: []*adminv1.Drain{
				drainOf("closing", 3, 1), drainOf("draining", 3, 0), drainOf("draining", 3, 0), drainOf("draining", 2, 0), tt.last,
			}}
			args := append([]string{"node", "drain", "n1", "--deadline", "30m", "--reason", "kernel", "--watch", "--every", "10ms"}, s.serve(t)...)
			code, stdout, stderr := run(args...)
			if code != tt.code || !strings.HasPrefix(stderr, tt.stderr) || (stderr == "") != (tt.stderr == "") || !strings.HasSuffix(stdout, tt.stdout) {
				t.Errorf("berth node drain = %d, want %d\nstdout:\n%s\nstderr:\n%s", code, tt.code, stdout, stderr)
			}
			var changes []string
			for line := range strings.Lines(stdout) {
				if _, change, ok := strings.Cut(line, "  drain 7 of n1: "); ok {
					changes = append(changes, strings.TrimSpace(change))
				}
			}
			want := []string{
				"closing, 4 of 4 left, 1 of them promised", "draining, 3 of 4 left", "draining, 2 of 4 left",
				tt.last.GetState() + ", " + map[bool]string{true: "0", false: "2"}[tt.code == 0] + " of 4 left",
			}
			if diff := cmp.Diff(want, changes); diff != "" {
				t.Errorf("lines (-want +got):\n%s", diff)
			}
			if want := `node_id:"n1" mode:"wait" deadline_ms:1800000 reason:"kernel"`; s.asked[0] != want {
				t.Errorf("asked for %s, want %s", s.asked[0], want)
			}
		})
	}
}

func TestAWatchedDrainInJSONIsAnObjectForEachChange(t *testing.T) {
	t.Parallel()
	s := &scheduler{drains: []*adminv1.Drain{drainOf("closing", 3, 1), drainOf("draining", 3, 0), drainOf("draining", 3, 0), drainOf("expired", 3, 0)}}
	code, stdout, _ := run(append([]string{"node", "drain", "n1", "--watch", "--every", "10ms", "-o", "json"}, s.serve(t)...)...)
	var states []string
	for line := range strings.Lines(stdout) {
		var d struct {
			State    string
			Blockers []struct{ Reason string }
		}
		if err := json.Unmarshal([]byte(line), &d); err != nil || len(d.Blockers) != 2 {
			t.Errorf("line %q: %v, want a drain with its blockers", line, err)
		}
		states = append(states, d.State)
	}
	if diff := cmp.Diff([]string{"closing", "draining", "expired"}, states); diff != "" || code != 3 {
		t.Errorf("code %d, states (-want +got):\n%s", code, diff)
	}
}

func TestADrainIsOrderedShownAndCanceled(t *testing.T) {
	t.Parallel()
	openDrain := &node.DrainOpen{ID: 7}
	tests := map[string]struct {
		given  *scheduler
		args   string
		code   int
		stdout string // a part of it
		stderr string
	}{
		"ordered": {
			&scheduler{drains: []*adminv1.Drain{drainOf("closing", 2, 1)}}, "node drain n1", 0,
			"Left     3 of 4, 1 of them promised\n", "watch it: berth node drain n1 --watch",
		},
		"ordered, as JSON":             {&scheduler{drains: []*adminv1.Drain{drainOf("closing", 2, 1)}}, "node drain n1 -o json", 0, `"holds_left": 1`, ""},
		"ordered twice":                {&scheduler{open: rpcerr.Twirp(openDrain)}, "node drain n1", 1, "", "berth: drain n1: drain 7 of it is open already; watch it with"},
		"watched, but ordered anew":    {&scheduler{open: rpcerr.Twirp(openDrain)}, "node drain n1 --watch --mode move", 1, "", "drain 7 of it is open already"},
		"watched again":                {&scheduler{open: rpcerr.Twirp(openDrain), drains: []*adminv1.Drain{drainOf("done", 0, 0)}}, "node drain n1 --watch", 0, "n1 is empty", ""},
		"canceled":                     {&scheduler{drains: []*adminv1.Drain{drainOf("canceled", 1, 0)}}, "node drain n1 --cancel", 0, "Drain 7 of n1 is canceled, with 1 of 4 left; the node takes creates again.", ""},
		"canceled when it has ended":   {&scheduler{open: rpcerr.Twirp(node.ErrDrainEnded)}, "node drain n1 --cancel", 1, "", `berth: cancel: the drain of n1 has ended; "berth node uncordon n1" opens the node`},
		"canceled where there is none": {&scheduler{open: rpcerr.Twirp(node.ErrNoDrain)}, "node drain n1 --cancel", 1, "", "berth: cancel: n1 has no drain"},
		"of a node nobody knows":       {&scheduler{open: rpcerr.Twirp(node.ErrUnknown)}, "node drain n1", 1, "", `berth: drain n1: node not found; "berth node list" shows those there are`},
		"all, listed":                  {&scheduler{drains: []*adminv1.Drain{drainOf("draining", 1, 0)}}, "node drains", 0, "7       n1     draining   wait   1 of 4             1m30s   ann@ops   kernel\n", ""},
		"all, as JSON":                 {&scheduler{drains: []*adminv1.Drain{drainOf("draining", 1, 0)}}, "node drains -o json", 0, `"drains": [`, ""},
		"a node's":                     {&scheduler{drains: []*adminv1.Drain{drainOf("draining", 1, 0)}}, "node drains n1", 0, "promised room; may still come", ""},
		"a node's, without one":        {&scheduler{}, "node drains n1", 1, "", `berth: list drains: n1 has no drain; "berth node drains" shows those there are`},
		"a deadline too far away":      {&scheduler{}, "node drain n1 --deadline 8761h", 2, "", "--deadline 8761h0m0s: at most 8760h0m0s, a year, is wanted"},
		"cordoned":                     {&scheduler{}, "node cordon n1 --reason disk", 0, "n1 is cordoned: no create goes there, and its 1 sandbox stays.", ""},
		"cordoned, as JSON":            {&scheduler{}, "node cordon n1 --reason disk -o json", 0, `"cordon_reason": "disk"`, ""},
		"opened":                       {&scheduler{}, "node uncordon n1", 0, "n1 takes creates again; it is ready.", ""},
		"opened while it is drained":   {&scheduler{open: rpcerr.Twirp(node.ErrDraining)}, "node uncordon n1", 1, "", `a drain of it is open; end it with "berth node drain n1 --cancel"`},
		"orphans":                      {&scheduler{}, "node orphans", 0, "n1     s1        held_elsewhere   n2", ""},
		"events":                       {&scheduler{}, "events --node n1", 0, `node_drain   done     n1               {"drain":7}`, ""},
		"events, as JSON":              {&scheduler{}, "events --node n1 -o json", 0, `"effect": "done"`, ""},
		"parking without a deadline":   {&scheduler{}, "node drain n1 --mode park", 2, "", "--mode park acts at the deadline; give one with --deadline"},
		"an unknown mode":              {&scheduler{}, "node drain n1 --mode kill", 2, "", `--mode "kill": wait, move or park is wanted`},
		"a deadline of no time":        {&scheduler{}, "node drain n1 --deadline 0s", 2, "", "--deadline 0s: a time above 0 is wanted"},
		"canceling with an order":      {&scheduler{}, "node drain n1 --cancel --watch", 2, "", "--cancel goes with no other order"},
		"a node that cannot be":        {&scheduler{}, "node drain n..1", 1, "", `berth: node "n..1": node_id is not valid`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, stdout, stderr := run(append(strings.Fields(tt.args), tt.given.serve(t)...)...)
			if code != tt.code || !strings.Contains(stdout, tt.stdout) || !strings.Contains(stderr, tt.stderr) {
				t.Errorf("berth %s = %d, want %d\nstdout:\n%s\nstderr:\n%s", tt.args, code, tt.code, stdout, stderr)
			}
		})
	}
}

func TestTheListTellsCordonedNodesFromDrainedOnesWhereASchedulerIsAsked(t *testing.T) {
	t.Parallel()
	_, flags := serve(t, map[string]string{"GET /nodes": `200 [{"id":"n1","status":"draining"},{"id":"n2","status":"draining"},{"id":"n3","status":"ready"}]`})
	statuses := func(more ...string) (got []string, stderr string) {
		t.Helper()
		code, stdout, stderr := run(append(append([]string{"node", "list"}, flags...), more...)...)
		if code != 0 {
			t.Errorf("node list %q = %d", more, code)
		}
		for line := range strings.Lines(stdout) {
			got = append(got, strings.Join(strings.Fields(line)[:2], " "))
		}
		return got[1:], stderr
	}
	s := &scheduler{}
	for name, tt := range map[string]struct {
		more []string
		want []string
		warn bool
	}{
		"with a token":              {s.serve(t), []string{"n1 cordoned", "n2 draining", "n3 ready"}, false},
		"without one":               {nil, []string{"n1 draining", "n2 draining", "n3 ready"}, false},
		"where nobody answers that": {[]string{"--scheduler-url", refusing(t), "--scheduler-token", "t"}, []string{"n1 draining", "n2 draining", "n3 ready"}, true},
	} {
		got, stderr := statuses(tt.more...)
		if diff := cmp.Diff(tt.want, got); diff != "" || (stderr != "") != tt.warn {
			t.Errorf("%s: stderr %q, nodes (-want +got):\n%s", name, stderr, diff)
		}
	}
}
