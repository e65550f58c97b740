package adminapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/twitchtv/twirp"

	"berth/migrations"
	"berth/pkg/pgtest"
	adminv1 "berth/rpc/admin/v1"
	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/rpcerr"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/nodes"
	"berth/services/scheduler/internal/placement"
)

// serveNodes returns a client of the service over a database, as the wire has it, and that database.
func serveNodes(t *testing.T) (adminv1.Nodes, *pgtest.Database) {
	t.Helper()
	owner := pgtest.New(t, migrations.FS)
	db := owner.As(t, "berth_scheduler")
	guard, err := route.NewGuard(route.GuardConfig{CIDRs: route.DefaultCIDRs, Schemes: route.DefaultSchemes})
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	routes := bindings.New(db, bindings.DefaultConfig(), log, prometheus.NewRegistry())
	known := nodes.New(db, routes, nodes.DefaultConfig(), guard, log, prometheus.NewRegistry())
	placer := placement.New(db, placement.DefaultConfig(), log, nil)
	_, handler := NewNodes(known, routes, placer).Twirp(rpcerr.TwirpInterceptor(log))
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return adminv1.NewNodesJSONClient(server.URL, server.Client()), owner
}

func TestAnOperatorsDayWithANode(t *testing.T) {
	t.Parallel()
	client, db := serveNodes(t)
	ctx := t.Context()
	registered, err := client.RegisterNode(ctx, &adminv1.RegisterNodeRequest{
		NodeId: "n1", Endpoint: "http://10.0.0.7:8000", Labels: map[string]string{"zone": "z1"},
	})
	if n := registered.GetNode(); err != nil || n.GetStatus() != "connecting" || n.GetLabels()["zone"] != "z1" || n.GetSource() != "registered" || !n.GetPresent() {
		t.Fatalf("RegisterNode = %v, %v", n, err)
	}
	for _, sql := range []string{
		`INSERT INTO bindings (sandbox_id, state, node_id, origin, tenant_id) VALUES ('s1', 'bound', 'n1', 'recorded', 't1')`,
		`INSERT INTO reservations (reservation_id, n, node_id, cpu_millis, memory_bytes, named, expires_at) VALUES (gen_random_uuid(), 1, 'n1', 500, 64, true, now() + interval '1 h')`,
	} {
		if _, err := db.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	closed, err := client.CordonNode(ctx, &adminv1.CordonNodeRequest{NodeId: "n1", Reason: "disk"})
	if n := closed.GetNode(); err != nil || !n.GetCordoned() || n.GetCordonReason() != "disk" || n.GetBoundSandboxes() != 1 || n.GetHeldSandboxes() != 1 || n.GetHeldCpuMillis() != 500 {
		t.Errorf("CordonNode = %v, %v", n, err)
	}
	if opened, err := client.UncordonNode(ctx, &adminv1.UncordonNodeRequest{NodeId: "n1"}); err != nil || opened.GetNode().GetCordoned() {
		t.Errorf("UncordonNode = %v, %v", opened, err)
	}

	started, err := client.StartDrain(ctx, &adminv1.StartDrainRequest{NodeId: "n1", Mode: "move", DeadlineMs: 60_000, Reason: "kernel", RequestedBy: "ann"})
	d := started.GetDrain()
	if err != nil || d.GetState() != "closing" || d.GetTotal() != 2 || d.GetLeft() != 1 || d.GetHoldsLeft() != 1 || d.GetDeadlineLeftMs() <= 0 || d.GetMoreBlockers() != 0 {
		t.Fatalf("StartDrain = %v, %v", d, err)
	}
	var blockers []string
	for _, b := range d.GetBlockers() {
		blockers = append(blockers, fmt.Sprintf("%q %s %q %t", b.GetSandboxId(), b.GetReason(), b.GetTenantId(), b.GetSinceUnixMs() > 0))
	}
	if diff := cmp.Diff([]string{`"" hold "" true`, `"s1" observed "t1" true`}, blockers); diff != "" {
		t.Errorf("blockers (-want +got):\n%s", diff)
	}
	_, err = client.StartDrain(ctx, &adminv1.StartDrainRequest{NodeId: "n1"})
	if refused, ok := errors.AsType[twirp.Error](err); !ok || refused.Code() != twirp.AlreadyExists || refused.Meta("drain_id") != fmt.Sprint(d.GetDrainId()) {
		t.Errorf("a second StartDrain = %v, want already_exists with the open drain's id", err)
	}
	if _, err := client.UncordonNode(ctx, &adminv1.UncordonNodeRequest{NodeId: "n1"}); !errors.Is(rpcerr.Decode(err), node.ErrDraining) {
		t.Errorf("UncordonNode during a drain = %v", err)
	}
	got, err := client.GetDrain(ctx, &adminv1.GetDrainRequest{NodeId: "n1"})
	if err != nil || got.GetDrain().GetDrainId() != d.GetDrainId() || len(got.GetDrain().GetBlockers()) != 2 {
		t.Errorf("GetDrain = %v, %v", got, err)
	}
	for range 2 { // it may repeat
		canceled, err := client.CancelDrain(ctx, &adminv1.CancelDrainRequest{DrainId: d.GetDrainId()})
		if c := canceled.GetDrain(); err != nil || c.GetState() != "canceled" || c.GetLeft() != 2 || c.GetEndedUnixMs() == 0 {
			t.Errorf("CancelDrain = %v, %v", c, err)
		}
	}
	if drains, err := client.ListDrains(ctx, &adminv1.ListDrainsRequest{Open: true}); err != nil || len(drains.GetDrains()) != 0 {
		t.Errorf("ListDrains of open ones = %v, %v, want none", drains, err)
	}
	if _, err := client.RemoveNode(ctx, &adminv1.RemoveNodeRequest{NodeId: "n1"}); err != nil {
		t.Errorf("RemoveNode = %v", err)
	}
	list := func(all bool) (ids []string) {
		t.Helper()
		listed, err := client.ListNodes(ctx, &adminv1.ListNodesRequest{All: all})
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range listed.GetNodes() {
			ids = append(ids, n.GetNodeId()+" "+n.GetStatus())
		}
		return ids
	}
	if present, all := list(false), list(true); len(present) != 0 || cmp.Diff([]string{"n1 absent"}, all) != "" {
		t.Errorf("nodes after the removal = %v, all of them %v", present, all)
	}

	// The log tells all of it, by pages, the newest first.
	var kinds []string
	for ask := (&adminv1.ListEventsRequest{NodeId: "n1", Limit: 2}); ; {
		page, err := client.ListEvents(ctx, ask)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range page.GetEvents() {
			kinds = append(kinds, strings.TrimSpace(e.GetKind()+" "+e.GetEffect()))
		}
		if ask.Before = page.GetNext(); ask.Before == "" {
			break
		}
	}
	want := []string{"node_removed", "node_drain canceled", "node_drain closing", "node_uncordoned", "node_cordoned", "node_registered"}
	if diff := cmp.Diff(want, kinds); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func TestOrphansAreListedByPages(t *testing.T) {
	t.Parallel()
	client, db := serveNodes(t)
	for _, sql := range []string{
		`INSERT INTO nodes (node_id, endpoint, source) VALUES ('n1', 'http://10.0.0.1:1', 'registered'), ('n2', 'http://10.0.0.2:1', 'registered')`,
		`INSERT INTO orphans (node_id, sandbox_id, reason, holder_node_id) VALUES ('n1', 's1', 'held_elsewhere', 'n2'), ('n1', 's2', 'deleted', NULL), ('n2', 's0', 'deleted', NULL)`,
	} {
		if _, err := db.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	var found []string
	ask := &adminv1.ListOrphansRequest{Limit: 2}
	for {
		page, err := client.ListOrphans(t.Context(), ask)
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range page.GetOrphans() {
			found = append(found, fmt.Sprintf("%s %s %s %q %t", o.GetNodeId(), o.GetSandboxId(), o.GetReason(), o.GetHolderNodeId(), o.GetLastSeenUnixMs() > 0))
			ask.AfterNodeId, ask.AfterSandboxId = o.GetNodeId(), o.GetSandboxId()
		}
		if len(page.GetOrphans()) < 2 {
			break
		}
	}
	want := []string{`n1 s1 held_elsewhere "n2" true`, `n1 s2 deleted "" true`, `n2 s0 deleted "" true`}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Errorf("orphans (-want +got):\n%s", diff)
	}
}

func TestWhatAnOperatorMayNotOrder(t *testing.T) {
	t.Parallel()
	s := NewNodes(nil, nil, nil) // it is refused before anything is asked
	long := strings.Repeat("x", 1025)
	for name, tt := range map[string]struct {
		call func(ctx context.Context) error
		want string
	}{
		"no node to look at": {func(ctx context.Context) error { _, err := s.GetNode(ctx, &adminv1.GetNodeRequest{}); return err }, "node_id is required"},
		"a node that cannot be": {func(ctx context.Context) error {
			_, err := s.CordonNode(ctx, &adminv1.CordonNodeRequest{NodeId: "a..b"})
			return err
		}, "node_id is not valid"},
		"no node to open": {func(ctx context.Context) error {
			_, err := s.UncordonNode(ctx, &adminv1.UncordonNodeRequest{NodeId: " "})
			return err
		}, "node_id is required"},
		"no node to remove": {func(ctx context.Context) error { _, err := s.RemoveNode(ctx, &adminv1.RemoveNodeRequest{}); return err }, "node_id is required"},
		"no node to register": {func(ctx context.Context) error {
			_, err := s.RegisterNode(ctx, &adminv1.RegisterNodeRequest{})
			return err
		}, "node_id is required"},
		"no endpoint": {func(ctx context.Context) error {
			_, err := s.RegisterNode(ctx, &adminv1.RegisterNodeRequest{NodeId: "a"})
			return err
		}, "node_id and endpoint are required"},
		"a long reason to close": {func(ctx context.Context) error {
			_, err := s.CordonNode(ctx, &adminv1.CordonNodeRequest{NodeId: "a", Reason: long})
			return err
		}, "reason must be at most 1024 bytes"},
		"a reason with a line feed": {func(ctx context.Context) error {
			_, err := s.CordonNode(ctx, &adminv1.CordonNodeRequest{NodeId: "a", Reason: "a\nb"})
			return err
		}, "control character"},
		"no node to drain": {func(ctx context.Context) error { _, err := s.StartDrain(ctx, &adminv1.StartDrainRequest{}); return err }, "node_id is required"},
		"an unknown mode": {func(ctx context.Context) error {
			_, err := s.StartDrain(ctx, &adminv1.StartDrainRequest{NodeId: "a", Mode: "kill"})
			return err
		}, "mode must be wait, move or park"},
		"parking without a deadline": {func(ctx context.Context) error {
			_, err := s.StartDrain(ctx, &adminv1.StartDrainRequest{NodeId: "a", Mode: "park"})
			return err
		}, "deadline_ms is required for mode park"},
		"a deadline past a year": {func(ctx context.Context) error {
			_, err := s.StartDrain(ctx, &adminv1.StartDrainRequest{NodeId: "a", DeadlineMs: 1 << 63})
			return err
		}, "a year"},
		"a long reason to drain": {func(ctx context.Context) error {
			_, err := s.StartDrain(ctx, &adminv1.StartDrainRequest{NodeId: "a", Reason: long})
			return err
		}, "reason must be at most"},
		"a long name": {func(ctx context.Context) error {
			_, err := s.StartDrain(ctx, &adminv1.StartDrainRequest{NodeId: "a", RequestedBy: long})
			return err
		}, "requested_by must be at most"},
		"no drain": {func(ctx context.Context) error { _, err := s.GetDrain(ctx, &adminv1.GetDrainRequest{}); return err }, "drain_id or node_id is required"},
		"a drain below zero": {func(ctx context.Context) error {
			_, err := s.CancelDrain(ctx, &adminv1.CancelDrainRequest{DrainId: -1, NodeId: "a"})
			return err
		}, "drain_id or node_id is required"},
		"too many drains": {func(ctx context.Context) error {
			_, err := s.ListDrains(ctx, &adminv1.ListDrainsRequest{Limit: 1001})
			return err
		}, "limit must be 1 to 1000"},
		"drains before none": {func(ctx context.Context) error {
			_, err := s.ListDrains(ctx, &adminv1.ListDrainsRequest{BeforeDrainId: -1})
			return err
		}, "before_drain_id must not be negative"},
		"orphans for no reason": {func(ctx context.Context) error {
			_, err := s.ListOrphans(ctx, &adminv1.ListOrphansRequest{Reason: "lost"})
			return err
		}, "reason must be deleted, superseded or held_elsewhere"},
		"orphans after nothing": {func(ctx context.Context) error {
			_, err := s.ListOrphans(ctx, &adminv1.ListOrphansRequest{AfterSandboxId: "A"})
			return err
		}, "sandbox"},
		"events from nowhere": {func(ctx context.Context) error {
			_, err := s.ListEvents(ctx, &adminv1.ListEventsRequest{Before: "x"})
			return err
		}, "before must be the next of an earlier answer"},
		"events of no kind": {func(ctx context.Context) error {
			_, err := s.ListEvents(ctx, &adminv1.ListEventsRequest{Kind: long})
			return err
		}, "kind has 1025 bytes"},
		"a cluster with a bell": {func(ctx context.Context) error {
			_, err := s.ListNodes(ctx, &adminv1.ListNodesRequest{ClusterId: "\a"})
			return err
		}, "cluster_id has a control character"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := tt.call(t.Context())
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error = %v, want %q", err, tt.want)
			}
			if code := rpcerr.Twirp(err).Code(); err != nil && code != twirp.InvalidArgument {
				t.Errorf("code = %s, want invalid_argument", code)
			}
		})
	}
}
