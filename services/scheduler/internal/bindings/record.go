package bindings

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/placement"
)

// maxRaces bounds how often a transaction begins anew because a row appeared: each time somebody
// else's commit has won, so two are rare and this many do not happen.
const maxRaces = 5

// Record binds sandboxes to a node in one commit, with the confirmation of their reservation. Called
// again with the same assignment it changes nothing and gives the same answer.
//
// Errors: node.ErrNotListed when no present node has exactly this id and endpoint;
// node.ErrReservationOver when the named reservation has ended and the node has no room;
// sandbox.ErrChanged when a binding to another node has another revision than expected;
// sandbox.ErrInUse when a binding is another tenant's.
func (b *Bindings) Record(ctx context.Context, a Assignment) ([]Assigned, error) {
	alone := false
	for races := 0; ; {
		assigned, fed, err := b.record(ctx, a, alone)
		switch {
		case err == nil:
			if fed {
				b.bell.Ring()
			}
			return assigned, nil
		case errors.Is(err, placement.ErrAlone) && !alone:
			alone = true
		case errors.Is(err, ErrRaced) && races < maxRaces:
			races++
		default:
			return nil, fmt.Errorf("record %d sandboxes on %s: %w", len(a.Sandboxes), a.Node, err)
		}
	}
}

func (b *Bindings) record(ctx context.Context, a Assignment, alone bool) (assigned []Assigned, fed bool, err error) {
	err = b.db.Tx(ctx, func(tx pgx.Tx) error {
		if err := pgdb.Lock(ctx, tx, a.locks(alone)...); err != nil {
			return err
		}
		cluster, err := presentAt(ctx, tx, a.Node, a.Endpoint)
		if err != nil {
			return err
		}
		held, err := lockHeld(ctx, tx, a.Sandboxes)
		if err != nil {
			return err
		}
		here, err := a.against(held)
		if err != nil {
			return err
		}
		owner, err := placement.Confirm(ctx, tx, placement.Confirmation{
			Sandbox: a.Sandboxes, Node: a.Node, ReservationID: a.ReservationID, PlacementID: a.PlacementID,
			Tenant: a.Tenant, Size: a.Size, AlreadyBoundHere: here, SealedAnswer: a.SealedAnswer,
			Alone: alone, Limits: b.cfg.Limits,
		})
		if err != nil {
			return err
		}
		filled, err := fillIn(ctx, tx, held, here, owner)
		if err != nil {
			return err
		}
		bound, err := bind(ctx, tx, a.Node, cluster, a.bindings(held, here, owner))
		if err != nil {
			return err
		}
		for _, now := range filled {
			bound[now.Sandbox] = now
		}
		assigned, fed = a.answer(held, bound), len(bound) > 0
		return nil
	})
	return assigned, fed, err
}

// locks are those of the sandboxes, and of the node where room is to be found on it. A sandbox without
// a row has nothing else that two records of it could wait at: one would get its hold and then need the
// row of the other, who has the row and needs the hold.
func (a Assignment) locks(alone bool) []pgdb.Key {
	keys := make([]pgdb.Key, 0, len(a.Sandboxes)+1)
	if alone {
		keys = append(keys, advisory.Node(a.Node))
	}
	for _, id := range a.Sandboxes {
		keys = append(keys, advisory.Sandbox(id))
	}
	return keys
}

const selectPresentAtSQL = `
SELECT  cluster_id
FROM    nodes
WHERE   node_id = @node AND endpoint = @endpoint AND present`

// presentAt returns the cluster of the present node n at endpoint, or node.ErrNotListed.
func presentAt(ctx context.Context, tx pgx.Tx, n node.ID, endpoint string) (string, error) {
	var cluster string
	err := tx.QueryRow(ctx, selectPresentAtSQL, pgx.StrictNamedArgs{"node": n, "endpoint": endpoint}).Scan(&cluster)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", node.ErrNotListed
	}
	if err != nil {
		return "", fmt.Errorf("read node %s: %w", n, err)
	}
	return cluster, nil
}

// against returns the sandboxes that are bound to the node already, or why a cannot be recorded over
// held. Without a tenant the last writer wins, as in AgentENV.
func (a Assignment) against(held map[sandbox.ID]*Held) (here map[sandbox.ID]bool, err error) {
	here = make(map[sandbox.ID]bool, len(held))
	for _, id := range a.Sandboxes {
		row, found := held[id]
		switch {
		case !found || row.State == sandbox.Gone:
			continue // nobody uses the id
		case a.Tenant != "" && row.TenantID != "" && row.TenantID != a.Tenant:
			return nil, sandbox.ErrInUse
		case row.State != sandbox.Bound:
			continue
		case row.NodeID == a.Node:
			here[id] = true
		case a.ExpectedRevision != 0 && a.ExpectedRevision != row.Revision:
			return nil, sandbox.ErrChanged
		}
	}
	return here, nil
}

