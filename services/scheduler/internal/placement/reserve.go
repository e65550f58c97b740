package placement

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
)

// A transaction of the worker is two pipelined trips on one connection:
//
//	BEGIN; wait for keys; try nodes; read placements, usage, nodes and holds      then Go decides
//	delete what is replaced; insert placements and holds; COMMIT
//
// The statements of one trip still take a snapshot each, so what is read is younger than the locks.

const (
	beginSQL  = `BEGIN ISOLATION LEVEL READ COMMITTED`
	commitSQL = `COMMIT`

	// rollbackLimit is what an abandoned transaction gets to end in order.
	rollbackLimit = 2 * time.Second
)

// limitLockWaitSQL keeps a convoy on one node short: whoever waits longer plans anew.
const limitLockWaitSQL = `SELECT set_config('lock_timeout', '200ms', true)`

// lockPlacingKeysSQL waits for the locks of requests, tenants and, after losses, a node: each once, in ascending order.
const lockPlacingKeysSQL = `
SELECT  pg_advisory_xact_lock(key)
FROM    (SELECT DISTINCT lock_key(class, id) AS key
        FROM   unnest(@classes::int[], @ids::text[]) AS wanted (class, id)
        ORDER  BY key) AS sorted`

// tryNodesSQL has the try in the select list over a ready list: in a WHERE it could lock rows that are
// then thrown away.
const tryNodesSQL = `
SELECT  id, pg_try_advisory_xact_lock(lock_key(class, id)) AS held
FROM    unnest(@classes::int[], @ids::text[]) AS planned (class, id)`

const selectEarlierSQL = `
SELECT  p.tenant_id, asked.request_id AS key, p.placement_id, p.fingerprint, p.create_digest, p.outcome, p.tries, p.node_id,
        p.reservation_id::text AS reservation, p.sandbox_ids, p.sealed_answer, COALESCE(n.endpoint, '') AS endpoint,
        COALESCE(n.capabilities, '{}') AS capabilities, held.millis AS hold_millis, COALESCE(held.millis < 0, false) AS overdue
FROM    unnest(@tenants::text[], @requests::text[]) AS asked (tenant_id, request_id)
JOIN    placements AS p ON p.tenant_id = asked.tenant_id AND p.request_id = asked.request_id
LEFT    JOIN nodes AS n ON n.node_id = p.node_id
LEFT    JOIN LATERAL (
        SELECT (extract(epoch FROM min(r.expires_at) - clock_timestamp()) * 1000)::bigint AS millis
        FROM   reservations AS r
        WHERE  r.reservation_id = p.reservation_id AND r.sandbox_id IS NULL) AS held ON true`

// replaceHoldsSQL ends the open holds that others take the place of.
const replaceHoldsSQL = `
WITH    named AS MATERIALIZED (
        SELECT r.reservation_id, r.n
        FROM   reservations AS r
        JOIN   unnest(@reservations::text[], @tenants::text[]) AS old (id, tenant_id)
        ON     r.reservation_id = old.id::uuid AND r.tenant_id = old.tenant_id
        WHERE  r.sandbox_id IS NULL
        ORDER  BY r.reservation_id, r.n
        FOR    UPDATE OF r),
        gone AS (
        DELETE FROM reservations AS r
        USING  named
        WHERE  r.reservation_id = named.reservation_id AND r.n = named.n AND r.sandbox_id IS NULL
        RETURNING r.reservation_id, r.placement_id)
UPDATE  placements AS p
SET     outcome = 'released', changed_at = clock_timestamp()
FROM    (SELECT DISTINCT reservation_id, placement_id FROM gone) AS ended
WHERE   p.placement_id = ended.placement_id AND p.reservation_id = ended.reservation_id AND p.outcome = 'reserved'`

