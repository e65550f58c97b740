package p2p

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
	"berth/services/scheduler/internal/measure"
)

// Config says how much the index keeps and tells.
type Config struct {
	Capacity    int           // most keys, from 1; above it the least recently used go
	LookupLimit int           // most holders in one answer; below 1: all
	Touch       time.Duration // a key's recency is written at most this often; 0: with each use
}

// DefaultConfig returns what runs where nothing else is said.
func DefaultConfig() Config { return Config{Capacity: 1_000_000, Touch: time.Minute} }

// Index knows who holds which artifact. All methods may be called at once, on any number of replicas.
type Index struct {
	db      *pgdb.DB
	cfg     Config
	log     *slog.Logger
	metrics metrics
	store   *measure.Store
}

// New returns the index in db. It starts nothing: CapacityLoop is the caller's to run.
func New(db *pgdb.DB, cfg Config, log *slog.Logger, reg prometheus.Registerer) *Index {
	return &Index{db: db, cfg: cfg, log: log, metrics: newMetrics(reg), store: measure.NewStore(reg)}
}

// Artifact names bytes. No field is empty; cluster and backend pass node.CheckTag, the key has at most
// 1,024 bytes without control characters.
type Artifact struct{ Cluster, Backend, Key string }

func (a Artifact) args(more pgx.StrictNamedArgs) pgx.StrictNamedArgs {
	args := pgx.StrictNamedArgs{"cluster": a.Cluster, "backend": a.Backend, "key": a.Key}
	maps.Copy(args, more)
	return args
}

