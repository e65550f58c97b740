package nodes

import (
	"testing"

	"berth/services/internal/node"
)

// holder lets id hold an artifact.
func (c *cell) holder(id node.ID) {
	c.t.Helper()
	c.exec(`WITH a AS (INSERT INTO p2p_artifacts (cluster_id, backend, key) VALUES ('c', 'b', $1) RETURNING artifact_id)
INSERT INTO p2p_holders (artifact_id, node_id) SELECT artifact_id, $1 FROM a`, id)
}

// TestWhoeverLeavesHoldsNothingAndIsAPeerAgainWhenItReturns: nothing but the node's being there changes, so
// its facts are the same before and after, and nobody may take them for written.
func TestWhoeverLeavesHoldsNothingAndIsAPeerAgainWhenItReturns(t *testing.T) {
	t.Parallel()
	static := StaticNode{ID: "a", Endpoint: "http://127.0.0.1:9000"}
	for name, tt := range map[string]struct {
		listed bool
		leave  func(t *testing.T, c *cell, r *replica)
		back   func(t *testing.T, r *replica)
		again  string // the instance that comes back
	}{
		"it unregisters and restarts": {
			leave: func(t *testing.T, _ *cell, r *replica) {
				if err := r.Unregister(t.Context(), "a", "i1"); err != nil {
					t.Fatal(err)
				}
			}, again: "i2",
		},
		"it unregisters and goes on": {
			leave: func(t *testing.T, _ *cell, r *replica) {
				if err := r.Unregister(t.Context(), "a", "i1"); err != nil {
					t.Fatal(err)
				}
			}, again: "i1",
		},
		"the static list drops it": {
			listed: true,
			leave: func(t *testing.T, _ *cell, r *replica) {
				if err := r.ApplyStatic(t.Context(), nil); err != nil {
					t.Fatal(err)
				}
			},
			back: func(t *testing.T, r *replica) {
				if err := r.ApplyStatic(t.Context(), []StaticNode{static}); err != nil {
					t.Fatal(err)
				}
			}, again: "i1",
		},
		"it registered and was silent for long": {
			leave: func(t *testing.T, c *cell, r *replica) {
				c.exec(`UPDATE node_leases SET expires_at = now() - interval '2 hours'`)
				if err := r.expire(t.Context()); err != nil {
					t.Fatal(err)
				}
			}, again: "i1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			r := c.replica()
			if tt.listed {
				tt.back(t, r)
			}
			beat := func(instance string) {
				t.Helper()
				b := beatOf("a", instance, static.Endpoint)
				if tt.listed {
					b.Endpoint = ""
				}
				b.Cluster, b.Peer = "c", &Peer{Backend: "b", Address: "a:9"}
				b.Snapshot = &Snapshot{Status: node.Ready}
				r.must(t, b)
			}
			there := func() [2]int64 {
				t.Helper()
				return [2]int64{value[int64](c, `SELECT count(*) FROM peer_endpoints`), value[int64](c, `SELECT count(*) FROM p2p_holders`)}
			}
			beat("i1")
			c.holder("a")
			if got := there(); got != [2]int64{1, 1} {
				t.Fatalf("peers and holders = %v, want one each", got)
			}
			tt.leave(t, c, r)
			if got := there(); got != [2]int64{} {
				t.Errorf("after it left peers and holders = %v, want none", got)
			}
			if tt.back != nil {
				tt.back(t, r)
			}
			beat(tt.again)
			if got := there(); got != [2]int64{1, 0} {
				t.Errorf("when it is back peers and holders = %v, want one peer that holds nothing yet", got)
			}
		})
	}
}
