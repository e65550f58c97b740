package nodes

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/scheduler/internal/bindings"
)

const sourceKubernetes = "kubernetes"

// DiscoveredNode is a node that Kubernetes lists.
type DiscoveredNode struct {
	ID        node.ID
	Endpoint  string
	Lingering bool // it takes no creates, and what it has stays routable
}

// Unfit is a discovered node that is not listed, and why.
type Unfit struct {
	DiscoveredNode
	Why error // node.ErrBadID, route.ErrNotAllowed, or a text: listed twice
}

const selectDiscoveredSQL = `
SELECT  node_id, endpoint, endpoint_revision, cluster_id, source, trusted, present, lingering
FROM    nodes
WHERE   node_id = ANY (@nodes::text[]) OR source = 'kubernetes' AND present`

const lockDiscoveredSQL = `
SELECT  node_id, endpoint, endpoint_revision, cluster_id, source, trusted, present, lingering
FROM    nodes
WHERE   node_id = ANY (@nodes::text[])
ORDER   BY node_id
FOR     NO KEY UPDATE`

const writeDiscoveredSQL = `
INSERT  INTO nodes AS n (node_id, endpoint, endpoint_revision, source, lingering)
SELECT  @node, @endpoint, @revision, 'kubernetes', @lingering
ON CONFLICT (node_id) DO UPDATE
SET     endpoint = EXCLUDED.endpoint, endpoint_revision = EXCLUDED.endpoint_revision, source = 'kubernetes', trusted = false,
        lingering = EXCLUDED.lingering, present = true, gone_at = NULL, changed_at = clock_timestamp()`

// discoveredRow is a row of nodes as Kubernetes' word is compared with it.
type discoveredRow struct {
	NodeID           node.ID
	Endpoint         string
	EndpointRevision int64
	ClusterID        string
	Source           string
	Trusted          bool
	Present          bool
	Lingering        bool
}

// ApplyDiscovered makes listed what Kubernetes lists, in one transaction under the lease of w: these are
// present with exactly these endpoints, and other nodes of Kubernetes are absent. A node that is static
// stays what it is; one that registered itself becomes Kubernetes'. Where the rows say all that already,
// nothing is locked or written. Without the lease nothing is written, and the error is ErrNotWriter.
//
// It returns what was left out, by id: names that are no node ids, endpoints the guard refuses, and
// later ones of two with one id.
func (n *Nodes) ApplyDiscovered(ctx context.Context, w Writer, listed []DiscoveredNode) ([]Unfit, error) {
	wanted, unfit := n.fit(ctx, listed)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	known, err := readDiscovered(ctx, n.db, selectDiscoveredSQL, slices.Sorted(maps.Keys(wanted)))
	if err != nil {
		return unfit, err
	}
	ids := changing(known, wanted)
	if len(ids) == 0 {
		return unfit, nil
	}
	fed := false
	err = n.db.Tx(ctx, func(tx pgx.Tx) (err error) {
		fed, err = applyDiscovered(ctx, tx, w, ids, wanted)
		return err
	})
	if err != nil {
		return unfit, fmt.Errorf("apply %d discovered nodes: %w", len(listed), err)
	}
	if fed {
		n.routes.Doorbell().Ring()
	}
	return unfit, nil
}

// fit asks the guard about each node that is listed.
func (n *Nodes) fit(ctx context.Context, listed []DiscoveredNode) (map[node.ID]DiscoveredNode, []Unfit) {
	wanted := make(map[node.ID]DiscoveredNode, len(listed))
	var unfit []Unfit
	for _, d := range listed {
		_, why := node.ParseID(string(d.ID))
		if _, twice := wanted[d.ID]; twice {
			why = fmt.Errorf("node %s is listed twice", d.ID)
		}
		if why == nil {
			_, why = n.guard.Check(ctx, d.Endpoint)
		}
		if why != nil {
			unfit = append(unfit, Unfit{d, why})
			continue
		}
		wanted[d.ID] = d
	}
	slices.SortFunc(unfit, func(a, b Unfit) int { return cmp.Compare(a.ID, b.ID) })
	return wanted, unfit
}

