package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"berth/migrations"
	"berth/pkg/pglocal"
	"berth/pkg/pgtest"
)

// TestWithTheDatabaseAwayEveryCallSaysSoInTimeAndAfterwardsNothingIsLost freezes the database and kills
// it, under a fleet that lives.
func TestWithTheDatabaseAwayEveryCallSaysSoInTimeAndAfterwardsNothingIsLost(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, nil)
	s := newStack(t, server.New(migrations.FS), "node-a", "node-b")
	for _, id := range []string{"node-a", "node-b"} {
		s.start(id, nil).heardSince(t)
	}
	where := map[string]place{}
	for range 6 {
		id, p := s.create(cold)
		where[id] = p
	}
	for _, away := range []struct {
		how         string
		leave, back func()
	}{
		{"frozen", server.Freeze, server.Thaw},
		{"killed", func() { server.Stop(pglocal.Immediate) }, server.Start},
	} {
		away.leave()
		s.everyCallSaysUnavailable(away.how, where)
		away.back()
		// Nobody does anything: nodes are heard again, and what was answered well is there.
		for _, n := range s.nodes {
			n.heardSince(t)
		}
		for name, w := range s.everybody() {
			g := &agentGateway{t, w}
			for id, p := range where {
				eventually(t, settleLimit, func() error { return g.finds(id, p.id) })
			}
			eventually(t, settleLimit, func() error {
				if _, err := g.schedule(nil); err != nil {
					return fmt.Errorf("%s, after it was %s: %w", name, away.how, err)
				}
				return nil
			})
		}
		for id, n := range s.nodes {
			if status, instance := s.status(id); status != "NODE_STATUS_READY" || instance != n.instance {
				t.Errorf("after the database was %s, %s is %s of %s, want ready of %s", away.how, id, status, instance, n.instance)
			}
		}
		if bound := s.count("SELECT count(*) FROM bindings WHERE state = 'bound'"); bound != len(where) {
			t.Errorf("after the database was %s, %d sandboxes are bound, want %d", away.how, bound, len(where))
		}
		id, p := s.create(sandbox)
		where[id] = p
	}
}

// everyCallSaysUnavailable calls all methods every way, with a deadline that must be kept.
func (s *stack) everyCallSaysUnavailable(how string, where map[string]place) {
	s.t.Helper()
	var box string
	for id := range where {
		box = id
	}
	calls := map[string]fields{
		"Schedule": {"hint": cold}, "ListNodes": nil, "LookupNode": {"sandbox_id": box},
		"RecordAssignment": {"sandbox_id": box, "node": where[box].fields()}, "ListObservedNodes": nil,
		"Heartbeat":          {"node_id": "node-a", "service_instance_id": s.nodes["node-a"].instance, "sandbox_ids": []any{"another"}},
		"ReportSandboxEvent": {"node_id": "node-a", "service_instance_id": s.nodes["node-a"].instance, "events": []any{fields{"sandbox_id": "another", "event_type": "SANDBOX_EVENT_TYPE_CREATE"}}},
		"ListP2pPeers":       nil, "RecordP2pArtifact": {"cluster_id": "c", "backend": "b", "key": "k", "node_id": "node-a"},
		"ForgetP2pArtifact": {"cluster_id": "c", "backend": "b", "key": "k", "node_id": "node-a"},
		"LookupP2pArtifact": {"cluster_id": "c", "backend": "b", "key": "k"}, "GetNode": {"node_id": "node-a"},
		"UnregisterNode": {"node_id": "node-a", "service_instance_id": s.nodes["node-a"].instance},
	}
	if len(calls) != len(rpcs) {
		s.t.Fatalf("%d calls for %d methods", len(calls), len(rpcs))
	}
	const deadline = 5 * time.Second
	var group sync.WaitGroup
	for name, w := range s.everybody() {
		for rpc, set := range calls {
			group.Go(func() {
				ctx, cancel := context.WithTimeout(s.t.Context(), deadline)
				defer cancel()
				_, err := ask(ctx, w, rpc, set)
				code, text := refused(err)
				if ctx.Err() != nil || errors.Is(err, context.DeadlineExceeded) {
					s.t.Errorf("database %s, %s: %s did not end before its deadline: %v", how, name, rpc, err)
					return
				}
				if code != codes.Unavailable || text != "binding store unavailable" {
					s.t.Errorf("database %s, %s: %s = %s %q, want unavailable, binding store unavailable", how, name, rpc, code, text)
				}
			})
		}
	}
	group.Wait()
}
