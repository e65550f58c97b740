package bindings

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/placement"
)

const (
	claimsEvery = time.Second
	loopClaims  = "settle create keys"
)

// ClaimLoop settles the create keys whose caller is gone, on nodes that draw their own ids, until ctx
// ends. Two heartbeats after the claim expired the node has listed what it made: if that is exactly what
// the claim asked for, and nothing else on the node is open that could have made it, it is the claim's;
// else the key is free. Any number of replicas may run it.
func (b *Bindings) ClaimLoop(ctx context.Context) error {
	return b.db.Loop(ctx, loopClaims, claimsEvery, b.store.Pass(loopClaims, b.settleClaims), b.log)
}

func (b *Bindings) settleClaims(ctx context.Context) error {
	nodes, err := placement.OverdueClaimNodes(ctx, b.db, b.cfg.KeyGrace)
	if err != nil {
		return err
	}
	var failed []error
	for _, n := range nodes {
		if err := b.settleClaimsOn(ctx, n); err != nil {
			failed = append(failed, fmt.Errorf("settle create keys on %s: %w", n, err)) // one node's trouble keeps no other's keys
		}
	}
	return errors.Join(failed...)
}

func (b *Bindings) settleClaimsOn(ctx context.Context, n node.ID) error {
	settled := map[int64][]sandbox.ID{} // by placement
	err := b.db.Tx(ctx, func(tx pgx.Tx) error {
		clear(settled)
		// No placement, no roster and no late record without a hold gets in between.
		if err := pgdb.Lock(ctx, tx, advisory.Node(n)); err != nil {
			return err
		}
		claims, err := placement.OverdueClaims(ctx, tx, n, b.cfg.KeyGrace)
		if err != nil {
			return err
		}
		for _, c := range claims {
			var made []sandbox.ID
			if c.Alone {
				if made, err = lockUnexplained(ctx, tx, n, c); err != nil {
					return err
				}
			}
			ended, err := placement.EndClaim(ctx, tx, c, made)
			if err != nil {
				return err
			}
			if !ended {
				continue
			}
			settled[c.PlacementID] = made
			if err := own(ctx, tx, made, c.Owner); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for id, made := range settled {
		if len(made) > 0 {
			b.bell.Ring()
		}
		b.log.InfoContext(ctx, "create key settled", slog.Any("node", n), slog.Int64("placement", id), slog.Int("sandboxes", len(made)))
	}
	return nil
}

const lockUnexplainedSQL = `
SELECT  sandbox_id
FROM    bindings
WHERE   node_id = @node AND state = 'bound' AND origin IN ('adopted', 'event') AND tenant_id = '' AND placement_id IS NULL AND bound_at >= @since
ORDER   BY sandbox_id
LIMIT   @most
FOR     UPDATE`

// lockUnexplained locks and returns the sandboxes that n made for nobody known since c was placed: as
// many as c asked for, else none.
func lockUnexplained(ctx context.Context, tx pgx.Tx, n node.ID, c placement.OverdueClaim) ([]sandbox.ID, error) {
	rows, err := tx.Query(ctx, lockUnexplainedSQL, pgx.StrictNamedArgs{"node": n, "since": c.Since, "most": c.Count + 1})
	if err != nil {
		return nil, fmt.Errorf("lock unexplained sandboxes: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[sandbox.ID])
	if err != nil {
		return nil, fmt.Errorf("lock unexplained sandboxes: %w", err)
	}
	if len(ids) != c.Count {
		return nil, nil
	}
	return ids, nil
}

// ownSandboxesSQL: gateways must see whose a sandbox is, for they answer nobody else: F.
const ownSandboxesSQL = `
WITH    owned AS (
        UPDATE bindings AS b
        SET    tenant_id = @tenant, spread_key = @spread_key, placement_id = @placement, revision = GREATEST(b.revision + 1, nextval('revisions')),
               cpu_millis = CASE WHEN b.cpu_millis = 0 THEN @cpu_millis ELSE b.cpu_millis END,
               memory_bytes = CASE WHEN b.memory_bytes = 0 THEN @memory_bytes ELSE b.memory_bytes END
        WHERE  b.sandbox_id = ANY (@ids::text[])
        RETURNING b.sandbox_id, b.revision, b.state, b.cluster_id, b.node_id, b.incarnation, b.tenant_id)
INSERT  INTO route_feed (kind, key, revision, state, cluster_id, node_id, incarnation, tenant_id)
SELECT  'binding', sandbox_id, revision, state, cluster_id, node_id, incarnation, tenant_id
FROM    owned`

// own gives adopted sandboxes, which the caller has locked, their owner.
func own(ctx context.Context, tx pgx.Tx, ids []sandbox.ID, owner placement.Owner) error {
	if len(ids) == 0 {
		return nil
	}
	_, err := tx.Exec(ctx, ownSandboxesSQL, pgx.StrictNamedArgs{
		"ids": ids, "tenant": owner.Tenant, "spread_key": owner.SpreadKey, "placement": owner.PlacementID,
		"cpu_millis": owner.Size.CPUMillis, "memory_bytes": owner.Size.MemoryBytes,
	})
	if err != nil {
		return fmt.Errorf("give %d sandboxes their owner: %w", len(ids), err)
	}
	return nil
}