func readDiscovered(ctx context.Context, q querier, sql string, ids []node.ID) (map[node.ID]discoveredRow, error) {
	rows, err := q.Query(ctx, sql, pgx.StrictNamedArgs{"nodes": ids})
	if err != nil {
		return nil, fmt.Errorf("read discovered nodes: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[discoveredRow])
	if err != nil {
		return nil, fmt.Errorf("read discovered nodes: %w", err)
	}
	known := make(map[node.ID]discoveredRow, len(list))
	for _, r := range list {
		known[r.NodeID] = r
	}
	return known, nil
}

// step is what becomes of one node's row.
type step int

const (
	stay step = iota
	write
	goAway
)

// step compares r, the zero row where there is none, with what Kubernetes says, if it lists the node.
func (r discoveredRow) step(d DiscoveredNode, listed bool) step {
	switch {
	case r.Present && r.Source == sourceStatic:
		return stay // the operator's word
	case !listed && r.Present && r.Source == sourceKubernetes:
		return goAway
	case !listed:
		return stay // another source's, or gone already
	case r.Present && r.Source == sourceKubernetes && r.Endpoint == d.Endpoint && r.Lingering == d.Lingering:
		return stay
	}
	return write
}

// changing returns the nodes whose rows differ from what is wanted, by id.
func changing(known map[node.ID]discoveredRow, wanted map[node.ID]DiscoveredNode) []node.ID {
	ids := slices.AppendSeq(slices.Collect(maps.Keys(known)), maps.Keys(wanted))
	slices.Sort(ids)
	return slices.DeleteFunc(slices.Compact(ids), func(id node.ID) bool {
		d, listed := wanted[id]
		return known[id].step(d, listed) == stay
	})
}

func applyDiscovered(ctx context.Context, tx pgx.Tx, w Writer, ids []node.ID, wanted map[node.ID]DiscoveredNode) (fed bool, err error) {
	keys := make([]pgdb.Key, len(ids))
	for i, id := range ids {
		keys[i] = advisory.Node(id)
	}
	if err := pgdb.Lock(ctx, tx, keys...); err != nil {
		return false, err
	}
	if err := checkWriter(ctx, tx, w); err != nil {
		return false, err
	}
	known, err := readDiscovered(ctx, tx, lockDiscoveredSQL, ids)
	if err != nil {
		return false, err
	}
	var changed, left []node.ID
	for _, id := range ids {
		row, d := known[id], wanted[id]
		_, listed := wanted[id]
		switch row.step(d, listed) {
		case stay:
		case goAway:
			left = append(left, id)
		case write:
			announced, err := writeDiscovered(ctx, tx, row, d)
			if err != nil {
				return false, err
			}
			fed = fed || announced
			changed = append(changed, id)
		}
	}
	if err := leave(ctx, tx, left); err != nil {
		return false, err
	}
	return fed, makeDue(ctx, tx, append(changed, left...))
}

// writeDiscovered writes one node, and the feed where a gateway would dial otherwise than before.
func writeDiscovered(ctx context.Context, tx pgx.Tx, known discoveredRow, d DiscoveredNode) (announced bool, err error) {
	revision := known.EndpointRevision
	if known.Endpoint != d.Endpoint || known.Trusted {
		announced = true
		revision, err = bindings.AnnounceNode(ctx, tx, bindings.NodeChange{
			Node: d.ID, Cluster: known.ClusterID, Endpoint: d.Endpoint, Above: known.EndpointRevision,
		})
		if err != nil {
			return false, err
		}
	}
	_, err = tx.Exec(ctx, writeDiscoveredSQL, pgx.StrictNamedArgs{
		"node": d.ID, "endpoint": d.Endpoint, "revision": revision, "lingering": d.Lingering,
	})
	if err != nil {
		return false, fmt.Errorf("write discovered node %s: %w", d.ID, err)
	}
	return announced, nil
}
