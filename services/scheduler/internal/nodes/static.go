package nodes

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/scheduler/internal/bindings"
)

const selectStaticIDsSQL = `SELECT node_id FROM nodes WHERE source = 'static' AND present`

const lockStaticSQL = `
SELECT  node_id, endpoint, endpoint_revision, cluster_id, source, trusted, present, lingering
FROM    nodes
WHERE   node_id = ANY (@nodes::text[])
ORDER   BY node_id
FOR     NO KEY UPDATE`

const writeStaticSQL = `
INSERT  INTO nodes AS n (node_id, endpoint, endpoint_revision, source, trusted)
SELECT  @node, @endpoint, @revision, 'static', true
ON CONFLICT (node_id) DO UPDATE
SET     endpoint = EXCLUDED.endpoint, endpoint_revision = EXCLUDED.endpoint_revision, source = 'static', trusted = true,
        lingering = false, present = true, gone_at = NULL, changed_at = clock_timestamp()`

// leaveNodesSQL makes nodes absent; their rows stay, for bindings name them. That a node lingers is its
// source's word, which ends with it.
const leaveNodesSQL = `
UPDATE  nodes
SET     present = false, lingering = false, gone_at = clock_timestamp(), changed_at = clock_timestamp()
WHERE   node_id = ANY (@nodes::text[]) AND present`

// dueNodesSQL sends the next heartbeat of nodes down the slow path, where all about them is looked at.
// A lease that is being written is left to the next pass.
const dueNodesSQL = `
WITH    due AS MATERIALIZED (
        SELECT node_id
        FROM   node_leases
        WHERE  node_id = ANY (@nodes::text[]) AND reconcile_due > clock_timestamp()
        ORDER  BY node_id
        FOR    UPDATE SKIP LOCKED)
UPDATE  node_leases AS l
SET     reconcile_due = '-infinity'
FROM    due
WHERE   l.node_id = due.node_id`

type staticRow struct {
	NodeID           node.ID
	Endpoint         string
	EndpointRevision int64
	ClusterID        string
	Source           string
	Trusted          bool
	Present          bool
	Lingering        bool
}

// ApplyStatic makes listed the static nodes, in one transaction: they are present and trusted with
// exactly these endpoints, and other static nodes are absent. Whoever calls it last decides. Errors
// name the node: an id that is not valid or comes twice, an endpoint without the right form.
func (n *Nodes) ApplyStatic(ctx context.Context, listed []StaticNode) error {
	wanted, err := n.checkStatic(listed)
	if err != nil {
		return err
	}
	fed := false
	err = n.db.Tx(ctx, func(tx pgx.Tx) error {
		fed = false
		rows, err := tx.Query(ctx, selectStaticIDsSQL)
		if err != nil {
			return fmt.Errorf("read static nodes: %w", err)
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[node.ID])
		if err != nil {
			return fmt.Errorf("read static nodes: %w", err)
		}
		for id := range wanted {
			ids = append(ids, id)
		}
		slices.Sort(ids)
		ids = slices.Compact(ids)
		known, err := lockStatic(ctx, tx, ids)
		if err != nil {
			return err
		}
		var changed, left []node.ID
		for _, id := range ids {
			endpoint, isWanted := wanted[id]
			row, isKnown := known[id]
			switch {
			case !isWanted && isKnown && row.Source == sourceStatic && row.Present:
				left = append(left, id)
			case isWanted && (!isKnown || row != staticRow{
				NodeID: id, Endpoint: endpoint, EndpointRevision: row.EndpointRevision, ClusterID: row.ClusterID,
				Source: sourceStatic, Trusted: true, Present: true,
			}):
				announced, err := applyStatic(ctx, tx, row, StaticNode{ID: id, Endpoint: endpoint})
				if err != nil {
					return err
				}
				fed = fed || announced
				changed = append(changed, id)
			}
		}
		if err := leave(ctx, tx, left); err != nil {
			return err
		}
		return makeDue(ctx, tx, append(changed, left...))
	})
	if err != nil {
		return fmt.Errorf("apply %d static nodes: %w", len(listed), err)
	}
	if fed {
		n.routes.Doorbell().Ring()
	}
	return nil
}

// checkStatic returns the endpoints as they are stored, by node. The static list is the operator's
// word: its form is judged, not where it points.
func (n *Nodes) checkStatic(listed []StaticNode) (map[node.ID]string, error) {
	wanted := make(map[node.ID]string, len(listed))
	var mistakes []error
	for _, s := range listed {
		id, err := node.ParseID(string(s.ID))
		if err != nil {
			mistakes = append(mistakes, fmt.Errorf("static node %q: %w", s.ID, err))
			continue
		}
		endpoint, _, err := n.guard.Form(s.Endpoint)
		if err != nil {
			mistakes = append(mistakes, fmt.Errorf("static node %q has endpoint %q: %w", s.ID, s.Endpoint, err))
			continue
		}
		if _, twice := wanted[id]; twice {
			mistakes = append(mistakes, fmt.Errorf("static node %q is listed twice", s.ID))
		}
		wanted[id] = endpoint
	}
	return wanted, errors.Join(mistakes...)
}

func lockStatic(ctx context.Context, tx pgx.Tx, ids []node.ID) (map[node.ID]staticRow, error) {
	keys := make([]pgdb.Key, len(ids))
	for i, id := range ids {
		keys[i] = advisory.Node(id)
	}
	if err := pgdb.Lock(ctx, tx, keys...); err != nil {
		return nil, err
	}
	rows, err := tx.Query(ctx, lockStaticSQL, pgx.StrictNamedArgs{"nodes": ids})
	if err != nil {
		return nil, fmt.Errorf("lock static nodes: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[staticRow])
	if err != nil {
		return nil, fmt.Errorf("lock static nodes: %w", err)
	}
	known := make(map[node.ID]staticRow, len(list))
	for _, r := range list {
		known[r.NodeID] = r
	}
	return known, nil
}

// applyStatic writes one node, and the feed where a gateway would dial otherwise than before.
func applyStatic(ctx context.Context, tx pgx.Tx, known staticRow, s StaticNode) (announced bool, err error) {
	revision := known.EndpointRevision
	if known.Endpoint != s.Endpoint || !known.Trusted {
		announced = true
		revision, err = bindings.AnnounceNode(ctx, tx, bindings.NodeChange{
			Node: s.ID, Cluster: known.ClusterID, Endpoint: s.Endpoint, Above: known.EndpointRevision,
		})
		if err != nil {
			return false, err
		}
	}
	_, err = tx.Exec(ctx, writeStaticSQL, pgx.StrictNamedArgs{"node": s.ID, "endpoint": s.Endpoint, "revision": revision})
	if err != nil {
		return false, fmt.Errorf("write static node %s: %w", s.ID, err)
	}
	return announced, nil
}

// leave makes nodes absent, and forgets where their stores listen and what they hold.
func leave(ctx context.Context, tx pgx.Tx, nodes []node.ID) error {
	if len(nodes) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, leaveNodesSQL, pgx.StrictNamedArgs{"nodes": nodes}); err != nil {
		return fmt.Errorf("make %d nodes absent: %w", len(nodes), err)
	}
	return forgetPeers(ctx, tx, nodes...)
}

func makeDue(ctx context.Context, tx pgx.Tx, nodes []node.ID) error {
	if len(nodes) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, dueNodesSQL, pgx.StrictNamedArgs{"nodes": nodes}); err != nil {
		return fmt.Errorf("make %d nodes due: %w", len(nodes), err)
	}
	return nil
}
