package p2p

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
)

// Peer is a ready node and where its store listens.
type Peer struct {
	Node    node.ID
	Backend string
	Address string
}

// Wanted says which peers are asked for. Backend and cluster are compared exactly.
type Wanted struct {
	Cluster string // "": any
	Backend string // "": any
	Exclude node.ID
}

// selectPeersSQL reads peers with what their status is judged by.
const selectPeersSQL = `
SELECT  p.node_id, p.backend, p.address, n.present, n.lingering OR n.cordoned OR n.drain_id IS NOT NULL AS leaving,
        l.expires_at >= clock_timestamp() AS lease_held, l.reported_status
FROM    peer_endpoints AS p
JOIN    nodes AS n ON n.node_id = p.node_id
JOIN    node_leases AS l ON l.node_id = p.node_id
WHERE   l.ended_at IS NULL AND p.node_id <> @exclude
AND     (@cluster::text = '' OR p.cluster_id = @cluster) AND (@backend::text = '' OR p.backend = @backend)
ORDER   BY p.node_id`

// peerRow is a peer that may not be ready.
type peerRow struct {
	NodeID         node.ID
	Backend        string
	Address        string
	Present        bool
	Leaving        bool
	LeaseHeld      bool
	ReportedStatus node.Status
}

// Peers returns the peers that are wanted, by id.
func (x *Index) Peers(ctx context.Context, w Wanted) ([]Peer, error) {
	rows, err := x.db.Query(ctx, selectPeersSQL, pgx.StrictNamedArgs{"cluster": w.Cluster, "backend": w.Backend, "exclude": w.Exclude})
	if err != nil {
		return nil, fmt.Errorf("read peers: %w", err)
	}
	known, err := pgx.CollectRows(rows, pgx.RowToStructByName[peerRow])
	if err != nil {
		return nil, fmt.Errorf("read peers: %w", err)
	}
	return ready(known), nil
}

// ready returns those of known whose effective status is ready, in their order.
func ready(known []peerRow) []Peer {
	peers := make([]Peer, 0, len(known))
	for _, p := range known {
		standing := node.Standing{LeaseHeld: p.LeaseHeld, Present: p.Present, Leaving: p.Leaving, Reported: p.ReportedStatus}
		if standing.Effective() == node.Ready {
			peers = append(peers, Peer{Node: p.NodeID, Backend: p.Backend, Address: p.Address})
		}
	}
	return peers
}

// someOf returns at most limit of peers, drawn and ordered by lot, so that those who ask do not all go to
// the same holder; a limit below 1 is none. It changes peers.
func someOf(peers []Peer, limit int) []Peer {
	rand.Shuffle(len(peers), func(i, j int) { peers[i], peers[j] = peers[j], peers[i] })
	if limit > 0 && len(peers) > limit {
		return peers[:limit]
	}
	return peers
}
