package conformance

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/migrations"
	"berth/pkg/pgtest"
)

const tablesSQL = `
SELECT  array_agg(c.oid::regclass::text ORDER BY c.oid)
FROM    pg_class AS c
WHERE   c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relname <> 'goose_db_version'`

// nextVersion does to the schema what a later version of Berth may do to it while this one runs: each
// table gets a column with a default, and there is a migration that this build has never heard of.
func (s *stack) nextVersion() {
	s.t.Helper()
	var tables []string
	if err := s.db.QueryRow(s.t.Context(), tablesSQL).Scan(&tables); err != nil {
		s.t.Fatal(err)
	}
	if len(tables) == 0 {
		s.t.Fatal("there is no table to change")
	}
	for _, table := range tables {
		if _, err := s.db.Exec(s.t.Context(), "ALTER TABLE "+table+" ADD COLUMN of_the_next_version text NOT NULL DEFAULT 'x'"); err != nil {
			s.t.Fatalf("%s: %v", table, err)
		}
	}
	if _, err := s.db.Exec(s.t.Context(), "INSERT INTO goose_db_version (version_id, is_applied) VALUES (99999, true)"); err != nil {
		s.t.Fatal(err)
	}
}

// TestAFleetLivesThroughARollout changes the schema under running replicas, as the rules for a rollout
// allow, and then replaces the replicas one after the other, while a gateway and nodes keep calling.
func TestAFleetLivesThroughARollout(t *testing.T) {
	t.Parallel()
	s := newStack(t, pgtest.New(t, migrations.FS), "node-a", "node-b")
	for _, id := range []string{"node-a", "node-b"} {
		s.start(id, nil).heardSince(t)
	}
	id, p := s.create(cold)

	ctx, stop := context.WithCancel(t.Context())
	var calls atomic.Int64
	var calling sync.WaitGroup
	defer calling.Wait()
	defer stop()
	calling.Go(func() {
		for ctx.Err() == nil {
			answer, err := ask(ctx, s.gateway.wire, "LookupNode", fields{"sandbox_id": id})
			if code, text := refused(err); ctx.Err() == nil && (code != codes.OK && code != codes.Unavailable || code == codes.OK && placeOf(answer) != p) {
				t.Errorf("during the rollout LookupNode = %v, %s %q, want %v, or to be told to ask again", answer, code, text, p)
			}
			if err == nil {
				calls.Add(1)
			}
		}
	})
	works := func(when string) {
		t.Helper()
		for _, n := range s.nodes {
			n.heardSince(t)
		}
		box, at := s.create(sandbox)
		if err := s.gateway.finds(box, at.id); err != nil {
			t.Errorf("%s: %v", when, err)
		}
		s.nodes[at.id].remove(box)
		eventually(t, settleLimit, func() error { return s.gateway.loses(box) })
		before := calls.Load()
		eventually(t, settleLimit, func() error {
			if calls.Load() == before {
				return fmt.Errorf("%s: the gateway's calls are not answered", when)
			}
			return nil
		})
	}
	works("before")
	s.nextVersion()
	works("on the next version's schema")
	for i, r := range s.replicas {
		r.stop() // as an orchestrator does: the process must end well
		works("with one replica")
		s.replicas[i] = serve(t, login(t, s.db), append([]string{"--config", agentENVFile(t, "node-a", "node-b")}, quick...)...)
		s.service.mu.Lock()
		s.service.behind[i] = s.replicas[i].grpc
		s.service.mu.Unlock()
		works("with a replica that began on the next version's schema")
	}
}
