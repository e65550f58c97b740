package p2p

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
)

const (
	capacityEvery = 10 * time.Second
	passBatch     = 500

	loopCapacity = "p2p capacity"
)

type metrics struct {
	artifacts prometheus.Gauge
	trimmed   prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) metrics {
	m := metrics{
		artifacts: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "berth_scheduler_p2p_artifacts", Help: "Keys in the index of artifacts, at the last pass of this replica.",
		}),
		trimmed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "berth_scheduler_p2p_trimmed_total", Help: "Keys that this replica deleted because there were more than the capacity.",
		}),
	}
	reg.MustRegister(m.artifacts, m.trimmed)
	return m
}

// CapacityLoop deletes the least recently used artifacts above the capacity, and what nodes held that are
// gone and had too much for the transaction in which they left, each 10 s until ctx ends.
func (x *Index) CapacityLoop(ctx context.Context) error {
	return x.db.Loop(ctx, loopCapacity, capacityEvery, x.store.Pass(loopCapacity, func(ctx context.Context) error {
		return errors.Join(x.sweep(ctx), x.trim(ctx))
	}), x.log)
}

// selectGoneHoldersSQL walks the index from one holder to the next, so that one with many artifacts costs as
// much as one with a few.
const selectGoneHoldersSQL = `
WITH    RECURSIVE holder (node_id) AS (
        SELECT min(node_id) FROM p2p_holders
        UNION  ALL
        SELECT (SELECT min(h.node_id) FROM p2p_holders AS h WHERE h.node_id > holder.node_id)
        FROM   holder
        WHERE  holder.node_id IS NOT NULL)
SELECT  n.node_id
FROM    holder
JOIN    nodes AS n ON n.node_id = holder.node_id
LEFT    JOIN node_leases AS l ON l.node_id = n.node_id
WHERE   (NOT n.present OR l.ended_at IS NOT NULL) AND (@node::text = '' OR n.node_id = @node)
ORDER   BY n.node_id`

type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// goneHolders returns those of the holders that are gone; n "" is all of them.
func goneHolders(ctx context.Context, q querier, n node.ID) ([]node.ID, error) {
	rows, err := q.Query(ctx, selectGoneHoldersSQL, pgx.StrictNamedArgs{"node": n})
	if err != nil {
		return nil, fmt.Errorf("read holders that are gone: %w", err)
	}
	gone, err := pgx.CollectRows(rows, pgx.RowTo[node.ID])
	if err != nil {
		return nil, fmt.Errorf("read holders that are gone: %w", err)
	}
	return gone, nil
}

// sweep forgets what is left of nodes that are gone. One that comes back meanwhile may lose what it has just
// recorded, which is a hint.
func (x *Index) sweep(ctx context.Context) error {
	gone, err := goneHolders(ctx, x.db, "")
	if err != nil {
		return err
	}
	for _, n := range gone {
		for forgotten := forgetAtOnce; forgotten == forgetAtOnce; {
			err := x.db.Tx(ctx, func(tx pgx.Tx) error {
				forgotten = 0
				if mine, err := pgdb.TryLock(ctx, tx, advisory.Loop(loopCapacity)); err != nil || !mine {
					return err
				}
				still, err := goneHolders(ctx, tx, n)
				if err != nil || len(still) == 0 {
					return err
				}
				forgotten, err = forgetSome(ctx, tx, n)
				return err
			})
			if err != nil {
				return fmt.Errorf("sweep the artifacts of %s: %w", n, err)
			}
		}
	}
	return nil
}

const countArtifactsSQL = `SELECT count(*) FROM p2p_artifacts`

const selectCutoffSQL = `
SELECT  used_at
FROM    p2p_artifacts
ORDER   BY used_at, artifact_id
OFFSET  @spared::bigint
LIMIT   1`

// trimArtifactsSQL asks about used_at again under each row's lock, for a row that was used since the
// cutoff was read is none of the least recently used. One that is locked is being used now.
const trimArtifactsSQL = `
WITH    oldest AS MATERIALIZED (
        SELECT artifact_id
        FROM   p2p_artifacts
        WHERE  used_at <= @cutoff
        ORDER  BY used_at, artifact_id
        LIMIT  @most::bigint
        FOR    UPDATE SKIP LOCKED)
DELETE  FROM p2p_artifacts AS a
USING   oldest
WHERE   a.artifact_id = oldest.artifact_id`

// trim is one pass. It counts in each of its transactions, under the lock that only one pass has: two
// that each took off what both had counted would go below the capacity.
func (x *Index) trim(ctx context.Context) error {
	for {
		var mine bool
		var keys, trimmed int64
		err := x.db.Tx(ctx, func(tx pgx.Tx) (err error) {
			keys, trimmed = 0, 0
			if mine, err = pgdb.TryLock(ctx, tx, advisory.Loop(loopCapacity)); err != nil || !mine {
				return err
			}
			keys, trimmed, err = x.trimSome(ctx, tx)
			return err
		})
		if err != nil {
			return fmt.Errorf("trim artifacts: %w", err)
		}
		if mine {
			x.metrics.artifacts.Set(float64(keys))
			x.metrics.trimmed.Add(float64(trimmed))
		}
		if trimmed < passBatch {
			return nil
		}
	}
}

// trimSome deletes at most passBatch artifacts above the capacity. It returns how many are left, and how
// many it deleted.
func (x *Index) trimSome(ctx context.Context, tx pgx.Tx) (left, trimmed int64, err error) {
	if err := tx.QueryRow(ctx, countArtifactsSQL).Scan(&left); err != nil {
		return 0, 0, fmt.Errorf("count artifacts: %w", err)
	}
	most := min(left-int64(x.cfg.Capacity), passBatch)
	if most <= 0 {
		return left, 0, nil
	}
	var cutoff time.Time
	if err := tx.QueryRow(ctx, selectCutoffSQL, pgx.StrictNamedArgs{"spared": most - 1}).Scan(&cutoff); err != nil {
		return 0, 0, fmt.Errorf("find the least recently used: %w", err)
	}
	tag, err := tx.Exec(ctx, trimArtifactsSQL, pgx.StrictNamedArgs{"cutoff": cutoff, "most": most})
	if err != nil {
		return 0, 0, fmt.Errorf("delete %d artifacts: %w", most, err)
	}
	return left - tag.RowsAffected(), tag.RowsAffected(), nil
}
