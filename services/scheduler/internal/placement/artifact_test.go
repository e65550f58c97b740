package placement

import (
	"errors"
	"fmt"
	"testing"

	"berth/pkg/pgtest"
	"berth/services/internal/node"
)

// holds lets a node hold an artifact of the cluster, as p2p would write it.
func holds(t *testing.T, db *pgtest.Database, cluster, backend, key, id string) {
	t.Helper()
	const sql = `
WITH a AS (INSERT INTO p2p_artifacts (cluster_id, backend, key) VALUES ($1, $2, $3)
           ON CONFLICT (cluster_id, backend, key) DO UPDATE SET used_at = now() RETURNING artifact_id)
INSERT INTO p2p_holders (artifact_id, node_id) SELECT artifact_id, $4 FROM a`
	if _, err := db.Exec(t.Context(), sql, cluster, backend, key, id); err != nil {
		t.Fatal(err)
	}
}

// TestArtifactsDrawCreates has three nodes, one of which holds the artifact while the others hold what only
// looks like it.
func TestArtifactsDrawCreates(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	for i, cluster := range []string{"c", "c", "d"} {
		addNode(t, db.DB, testNode{id: fmt.Sprintf("node-%d", i), cluster: cluster})
	}
	holds(t, db, "c", "b", "k", "node-1")
	holds(t, db, "c", "b", "l", "node-0")
	holds(t, db, "c", "other", "k", "node-0")
	holds(t, db, "c", "b", "k", "node-2") // of cluster c, where node-2 no longer is
	p := startPlacer(t, db, DefaultConfig())
	create := func(required, dry bool, change func(*Request)) (Placement, error) {
		r := request()
		r.DryRun = dry
		r.Constraints.Artifact, r.Constraints.ArtifactRequired = Artifact{"b", "k"}, required
		if change != nil {
			change(&r)
		}
		return p.Schedule(t.Context(), r)
	}
	for _, required := range []bool{false, true} {
		for _, dry := range []bool{true, false} {
			for range 3 { // sandboxes of one vCPU: node-1 is still near the others
				if got, err := create(required, dry, nil); err != nil || got.Node != "node-1" {
					t.Errorf("required %t, dry run %t: Schedule = %s, %v, want node-1", required, dry, got.Node, err)
				}
			}
		}
	}

	// Whatever is asked for besides, nobody else may take it.
	_, err := create(true, false, func(r *Request) { r.Exclude = []node.ID{"node-1"} })
	refused, ok := errors.AsType[*node.Refused](err)
	if !ok || !errors.Is(err, node.ErrConstraints) || refused.Reasons[string(NoArtifact)] != 2 || refused.Reasons[string(Excluded)] != 1 {
		t.Errorf("without its holder Schedule = %v (%+v), want two refused by %s", err, refused, NoArtifact)
	}
	if got, err := create(false, false, func(r *Request) { r.Exclude = []node.ID{"node-1"} }); err != nil || got.Node == "node-1" {
		t.Errorf("as a wish, without its holder: Schedule = %s, %v, want another node", got.Node, err)
	}

	// The index is read for each batch, so what becomes of it counts at once.
	if _, err := db.Exec(t.Context(), "DELETE FROM p2p_holders WHERE node_id = 'node-1'"); err != nil {
		t.Fatal(err)
	}
	if _, err := create(true, false, nil); !errors.Is(err, node.ErrConstraints) {
		t.Errorf("when nobody holds it Schedule = %v, want %v", err, node.ErrConstraints)
	}
	holds(t, db, "c", "b", "k", "node-0")
	if got, err := create(true, false, nil); err != nil || got.Node != "node-0" {
		t.Errorf("when node-0 holds it Schedule = %s, %v", got.Node, err)
	}
}