// bindings returns the rows to bind: all but those that are here. What placement knows goes before
// what the row says.
func (a Assignment) bindings(held map[sandbox.ID]*Held, here map[sandbox.ID]bool, owner placement.Owner) []binding {
	var want []binding
	for _, id := range a.Sandboxes {
		if here[id] {
			continue
		}
		w := binding{
			Sandbox: id, Incarnation: 1, Origin: sandbox.Recorded, Tenant: owner.Tenant,
			SpreadKey: owner.SpreadKey, Size: owner.Size, PlacementID: owner.PlacementID,
		}
		if row, found := held[id]; found {
			w.Locked, w.Incarnation = true, row.Incarnation
			// A sandbox that was gone and is recorded was started again, wherever that was.
			if row.NodeID != a.Node || row.State == sandbox.Gone {
				w.Incarnation++
			}
			if row.State != sandbox.Gone {
				w.inherit(row)
			}
		}
		want = append(want, w)
	}
	return want
}

// inherit keeps what only the row knows.
func (w *binding) inherit(row *Held) {
	if w.Tenant == "" {
		w.Tenant = row.TenantID
	}
	if w.SpreadKey == "" {
		w.SpreadKey = row.SpreadKey
	}
	if w.Size == (sandbox.Size{}) {
		w.Size = sandbox.Size{CPUMillis: row.CPUMillis, MemoryBytes: row.MemoryBytes}
	}
	if w.PlacementID == 0 && row.PlacementID != nil {
		w.PlacementID = *row.PlacementID
	}
}

// fillInBindingsSQL completes rows that a roster bound before they were recorded. Where that gives a row
// its tenant, gateways must see it, for they answer nobody else: the revision grows, with its F. All else
// leaves the route and its revision as they are.
const fillInBindingsSQL = `
WITH    filled AS (
        UPDATE bindings AS b
        SET    tenant_id = CASE WHEN b.tenant_id = '' THEN @tenant ELSE b.tenant_id END,
               revision = CASE WHEN b.tenant_id = '' AND @tenant <> '' THEN GREATEST(b.revision + 1, nextval('revisions')) ELSE b.revision END,
               spread_key = CASE WHEN b.spread_key = '' THEN @spread_key ELSE b.spread_key END,
               cpu_millis = CASE WHEN b.cpu_millis = 0 THEN @cpu_millis ELSE b.cpu_millis END,
               memory_bytes = CASE WHEN b.memory_bytes = 0 THEN @memory_bytes ELSE b.memory_bytes END,
               placement_id = COALESCE(b.placement_id, nullif(@placement::bigint, 0))
        FROM   unnest(@ids::text[], @revisions::bigint[]) AS held (id, revision)
        WHERE  b.sandbox_id = held.id
        AND    (b.tenant_id = '' AND @tenant::text <> '' OR b.spread_key = '' AND @spread_key::text <> ''
               OR b.cpu_millis = 0 AND @cpu_millis::bigint <> 0 OR b.memory_bytes = 0 AND @memory_bytes::bigint <> 0
               OR b.placement_id IS NULL AND @placement <> 0)
        RETURNING b.sandbox_id, b.state, b.cluster_id, b.node_id, b.revision, b.incarnation, b.tenant_id, b.revision <> held.revision AS seen),
        fed AS (
        INSERT INTO route_feed (kind, key, revision, state, cluster_id, node_id, incarnation, tenant_id)
        SELECT 'binding', sandbox_id, revision, state, cluster_id, node_id, incarnation, tenant_id
        FROM   filled
        WHERE  seen)
SELECT  sandbox_id, revision, incarnation
FROM    filled
WHERE   seen`

// fillIn completes the rows that are here, which the caller has locked, and returns those whose revision
// grew.
func fillIn(ctx context.Context, tx pgx.Tx, held map[sandbox.ID]*Held, here map[sandbox.ID]bool, owner placement.Owner) ([]Assigned, error) {
	if len(here) == 0 {
		return nil, nil
	}
	ids, revisions := make([]sandbox.ID, 0, len(here)), make([]int64, 0, len(here))
	for id := range here {
		ids, revisions = append(ids, id), append(revisions, int64(held[id].Revision))
	}
	rows, err := tx.Query(ctx, fillInBindingsSQL, pgx.StrictNamedArgs{
		"ids": ids, "revisions": revisions, "tenant": owner.Tenant, "spread_key": owner.SpreadKey,
		"cpu_millis": owner.Size.CPUMillis, "memory_bytes": owner.Size.MemoryBytes, "placement": owner.PlacementID,
	})
	if err != nil {
		return nil, fmt.Errorf("fill in %d bindings: %w", len(ids), err)
	}
	filled, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Assigned])
	if err != nil {
		return nil, fmt.Errorf("fill in %d bindings: %w", len(ids), err)
	}
	return filled, nil
}

// answer has the bindings in the order in which they were asked for.
func (a Assignment) answer(held map[sandbox.ID]*Held, bound map[sandbox.ID]Assigned) []Assigned {
	assigned := make([]Assigned, len(a.Sandboxes))
	for i, id := range a.Sandboxes {
		if now, found := bound[id]; found {
			assigned[i] = now
			continue
		}
		assigned[i] = Assigned{Sandbox: id, Revision: held[id].Revision, Incarnation: held[id].Incarnation}
	}
	return assigned
}