// insertPlacementsSQL writes placements with their holds. A new try of a request id takes its row over,
// under its lock Request; but records, rosters and events confirm without that lock, and what one of them
// has just confirmed stays: its try has no row in the answer.
const insertPlacementsSQL = `
WITH    wanted AS MATERIALIZED (
        SELECT id, tenant_id, request_id, fingerprint, create_key, create_digest, count, cluster_id, outcome, node_id, sandbox_ids,
               cpu_millis, memory_bytes, strategy, refusal, reasons, candidates, spread_key, named, ttl_millis
        FROM   unnest(@ids::text[], @tenants::text[], @request_ids::text[], @fingerprints::bytea[], @create_keys::text[],
                      @create_digests::bytea[], @counts::int[], @clusters::text[],
                      @outcomes::text[], @nodes::text[], @sandbox_ids::text[], @cpu_millis::bigint[], @memory_bytes::bigint[],
                      @strategies::text[], @refusals::text[], @reasons::text[], @candidates::text[], @spread_keys::text[],
                      @named::bool[], @ttl_millis::bigint[])
               AS w (id, tenant_id, request_id, fingerprint, create_key, create_digest, count, cluster_id, outcome, node_id, sandbox_ids,
                     cpu_millis, memory_bytes, strategy, refusal, reasons, candidates, spread_key, named, ttl_millis)),
        placed AS (
        INSERT INTO placements AS p (tenant_id, request_id, fingerprint, create_key, create_digest, count, cluster_id, outcome, node_id,
               reservation_id, sandbox_ids, cpu_millis, memory_bytes, strategy, refusal, reasons, candidates)
        SELECT tenant_id, request_id, fingerprint, create_key, create_digest, count, cluster_id, outcome, node_id, id::uuid,
               string_to_array(sandbox_ids, ','), cpu_millis, memory_bytes, strategy, refusal, reasons::jsonb, candidates::jsonb
        FROM   wanted
        ON     CONFLICT (tenant_id, request_id) WHERE request_id IS NOT NULL DO UPDATE
        SET    fingerprint = EXCLUDED.fingerprint, create_key = EXCLUDED.create_key, create_digest = EXCLUDED.create_digest,
               count = EXCLUDED.count, cluster_id = EXCLUDED.cluster_id, outcome = EXCLUDED.outcome,
               node_id = EXCLUDED.node_id, reservation_id = EXCLUDED.reservation_id, sandbox_ids = EXCLUDED.sandbox_ids,
               cpu_millis = EXCLUDED.cpu_millis, memory_bytes = EXCLUDED.memory_bytes, strategy = EXCLUDED.strategy,
               refusal = EXCLUDED.refusal, reasons = EXCLUDED.reasons, candidates = EXCLUDED.candidates,
               tries = p.tries + 1, sealed_answer = NULL, changed_at = clock_timestamp()
        WHERE  p.outcome NOT IN ('reserved', 'confirmed')
        RETURNING p.placement_id, p.reservation_id),
        held AS (
        INSERT INTO reservations (reservation_id, n, placement_id, node_id, tenant_id, spread_key, cpu_millis, memory_bytes, named, expires_at)
        SELECT placed.reservation_id, n, placed.placement_id, w.node_id, w.tenant_id, w.spread_key, w.cpu_millis, w.memory_bytes, w.named,
               clock_timestamp() + w.ttl_millis * interval '1 millisecond'
        FROM   wanted AS w
        JOIN   placed ON placed.reservation_id = w.id::uuid
        CROSS  JOIN LATERAL generate_series(1, w.count) AS n
        WHERE  w.outcome = 'reserved')
SELECT  reservation_id::text AS reservation, placement_id
FROM    placed`

// question is the first trip.
func (d *round) question() *pgx.Batch {
	batch := &pgx.Batch{}
	batch.Queue(beginSQL)
	if d.waits {
		batch.Queue(limitLockWaitSQL)
	}
	if len(d.keys) > 0 {
		batch.Queue(lockPlacingKeysSQL, keyArgs(d.keys))
	}
	if len(d.tried) > 0 {
		nodes := make([]pgdb.Key, len(d.tried))
		for i, id := range d.tried {
			nodes[i] = advisory.Node(id)
		}
		batch.Queue(tryNodesSQL, keyArgs(nodes))
	}
	if tenants, requests := d.requests(); len(requests) > 0 {
		batch.Queue(selectEarlierSQL, pgx.StrictNamedArgs{"tenants": tenants, "requests": requests})
	}
	if tenants, keys := d.createKeys(); len(keys) > 0 {
		batch.Queue(selectClaimsSQL, pgx.StrictNamedArgs{"tenants": tenants, "keys": keys})
	}
	if len(d.tenants) > 0 {
		batch.Queue(selectUsageSQL, pgx.StrictNamedArgs{"tenants": d.tenants})
	}
	if len(d.planned) > 0 {
		batch.Queue(selectNodesSQL, pgx.StrictNamedArgs{"ids": d.planned})
	}
	if keys := spreadKeys(d.asked...); len(keys) > 0 {
		batch.Queue(selectSpreadSQL, pgx.StrictNamedArgs{"keys": keys})
	}
	return batch
}