// hint runs f in a transaction whose commit does not wait for the disk. What PostgreSQL loses when it
// crashes within the next moments is harmless: the index promises nothing. A holder that is missing is
// recorded again or costs one fetch from elsewhere, and one that is back by mistake answers "not here".
func (x *Index) hint(ctx context.Context, f func(tx pgx.Tx) error) error {
	return x.db.Tx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL synchronous_commit = off`); err != nil {
			return fmt.Errorf("do not wait for the disk: %w", err)
		}
		return f(tx)
	})
}

// lockMemberSQL keeps a node from becoming absent until the holder is written: then that transaction
// forgets it.
const lockMemberSQL = `
SELECT  node_id
FROM    nodes
WHERE   node_id = @node AND present
FOR     SHARE`

// useArtifactSQL makes the artifact or marks it as used, and locks it either way: ON CONFLICT locks also a
// row that its WHERE then leaves alone.
const useArtifactSQL = `
INSERT  INTO p2p_artifacts AS a (cluster_id, backend, key)
SELECT  @cluster, @backend, @key
ON CONFLICT (cluster_id, backend, key) DO UPDATE
SET     used_at = clock_timestamp()
WHERE   a.used_at <= clock_timestamp() - @touch::interval`

const addHolderSQL = `
INSERT  INTO p2p_holders (artifact_id, node_id)
SELECT  artifact_id, @node
FROM    p2p_artifacts
WHERE   cluster_id = @cluster AND backend = @backend AND key = @key
ON CONFLICT DO NOTHING`

// Record adds a holder of a, which is used now; it may repeat. Errors: node.ErrNotListed for a node that
// is not present.
func (x *Index) Record(ctx context.Context, a Artifact, holder node.ID) error {
	err := x.hint(ctx, func(tx pgx.Tx) error {
		var present node.ID
		err := tx.QueryRow(ctx, lockMemberSQL, pgx.StrictNamedArgs{"node": holder}).Scan(&present)
		if errors.Is(err, pgx.ErrNoRows) {
			return node.ErrNotListed
		}
		if err != nil {
			return fmt.Errorf("find the node: %w", err)
		}
		if _, err := tx.Exec(ctx, useArtifactSQL, a.args(pgx.StrictNamedArgs{"touch": x.cfg.Touch})); err != nil {
			return fmt.Errorf("write the artifact: %w", err)
		}
		if _, err := tx.Exec(ctx, addHolderSQL, a.args(pgx.StrictNamedArgs{"node": holder})); err != nil {
			return fmt.Errorf("write the holder: %w", err)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("record an artifact of %s: %w", holder, err)
	}
	return nil
}

const lockArtifactSQL = `
SELECT  artifact_id
FROM    p2p_artifacts
WHERE   cluster_id = @cluster AND backend = @backend AND key = @key
FOR     UPDATE`

const deleteHoldersSQL = `
DELETE  FROM p2p_holders
WHERE   artifact_id = ANY (@artifacts::bigint[]) AND node_id = ANY (@nodes::text[])`

const deleteUnheldSQL = `
DELETE  FROM p2p_artifacts AS a
WHERE   a.artifact_id = ANY (@artifacts::bigint[])
AND     NOT EXISTS (SELECT 1 FROM p2p_holders AS h WHERE h.artifact_id = a.artifact_id)`

// Forget removes a holder of a, whether there is one or not; it may repeat.
func (x *Index) Forget(ctx context.Context, a Artifact, holder node.ID) error {
	err := x.hint(ctx, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, lockArtifactSQL, a.args(nil))
		if err != nil {
			return fmt.Errorf("lock the artifact: %w", err)
		}
		_, err = forget(ctx, tx, rows, holder)
		return err
	})
	if err != nil {
		return fmt.Errorf("forget an artifact of %s: %w", holder, err)
	}
	return nil
}

// forgetAtOnce bounds the artifacts of one transaction, in which a node leaves and others may wait for it.
const forgetAtOnce = 10_000

// lockHeldSQL locks in the order of the key: two nodes that leave at once hold some of the same.
const lockHeldSQL = `
SELECT  a.artifact_id
FROM    p2p_artifacts AS a
WHERE   EXISTS (SELECT 1 FROM p2p_holders AS h WHERE h.artifact_id = a.artifact_id AND h.node_id = ANY (@nodes::text[]))
ORDER   BY a.artifact_id
LIMIT   @most::bigint
FOR     UPDATE`

// ForgetNodes removes what nodes hold, which are leaving; what is much is left to CapacityLoop, and no answer
// has a node that is gone. A node that is made absent in tx was made so in an earlier statement: a Record of it
// has then either ended, or finds it absent.
func ForgetNodes(ctx context.Context, tx pgx.Tx, nodes ...node.ID) error {
	_, err := forgetSome(ctx, tx, nodes...)
	return err
}

// forgetSome removes up to forgetAtOnce of what nodes hold and returns how much that was.
func forgetSome(ctx context.Context, tx pgx.Tx, nodes ...node.ID) (int, error) {
	rows, err := tx.Query(ctx, lockHeldSQL, pgx.StrictNamedArgs{"nodes": nodes, "most": forgetAtOnce})
	if err != nil {
		return 0, fmt.Errorf("lock the artifacts of %d nodes: %w", len(nodes), err)
	}
	forgotten, err := forget(ctx, tx, rows, nodes...)
	if err != nil {
		return 0, fmt.Errorf("forget the artifacts of %d nodes: %w", len(nodes), err)
	}
	return forgotten, nil
}

// forget removes nodes as holders of the locked artifacts, and those of them that nobody holds any more. It
// returns how many were locked.
func forget(ctx context.Context, tx pgx.Tx, locked pgx.Rows, nodes ...node.ID) (int, error) {
	artifacts, err := pgx.CollectRows(locked, pgx.RowTo[int64])
	if err != nil {
		return 0, fmt.Errorf("lock artifacts: %w", err)
	}
	if len(artifacts) == 0 {
		return 0, nil
	}
	if _, err := tx.Exec(ctx, deleteHoldersSQL, pgx.StrictNamedArgs{"artifacts": artifacts, "nodes": nodes}); err != nil {
		return 0, fmt.Errorf("delete holders of %d artifacts: %w", len(artifacts), err)
	}
	if _, err := tx.Exec(ctx, deleteUnheldSQL, pgx.StrictNamedArgs{"artifacts": artifacts}); err != nil {
		return 0, fmt.Errorf("delete unheld artifacts among %d: %w", len(artifacts), err)
	}
	return len(artifacts), nil
}

// selectDueSQL tells whether the recency of an artifact is to be written again.
const selectDueSQL = `
SELECT  used_at <= clock_timestamp() - @touch::interval
FROM    p2p_artifacts
WHERE   cluster_id = @cluster AND backend = @backend AND key = @key`

// selectHoldersSQL is selectPeersSQL for the holders of one artifact.
const selectHoldersSQL = `
SELECT  p.node_id, p.backend, p.address, n.present, n.lingering OR n.cordoned OR n.drain_id IS NOT NULL AS leaving,
        l.expires_at >= clock_timestamp() AS lease_held, l.reported_status
FROM    p2p_artifacts AS a
JOIN    p2p_holders AS h ON h.artifact_id = a.artifact_id
JOIN    peer_endpoints AS p ON p.node_id = h.node_id AND p.cluster_id = a.cluster_id AND p.backend = a.backend
JOIN    nodes AS n ON n.node_id = p.node_id
JOIN    node_leases AS l ON l.node_id = p.node_id
WHERE   a.cluster_id = @cluster AND a.backend = @backend AND a.key = @key
AND     l.ended_at IS NULL AND p.node_id <> @exclude`

// touchArtifactSQL leaves a locked row alone: whoever has it uses it or removes it.
const touchArtifactSQL = `
WITH    due AS MATERIALIZED (
        SELECT artifact_id
        FROM   p2p_artifacts
        WHERE  cluster_id = @cluster AND backend = @backend AND key = @key AND used_at <= clock_timestamp() - @touch::interval
        FOR    NO KEY UPDATE SKIP LOCKED)
UPDATE  p2p_artifacts AS a
SET     used_at = clock_timestamp()
FROM    due
WHERE   a.artifact_id = due.artifact_id`

// Lookup returns peers that hold a, at most as many as configured and those by lot; an artifact that
// nobody recorded has none. It counts as a use of a.
func (x *Index) Lookup(ctx context.Context, a Artifact, exclude node.ID) ([]Peer, error) {
	known, due, err := x.holders(ctx, a, exclude)
	if err != nil {
		return nil, fmt.Errorf("read the holders of an artifact: %w", err)
	}
	if due {
		err := x.hint(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, touchArtifactSQL, a.args(pgx.StrictNamedArgs{"touch": x.cfg.Touch}))
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("mark an artifact as used: %w", err)
		}
	}
	return someOf(ready(known), x.cfg.LookupLimit), nil
}

// holders reads, in one trip, all that hold a and whether its recency is to be written.
func (x *Index) holders(ctx context.Context, a Artifact, exclude node.ID) (known []peerRow, due bool, err error) {
	batch := &pgx.Batch{}
	batch.Queue(selectDueSQL, a.args(pgx.StrictNamedArgs{"touch": x.cfg.Touch}))
	batch.Queue(selectHoldersSQL, a.args(pgx.StrictNamedArgs{"exclude": exclude}))
	results := x.db.SendBatch(ctx, batch)
	defer func() { _ = results.Close() }() // an error of the batch was returned by whoever read it
	err = results.QueryRow().Scan(&due)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	rows, err := results.Query()
	if err != nil {
		return nil, false, err
	}
	known, err = pgx.CollectRows(rows, pgx.RowToStructByName[peerRow])
	return known, due, err
}
