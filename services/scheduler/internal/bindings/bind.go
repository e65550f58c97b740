package bindings

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// ErrRaced says that a row appeared between its reading and its writing: the transaction is to be
// run again from its start.
var ErrRaced = errors.New("a binding appeared meanwhile")

// Held is a row of bindings as it is judged.
type Held struct {
	SandboxID   sandbox.ID
	State       sandbox.State
	NodeID      node.ID
	Revision    sandbox.Revision
	Incarnation sandbox.Incarnation
	Origin      sandbox.Origin
	TenantID    string
	SpreadKey   string
	CPUMillis   int64
	MemoryBytes int64
	PlacementID *int64
	BoundAt     time.Time
	EndedAt     *time.Time // nil: bound
	EndedBy     *sandbox.Ending
	HolderLive  bool // NodeID has a live lease
}

// lockHeldSQL locks rows in the order of their keys, so that two who change the same rows wait for
// each other instead of deadlocking.
const lockHeldSQL = `
SELECT  b.sandbox_id, b.state, b.node_id, b.revision, b.incarnation, b.origin, b.tenant_id, b.spread_key, b.cpu_millis,
        b.memory_bytes, b.placement_id, b.bound_at, b.ended_at, b.ended_by,
        EXISTS (SELECT 1 FROM node_leases AS l
                WHERE l.node_id = b.node_id AND l.ended_at IS NULL AND l.expires_at > clock_timestamp()) AS holder_live
FROM    bindings AS b
WHERE   b.sandbox_id = ANY (@ids::text[])
ORDER   BY b.sandbox_id
FOR     UPDATE OF b`

// lockHeld locks the rows there are of ids and returns them by id.
func lockHeld(ctx context.Context, tx pgx.Tx, ids []sandbox.ID) (map[sandbox.ID]*Held, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	rows, err := tx.Query(ctx, lockHeldSQL, pgx.StrictNamedArgs{"ids": ids})
	if err != nil {
		return nil, fmt.Errorf("lock %d bindings: %w", len(ids), err)
	}
	held, err := collectHeld(rows)
	if err != nil {
		return nil, fmt.Errorf("lock %d bindings: %w", len(ids), err)
	}
	return held, nil
}

func collectHeld(rows pgx.Rows) (map[sandbox.ID]*Held, error) {
	list, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByName[Held])
	if err != nil {
		return nil, err
	}
	held := make(map[sandbox.ID]*Held, len(list))
	for _, h := range list {
		held[h.SandboxID] = h
	}
	return held, nil
}

// binding is a row as it is to be bound.
type binding struct {
	Sandbox     sandbox.ID
	Node        node.ID
	Cluster     string // the node's
	Locked      bool   // the row exists, and this transaction has locked it
	Incarnation sandbox.Incarnation
	Origin      sandbox.Origin
	Tenant      string
	SpreadKey   string
	Size        sandbox.Size
	PlacementID int64 // 0: none
}

// insertBindingsSQL inserts rows that were not there, in the order of their ids; a row that appeared
// meanwhile is left alone and does not come back. DO NOTHING, for DO UPDATE would wait for that row's
// lock, whose holder may wait for a row that was inserted here. DO NOTHING waits too, but only for who
// inserted or changed the same row and has not ended; so whoever has changed a row waits for nothing.
const insertBindingsSQL = `
WITH    fresh AS (
        INSERT INTO bindings (sandbox_id, state, node_id, cluster_id, incarnation, origin, tenant_id, spread_key,
                cpu_millis, memory_bytes, placement_id)
        SELECT id, 'bound', node, cluster, incarnation, origin, tenant, spread_key, cpu_millis, memory_bytes, nullif(placement, 0)
        FROM   unnest(@ids::text[], @nodes::text[], @clusters::text[], @incarnations::bigint[], @origins::text[], @tenants::text[],
                      @spread_keys::text[], @cpus::bigint[], @memories::bigint[], @placements::bigint[])
               AS want (id, node, cluster, incarnation, origin, tenant, spread_key, cpu_millis, memory_bytes, placement)
        ORDER  BY id COLLATE "C"
        ON CONFLICT (sandbox_id) DO NOTHING
        RETURNING sandbox_id, revision, incarnation, cluster_id, node_id, tenant_id),
        fed AS (
        INSERT INTO route_feed (kind, key, revision, state, cluster_id, node_id, incarnation, tenant_id)
        SELECT 'binding', sandbox_id, revision, 'bound', cluster_id, node_id, incarnation, tenant_id
        FROM   fresh)
SELECT  sandbox_id, revision, incarnation
FROM    fresh`

// moveBindingsSQL binds rows that are locked.
const moveBindingsSQL = `
WITH    moved AS (
        UPDATE bindings AS b
        SET    state = 'bound', node_id = want.node, cluster_id = want.cluster,
               revision = GREATEST(b.revision + 1, nextval('revisions')), incarnation = want.incarnation,
               origin = want.origin, tenant_id = want.tenant, spread_key = want.spread_key, cpu_millis = want.cpu_millis,
               memory_bytes = want.memory_bytes, placement_id = nullif(want.placement, 0),
               bound_at = clock_timestamp(), ended_at = NULL, ended_by = NULL
        FROM   unnest(@ids::text[], @nodes::text[], @clusters::text[], @incarnations::bigint[], @origins::text[], @tenants::text[],
                      @spread_keys::text[], @cpus::bigint[], @memories::bigint[], @placements::bigint[])
               AS want (id, node, cluster, incarnation, origin, tenant, spread_key, cpu_millis, memory_bytes, placement)
        WHERE  b.sandbox_id = want.id
        RETURNING b.sandbox_id, b.revision, b.incarnation, b.cluster_id, b.node_id, b.tenant_id),
        fed AS (
        INSERT INTO route_feed (kind, key, revision, state, cluster_id, node_id, incarnation, tenant_id)
        SELECT 'binding', sandbox_id, revision, 'bound', cluster_id, node_id, incarnation, tenant_id
        FROM   moved)
SELECT  sandbox_id, revision, incarnation
FROM    moved`

