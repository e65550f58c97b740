package placement

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
)

// Artifact names bytes that a node's store may hold; each node is asked about those of its own cluster.
// The zero value is none.
type Artifact struct{ Backend, Key string }

// selectArtifactsSQL reads who holds the artifacts. The index is a hint, so it is read with the view, not
// under the locks of nodes: a holder that dropped the bytes since fetches them as any other node would.
const selectArtifactsSQL = `
SELECT  n.node_id, a.backend, a.key
FROM    unnest(@backends::text[], @keys::text[]) AS wanted (backend, key)
CROSS   JOIN (SELECT DISTINCT cluster_id FROM nodes WHERE present) AS clusters
JOIN    p2p_artifacts AS a ON a.cluster_id = clusters.cluster_id AND a.backend = wanted.backend AND a.key = wanted.key
JOIN    p2p_holders AS h ON h.artifact_id = a.artifact_id
JOIN    nodes AS n ON n.node_id = h.node_id AND n.cluster_id = a.cluster_id`

type artifactRow struct {
	NodeID  node.ID
	Backend string
	Key     string
}

// hold reads which nodes hold the artifacts that the requests name.
func (v *view) hold(ctx context.Context, db *pgdb.DB, asked []*Request) error {
	var backends, keys []string
	for _, r := range asked {
		if a := r.Constraints.Artifact; a != (Artifact{}) {
			backends, keys = append(backends, a.Backend), append(keys, a.Key)
		}
	}
	if len(keys) == 0 {
		return nil
	}
	rows, err := db.Query(ctx, selectArtifactsSQL, pgx.StrictNamedArgs{"backends": backends, "keys": keys})
	if err != nil {
		return fmt.Errorf("read the holders of %d artifacts: %w", len(keys), err)
	}
	holders, err := pgx.CollectRows(rows, pgx.RowToStructByName[artifactRow])
	if err != nil {
		return fmt.Errorf("read the holders of %d artifacts: %w", len(keys), err)
	}
	for _, n := range v.nodes {
		n.Holds = nil
	}
	for _, row := range holders {
		if n := v.byID[row.NodeID]; n != nil {
			if n.Holds == nil {
				n.Holds = map[Artifact]bool{}
			}
			n.Holds[Artifact{row.Backend, row.Key}] = true
		}
	}
	return nil
}
