package bindings

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
)

const selectHealthSQL = `
SELECT  l.node_id, n.cluster_id, l.expires_at > clock_timestamp() AS well, l.expires_at
FROM    node_leases AS l
JOIN    nodes AS n ON n.node_id = l.node_id
WHERE   l.ended_at IS NULL`

// standing is whether a node is well, as its lease says it.
type standing struct {
	NodeID    node.ID
	ClusterID string
	Well      bool
	ExpiresAt time.Time
}

// noteHealth writes one event for each node that became unhealthy or well, whichever replica sees it first.
// seen is what this replica saw in its last pass, and is then what it saw in this one; of a node that it has
// not seen before the log is asked. The caller judges only while heartbeats flow.
func (b *Bindings) noteHealth(ctx context.Context, seen map[node.ID]bool) error {
	rows, err := b.db.Query(ctx, selectHealthSQL)
	if err != nil {
		return fmt.Errorf("read which nodes are well: %w", err)
	}
	now, err := pgx.CollectRows(rows, pgx.RowToStructByName[standing])
	if err != nil {
		return fmt.Errorf("read which nodes are well: %w", err)
	}
	changed := make([]standing, 0, len(now))
	for _, s := range now {
		if well, known := seen[s.NodeID]; !known || well != s.Well {
			changed = append(changed, s)
		}
	}
	for some := range slices.Chunk(changed, passBatch) {
		if err := b.noteSomeHealth(ctx, some); err != nil {
			return err // seen stays as it was: the next pass asks again
		}
	}
	clear(seen)
	for _, s := range now {
		seen[s.NodeID] = s.Well
	}
	return nil
}

// selectHealthNotedSQL reads what the log said last of each node's health.
const selectHealthNotedSQL = `
SELECT  asked.node_id, last.kind
FROM    unnest(@nodes::text[]) AS asked (node_id)
CROSS   JOIN LATERAL (
        SELECT e.kind
        FROM   sandbox_events AS e
        WHERE  e.node_id = asked.node_id AND e.kind IN ('node_unhealthy', 'node_well', 'node_unregistered')
        ORDER  BY e.at DESC, e.event_id DESC
        LIMIT  1) AS last`

func (b *Bindings) noteSomeHealth(ctx context.Context, changed []standing) error {
	var events []Event
	err := b.db.Tx(ctx, func(tx pgx.Tx) error {
		events = nil
		// Waited for, not tried: who goes on without the lock would think that what it saw is written.
		if err := pgdb.Lock(ctx, tx, advisory.Loop(loopHealth)); err != nil {
			return err
		}
		noted, err := healthNoted(ctx, tx, changed)
		if err != nil {
			return err
		}
		for _, s := range changed {
			last := noted[s.NodeID]
			switch {
			case !s.Well && last != KindUnhealthy:
				events = append(events, s.event(KindUnhealthy))
			case s.Well && last == KindUnhealthy:
				events = append(events, s.event(KindWell))
			}
		}
		return Note(ctx, tx, events...)
	})
	if err != nil {
		return fmt.Errorf("note the health of %d nodes: %w", len(changed), err)
	}
	b.Count(events...)
	return nil
}

const loopHealth = "node health"

func healthNoted(ctx context.Context, tx pgx.Tx, changed []standing) (map[node.ID]Kind, error) {
	ids := make([]node.ID, len(changed))
	for i, s := range changed {
		ids[i] = s.NodeID
	}
	rows, err := tx.Query(ctx, selectHealthNotedSQL, pgx.StrictNamedArgs{"nodes": ids})
	if err != nil {
		return nil, fmt.Errorf("read what was noted: %w", err)
	}
	noted := make(map[node.ID]Kind, len(ids))
	var (
		id   node.ID
		kind Kind
	)
	if _, err := pgx.ForEachRow(rows, []any{&id, &kind}, func() error {
		noted[id] = kind
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read what was noted: %w", err)
	}
	return noted, nil
}

func (s standing) event(kind Kind) Event {
	return Event{
		Kind: kind, Cluster: s.ClusterID, Node: s.NodeID,
		Detail: map[string]any{"lease_expires_at": s.ExpiresAt.UTC().Format(time.RFC3339Nano)},
	}
}
