package nodes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/scheduler/internal/placement"
)

const (
	dueEvery    = time.Second
	expireEvery = time.Minute
	statusEvery = 15 * time.Second
	passBatch   = 500

	loopDue    = "due"
	loopExpire = "expire nodes"
	loopStatus = "node status"
)

// DueLoop makes nodes due on which a confirmed hold is older than the grace: an equal roster is not
// compared, so a sandbox that never came up would keep its binding. It runs until ctx ends.
func (n *Nodes) DueLoop(ctx context.Context) error {
	return n.db.Loop(ctx, loopDue, dueEvery, n.store.Pass(loopDue, n.due), n.log)
}

func (n *Nodes) due(ctx context.Context) error {
	return n.db.Tx(ctx, func(tx pgx.Tx) error {
		if mine, err := pgdb.TryLock(ctx, tx, advisory.Loop(loopDue)); err != nil || !mine {
			return err
		}
		overdue, err := placement.OverdueNodes(ctx, tx, n.cfg.Grace)
		if err != nil {
			return err
		}
		return makeDue(ctx, tx, overdue)
	})
}

// ExpireLoop makes registered nodes absent that have been silent for long, until ctx ends.
func (n *Nodes) ExpireLoop(ctx context.Context) error {
	return n.db.Loop(ctx, loopExpire, expireEvery, n.store.Pass(loopExpire, n.expire), n.log)
}

// selectSilentSQL returns registered nodes whose leases ended long ago. @node is ” for all of them.
const selectSilentSQL = `
SELECT  n.node_id
FROM    nodes AS n
JOIN    node_leases AS l ON l.node_id = n.node_id
WHERE   n.source = 'registered' AND n.present AND l.expires_at < clock_timestamp() - @ttl::interval
AND     (@node::text = '' OR n.node_id = @node)
ORDER   BY n.node_id
LIMIT   @most::bigint`

func (n *Nodes) silent(ctx context.Context, q querier, id node.ID) ([]node.ID, error) {
	rows, err := q.Query(ctx, selectSilentSQL, pgx.StrictNamedArgs{"node": id, "ttl": n.cfg.RegisteredTTL, "most": passBatch})
	if err != nil {
		return nil, fmt.Errorf("read silent nodes: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[node.ID])
	if err != nil {
		return nil, fmt.Errorf("read silent nodes: %w", err)
	}
	return ids, nil
}

type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

func (n *Nodes) expire(ctx context.Context) error {
	ids, err := n.silent(ctx, n.db, "")
	if err != nil {
		return err
	}
	var failed []error
	for _, id := range ids {
		absent := false
		err := n.db.Tx(ctx, func(tx pgx.Tx) error {
			absent = false
			for _, key := range []pgdb.Key{advisory.Node(id), advisory.Loop(loopExpire)} {
				if mine, err := pgdb.TryLock(ctx, tx, key); err != nil || !mine {
					return err
				}
			}
			still, err := n.silent(ctx, tx, id) // it may have been heard before the lock was ours
			if err != nil || len(still) == 0 {
				return err
			}
			absent = true
			return leave(ctx, tx, still)
		})
		if err != nil {
			failed = append(failed, fmt.Errorf("expire %s: %w", id, err)) // one node's trouble keeps no other
			continue
		}
		if absent {
			n.log.InfoContext(ctx, "registered node is absent", slog.Any("node", id))
		}
	}
	return errors.Join(failed...)
}

// StatusLoop shows how many observed nodes have each status, and logs when one became unhealthy or
// well, until ctx ends.
func (n *Nodes) StatusLoop(ctx context.Context) error {
	before := map[node.ID]node.Status{}
	return n.db.Loop(ctx, loopStatus, statusEvery, n.store.Pass(loopStatus, func(ctx context.Context) error {
		return n.showStatus(ctx, before)
	}), n.log)
}

// showStatus compares with the statuses of before, and leaves those of now there.
func (n *Nodes) showStatus(ctx context.Context, before map[node.ID]node.Status) error {
	observed, err := n.ListObserved(ctx, "")
	if err != nil {
		return err
	}
	var (
		counts = make(map[node.Status]int, len(statuses))
		worst  int64
	)
	now := make(map[node.ID]node.Status, len(observed))
	for _, o := range observed {
		status := o.Snapshot.Status
		counts[status]++
		now[o.ID] = status
		was, known := before[o.ID]
		if known && was != status && (was == node.Unhealthy || status == node.Unhealthy) {
			n.log.InfoContext(ctx, "node status changed", slog.Any("node", o.ID), slog.String("from", was.String()), slog.String("to", status.String()))
		}
		if o.LeaseLeft > 0 {
			worst = max(worst, o.SkewMS, -o.SkewMS)
		}
	}
	for _, status := range statuses {
		n.metrics.observed.WithLabelValues(status.String()).Set(float64(counts[status]))
	}
	n.metrics.skew.Set(float64(worst) / 1000)
	clear(before)
	maps.Copy(before, now)
	return nil
}