func keyArgs(keys []pgdb.Key) pgx.StrictNamedArgs {
	classes, ids := make([]int32, len(keys)), make([]string, len(keys))
	for i, k := range keys {
		classes[i], ids[i] = int32(k.Class), k.ID
	}
	return pgx.StrictNamedArgs{"classes": classes, "ids": ids}
}

func (d *round) requests() (tenants, requests []string) {
	for _, r := range d.asked {
		if r.RequestID != "" {
			tenants, requests = append(tenants, r.Tenant), append(requests, r.RequestID)
		}
	}
	return tenants, requests
}

// read takes the answers to question, in its order.
func (d *round) read(results *reader) error {
	results.skip() // BEGIN
	if d.waits {
		results.skip()
	}
	if len(d.keys) > 0 {
		results.skip()
	}
	if len(d.tried) > 0 {
		for _, try := range collect[nodeLock](results) {
			d.locked[try.ID] = try.Held
		}
	}
	if _, requests := d.requests(); len(requests) > 0 {
		d.before = make(map[[2]string]earlier, len(requests))
		for _, old := range collect[earlier](results) {
			d.before[[2]string{old.TenantID, old.Key}] = old
		}
	}
	if _, keys := d.createKeys(); len(keys) > 0 {
		d.claims = make(map[[2]string]earlier, len(keys))
		for _, old := range collect[earlier](results) {
			d.claims[[2]string{old.TenantID, old.Key}] = old
		}
	}
	if len(d.tenants) > 0 {
		d.usage = map[string]usage{}
		for _, used := range collect[usage](results) {
			d.usage[used.TenantID] = used
		}
	}
	if len(d.planned) > 0 {
		for _, row := range collect[nodeRow](results) {
			n := row.node()
			if planned := d.p.view.byID[n.ID]; planned != nil {
				n.Holds = planned.Holds // a hint, so it need not be read again
			}
			d.nodes[n.ID] = n
			if d.locked[n.ID] {
				d.ours = append(d.ours, n)
			}
		}
	}
	if len(spreadKeys(d.asked...)) > 0 {
		spreadOver(d.nodes, collect[spreadRow](results))
	}
	if results.err != nil {
		return fmt.Errorf("lock and read %d nodes: %w", len(d.planned), results.err)
	}
	return nil
}

type nodeLock struct {
	ID   node.ID
	Held bool
}

// write is the second trip, or nil if nothing is to be written.
func (d *round) write() (*pgx.Batch, error) {
	batch := &pgx.Batch{}
	if old, tenants := d.replaced(); len(old) > 0 {
		batch.Queue(replaceHoldsSQL, pgx.StrictNamedArgs{"reservations": old, "tenants": tenants})
	}
	if len(d.takeovers) > 0 {
		batch.Queue(takeOverSQL, d.takeOverArgs())
	}
	rows := columns{}
	for _, e := range d.stored() {
		if err := rows.add(&e, d.p.cfg.Strategy); err != nil {
			return nil, err
		}
	}
	d.inserts = len(rows.ids) > 0
	if d.inserts {
		batch.Queue(insertPlacementsSQL, pgx.StrictNamedArgs{
			"ids": rows.ids, "tenants": rows.tenants, "request_ids": rows.requestIDs, "fingerprints": rows.fingerprints,
			"create_keys": rows.createKeys, "create_digests": rows.digests, "counts": rows.counts, "clusters": rows.clusters, "outcomes": rows.outcomes, "nodes": rows.nodes,
			"sandbox_ids": rows.sandboxIDs, "cpu_millis": rows.cpuMillis, "memory_bytes": rows.memoryBytes,
			"strategies": rows.strategies, "refusals": rows.refusals, "reasons": rows.reasons, "candidates": rows.candidates,
			"spread_keys": rows.spreadKeys, "named": rows.named, "ttl_millis": rows.ttlMillis,
		})
	}
	if batch.Len() == 0 {
		return nil, nil
	}
	batch.Queue(commitSQL)
	return batch, nil
}