// bind is bindAll for rows that go to n, which is in cluster. ErrRaced: see there.
func bind(ctx context.Context, tx pgx.Tx, n node.ID, cluster string, want []binding) (map[sandbox.ID]Assigned, error) {
	for i := range want {
		want[i].Node, want[i].Cluster = n, cluster
	}
	bound, err := bindAll(ctx, tx, want)
	if err != nil {
		return nil, fmt.Errorf("bind to %s: %w", n, err)
	}
	if len(bound) != len(want) {
		return nil, fmt.Errorf("bind %d sandboxes to %s: %w", len(want), n, ErrRaced)
	}
	return bound, nil
}

// bindAll is the only way in: it binds rows to their nodes, each with its F, and returns those it bound.
// What it does not return appeared meanwhile. New rows come first: an insert may wait for a transaction
// that has inserted or changed the same row, and whoever has changed an old row by then would be waited
// for in turn. The caller has changed no binding yet, and when it has it waits for nothing.
func bindAll(ctx context.Context, tx pgx.Tx, want []binding) (map[sandbox.ID]Assigned, error) {
	var fresh, locked []binding
	for _, w := range want {
		if w.Locked {
			locked = append(locked, w)
		} else {
			fresh = append(fresh, w)
		}
	}
	slices.SortFunc(fresh, func(x, y binding) int { return cmp.Compare(x.Sandbox, y.Sandbox) }) // over statements, too
	bound := make(map[sandbox.ID]Assigned, len(want))
	for _, step := range []struct {
		sql  string
		want []binding
	}{{insertBindingsSQL, fresh}, {moveBindingsSQL, locked}} {
		for some := range slices.Chunk(step.want, rowsAtOnce) {
			rows, err := tx.Query(ctx, step.sql, bindArgs(some))
			if err != nil {
				return nil, fmt.Errorf("bind %d sandboxes: %w", len(some), err)
			}
			list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Assigned])
			if err != nil {
				return nil, fmt.Errorf("bind %d sandboxes: %w", len(some), err)
			}
			for _, a := range list {
				bound[a.Sandbox] = a
			}
		}
	}
	return bound, nil
}

// rowsAtOnce bounds what one statement writes: all of the largest roster would not end within the role's
// statement timeout on a busy machine.
const rowsAtOnce = 5000

func bindArgs(want []binding) pgx.StrictNamedArgs {
	var (
		ids          []sandbox.ID
		nodes        []node.ID
		clusters     []string
		incarnations []int64
		origins      []string
		tenants      []string
		spreadKeys   []string
		cpus         []int64
		memories     []int64
		placements   []int64
	)
	for _, w := range want {
		ids, nodes, clusters = append(ids, w.Sandbox), append(nodes, w.Node), append(clusters, w.Cluster)
		incarnations, origins = append(incarnations, int64(w.Incarnation)), append(origins, string(w.Origin))
		tenants, spreadKeys = append(tenants, w.Tenant), append(spreadKeys, w.SpreadKey)
		cpus, memories = append(cpus, w.Size.CPUMillis), append(memories, w.Size.MemoryBytes)
		placements = append(placements, w.PlacementID)
	}
	return pgx.StrictNamedArgs{
		"ids": ids, "nodes": nodes, "clusters": clusters, "incarnations": incarnations, "origins": origins, "tenants": tenants,
		"spread_keys": spreadKeys, "cpus": cpus, "memories": memories, "placements": placements,
	}
}

// endBindingsSQL moves rows that the caller has locked out of 'bound', or from 'parked' to 'gone'.
const endBindingsSQL = `
WITH    ended AS (
        UPDATE bindings AS b
        SET    state = @state::text, ended_by = @by::text, ended_at = clock_timestamp(),
               revision = GREATEST(b.revision + 1, nextval('revisions'))
        WHERE  b.sandbox_id = ANY (@ids::text[]) AND b.state <> @state::text AND b.state <> 'gone'
        RETURNING b.sandbox_id, b.revision, b.incarnation, b.cluster_id, b.node_id, b.tenant_id),
        fed AS (
        INSERT INTO route_feed (kind, key, revision, state, cluster_id, node_id, incarnation, tenant_id)
        SELECT 'binding', sandbox_id, revision, @state::text, cluster_id, node_id, incarnation, tenant_id
        FROM   ended)
SELECT  sandbox_id, revision, incarnation
FROM    ended`

// end moves locked rows to state, each with its F, and returns those that moved.
func end(ctx context.Context, tx pgx.Tx, ids []sandbox.ID, state sandbox.State, by sandbox.Ending) ([]Assigned, error) {
	var ended []Assigned
	for some := range slices.Chunk(ids, rowsAtOnce) {
		rows, err := tx.Query(ctx, endBindingsSQL, pgx.StrictNamedArgs{"ids": some, "state": string(state), "by": string(by)})
		if err != nil {
			return nil, fmt.Errorf("end %d bindings: %w", len(some), err)
		}
		list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Assigned])
		if err != nil {
			return nil, fmt.Errorf("end %d bindings: %w", len(some), err)
		}
		ended = append(ended, list...)
	}
	return ended, nil
}