// replaced are the reservations that decided calls take the place of, refused ones too: their callers
// have given up the old room.
func (d *round) replaced() (reservations, tenants []string) {
	for i := range d.entries {
		if r := &d.entries[i].c.r; r.Replaces != "" {
			reservations, tenants = append(reservations, r.Replaces), append(tenants, r.Tenant)
		}
	}
	return reservations, tenants
}

// written takes the answers to write.
func (d *round) written(results *reader) error {
	if old, _ := d.replaced(); len(old) > 0 {
		results.skip()
	}
	if len(d.takeovers) > 0 {
		d.tookOver(collect[placedRow](results))
	}
	placed := map[string]int64{}
	if d.inserts {
		for _, row := range collect[placedRow](results) {
			placed[row.Reservation] = row.PlacementID
		}
	}
	results.skip() // COMMIT
	d.entries = slices.DeleteFunc(d.entries, func(e entry) bool {
		_, found := placed[e.id]
		lost := !found && e.c.r.RequestID != "" // those are all stored
		if lost {
			d.rest = append(d.rest, e.c) // the next round finds what was confirmed
		}
		return lost
	})
	for i := range d.entries {
		d.entries[i].placement = placed[d.entries[i].id]
	}
	return results.err
}

type placedRow struct {
	Reservation string
	PlacementID int64
}

// reader takes the results of a batch one after another and remembers the first error.
type reader struct {
	pgx.BatchResults
	err error
}

func (r *reader) skip() {
	if r.err == nil {
		_, r.err = r.Exec()
	}
}

func collect[T any](r *reader) []T {
	if r.err != nil {
		return nil
	}
	rows, err := r.Query()
	if err != nil {
		r.err = err
		return nil
	}
	values, err := pgx.CollectRows(rows, pgx.RowToStructByName[T])
	r.err = err
	return values
}

// inTwoTrips runs a transaction on a connection of its own: question, which begins it, read and decide
// in f; then what write returns, which ends it, and written. A nil batch rolls back: there is nothing
// to keep. A connection lost in the second trip leaves the outcome open: that is pgdb.ErrUnknown.
func (p *Placer) inTwoTrips(ctx context.Context, question *pgx.Batch, f func(*reader) error,
	write func() (*pgx.Batch, error), written func(*reader) error,
) error {
	conn, err := p.db.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release() // closes the connection if it is still in a transaction
	open := true
	defer func() {
		if open && !conn.Conn().IsClosed() {
			cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackLimit)
			defer cancel()
			_, _ = conn.Exec(cleanup, "ROLLBACK") // a failed one closes the connection, which rolls back too
		}
	}()

	if err := exchange(ctx, conn.Conn(), question, f); err != nil {
		return err
	}
	second, err := write()
	if err != nil || second == nil {
		return err
	}
	err = exchange(ctx, conn.Conn(), second, written)
	if err == nil {
		open = false
		return nil
	}
	if conn.Conn().IsClosed() && !pgconn.SafeToRetry(err) {
		return fmt.Errorf("%w: %w", pgdb.ErrUnknown, err)
	}
	return err
}

// exchange sends a batch and lets f take all its results.
func exchange(ctx context.Context, conn *pgx.Conn, batch *pgx.Batch, f func(*reader) error) error {
	results := &reader{BatchResults: conn.SendBatch(ctx, batch)}
	err := f(results)
	if closeErr := results.Close(); err == nil {
		err = closeErr
	}
	return err
}
