package bindings

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/placement"
)

const (
	// recordBatch is how many assignments share a commit at most.
	recordBatch = 64

	// recordsAtOnce lets one transaction be prepared while another one waits for its flush.
	recordsAtOnce = 2

	// recordLimit ends a transaction that hangs, a little before the role's statement timeout.
	recordLimit = 4 * time.Second
)

// recording is one assignment of a transaction, and what becomes of it.
type recording struct {
	a    Assignment
	left func() error // non-nil where the caller may leave before the commit
	room bool         // the transaction holds advisory.Node of its node, and has no other assignment

	cluster string
	here    map[sandbox.ID]bool
	owner   placement.Owner
	raced   bool

	err      error // refused: nothing is written for it
	assigned []Assigned
	fed      bool // gateways have something to read
}

// RecordLoop records what Record brings until ctx ends, a transaction or two at a time: more would only
// wait for each other. Who meets something in its way (a lock, a row that appeared, a
// reservation that has ended) leaves the batch and goes alone, in its own goroutine.
func (b *Bindings) RecordLoop(ctx context.Context) error {
	var servers errgroup.Group
	for range recordsAtOnce {
		servers.Go(func() error { return b.records.serve(ctx, b.recordTogether) })
	}
	return servers.Wait()
}

type recordCaller = caller[Assignment, []Assigned]

// recordKeys are what two assignments of one transaction must not share.
func recordKeys(a Assignment) []string {
	keys := make([]string, 0, len(a.Sandboxes)+1)
	for _, id := range a.Sandboxes {
		keys = append(keys, string(id))
	}
	if a.ReservationID != "" {
		keys = append(keys, "reservation "+a.ReservationID) // no sandbox id has a space
	}
	return keys
}

func (b *Bindings) recordTogether(ctx context.Context, batch []*recordCaller) {
	ctx, cancel := context.WithTimeout(ctx, recordLimit)
	defer cancel()
	for len(batch) > 0 {
		b.sizes.records.Observe(float64(len(batch)))
		all := make([]*recording, len(batch))
		for i, c := range batch {
			all[i] = &recording{a: c.asked, left: c.ctx.Err} //nolint:contextcheck // the caller's own context, not the batch's
		}
		err := b.recordOnce(ctx, all)
		if err != nil && !errors.Is(err, ErrRaced) {
			for _, c := range batch {
				c.answer(nil, ofBatch(err))
			}
			return
		}
		batch = b.tell(batch, all, err == nil)
	}
}

// tell answers the callers that were decided, and returns those that go again because a row of another
// one appeared: nothing was committed.
func (b *Bindings) tell(batch []*recordCaller, all []*recording, committed bool) []*recordCaller {
	var again []*recordCaller
	fed := false
	for i, c := range batch {
		switch r := all[i]; {
		case r.raced || errors.Is(r.err, placement.ErrAlone) || errors.Is(r.err, errAlone):
			c.answer(nil, errAlone)
		case r.err != nil:
			c.answer(nil, r.err)
		case !committed:
			again = append(again, c)
		default:
			fed = fed || r.fed
			c.answer(r.assigned, nil)
		}
	}
	if fed {
		b.bell.Ring()
	}
	return again
}

// ofBatch is what a caller hears of a transaction that failed: to go alone, for what another one brought
// must not fail it, and what was committed is found again; but where the store has no time for one
// transaction, it has none for sixty-four.
func ofBatch(err error) error {
	switch pgdb.Code(err) {
	case "55P03", "40P01", "40001":
		return errAlone
	case "":
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, pgdb.ErrPoolWait) {
			return err
		}
		return errAlone
	}
	if pgdb.Unavailable(err) {
		return err
	}
	return errAlone
}

// limitRecordWaitSQL keeps one row that is locked for long from holding up a batch.
const limitRecordWaitSQL = `SELECT set_config('lock_timeout', '100ms', true)`

// recordOnce is one transaction of several assignments.
func (b *Bindings) recordOnce(ctx context.Context, all []*recording) error {
	conn, err := b.db.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release() // closes the connection if it is still in a transaction
	return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, limitRecordWaitSQL); err != nil {
			return fmt.Errorf("limit the waits of a batch: %w", err)
		}
		if err := tryLocks(ctx, tx, all); err != nil {
			return err
		}
		return recordAll(ctx, tx, b.cfg.Limits, all)
	})
}

// tryLockSandboxesSQL has the try in the select list over a ready list: in a WHERE it could lock rows
// that are then thrown away.
const tryLockSandboxesSQL = `
SELECT  id, pg_try_advisory_xact_lock(lock_key(@class::int, id)) AS held
FROM    unnest(@ids::text[]) AS id`

// tryLocks takes the locks of all sandboxes; an assignment that does not get one of its own goes alone,
// and waits there.
func tryLocks(ctx context.Context, tx pgx.Tx, all []*recording) error {
	ids := sandboxesOf(all)
	rows, err := tx.Query(ctx, tryLockSandboxesSQL, pgx.StrictNamedArgs{"class": int32(advisory.Sandbox("").Class), "ids": ids})
	if err != nil {
		return fmt.Errorf("try the locks of %d sandboxes: %w", len(ids), err)
	}
	type try struct {
		ID   sandbox.ID
		Held bool
	}
	tries, err := pgx.CollectRows(rows, pgx.RowToStructByName[try])
	if err != nil {
		return fmt.Errorf("try the locks of %d sandboxes: %w", len(ids), err)
	}
	busy := map[sandbox.ID]bool{}
	for _, t := range tries {
		busy[t.ID] = !t.Held
	}
	for _, r := range all {
		if slices.ContainsFunc(r.a.Sandboxes, func(id sandbox.ID) bool { return busy[id] }) {
			r.err = errAlone
		}
	}
	return nil
}

// sandboxesOf returns the ids of the assignments that are not refused.
func sandboxesOf(all []*recording) []sandbox.ID {
	var ids []sandbox.ID
	for _, r := range all {
		if r.err == nil {
			ids = append(ids, r.a.Sandboxes...)
		}
	}
	return ids
}

// recordAll records assignments that share no sandbox and no reservation, whose locks tx holds. What
// concerns one only is in its err, and nothing is written for it. ErrRaced marks those that raced; the
// transaction must end, for it has written by then.
func recordAll(ctx context.Context, tx pgx.Tx, limits placement.Limits, all []*recording) error {
	if err := findNodes(ctx, tx, all); err != nil {
		return err
	}
	held, err := lockHeld(ctx, tx, sandboxesOf(all))
	if err != nil {
		return err
	}
	for _, r := range all {
		if r.err == nil {
			r.here, r.err = r.a.against(held)
		}
	}
	if err := confirmAll(ctx, tx, limits, all); err != nil {
		return err
	}
	var want []binding
	for _, r := range all {
		if r.err == nil {
			want = append(want, r.a.bindings(r.cluster, held, r.here, r.owner)...)
		}
	}
	bound, err := bindAll(ctx, tx, want)
	if err != nil {
		return err
	}
	if len(bound) < len(want) {
		for _, r := range all {
			r.raced = r.err == nil && slices.ContainsFunc(r.a.Sandboxes, func(id sandbox.ID) bool {
				_, found := bound[id]
				return !found && !r.here[id]
			})
		}
		return fmt.Errorf("bind %d sandboxes: %w", len(want), ErrRaced)
	}
	// What was there is changed last: an insert may wait for others, and nobody waits who has changed a row.
	filled, err := fillIn(ctx, tx, held, all)
	if err != nil {
		return err
	}
	for _, now := range filled {
		bound[now.Sandbox] = now
	}
	for _, r := range all {
		if r.err == nil {
			r.assigned, r.fed = r.a.answer(held, bound)
		}
	}
	return nil
}

const selectPresentAtSQL = `
SELECT  asked.i, n.cluster_id
FROM    unnest(@numbers::bigint[], @nodes::text[], @endpoints::text[]) AS asked (i, node, endpoint)
JOIN    nodes AS n ON n.node_id = asked.node AND n.endpoint = asked.endpoint AND n.present`

// findNodes finds the cluster of each node, and refuses what does not name a present one and its endpoint.
func findNodes(ctx context.Context, tx pgx.Tx, all []*recording) error {
	numbers, nodes, endpoints := make([]int64, len(all)), make([]node.ID, len(all)), make([]string, len(all))
	for i, r := range all {
		numbers[i], nodes[i], endpoints[i] = int64(i), r.a.Node, r.a.Endpoint
	}
	rows, err := tx.Query(ctx, selectPresentAtSQL, pgx.StrictNamedArgs{"numbers": numbers, "nodes": nodes, "endpoints": endpoints})
	if err != nil {
		return fmt.Errorf("read %d nodes: %w", len(all), err)
	}
	type present struct {
		I         int64
		ClusterID string
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[present])
	if err != nil {
		return fmt.Errorf("read %d nodes: %w", len(all), err)
	}
	found := make([]bool, len(all))
	for _, p := range list {
		all[p.I].cluster, found[p.I] = p.ClusterID, true
	}
	for i, r := range all {
		if r.err == nil && !found[i] {
			r.err = node.ErrNotListed
		}
	}
	return nil
}

// confirmAll confirms the holds of what is not refused, but of callers that have left.
func confirmAll(ctx context.Context, tx pgx.Tx, limits placement.Limits, all []*recording) error {
	var (
		asked []*recording
		cs    []placement.Confirmation
	)
	for _, r := range all {
		if r.err != nil {
			continue
		}
		asked = append(asked, r)
		cs = append(cs, placement.Confirmation{
			Sandbox: r.a.Sandboxes, Node: r.a.Node, ReservationID: r.a.ReservationID, PlacementID: r.a.PlacementID,
			Tenant: r.a.Tenant, Size: r.a.Size, AlreadyBoundHere: r.here, SealedAnswer: r.a.SealedAnswer,
			Alone: r.room, Limits: limits,
		})
	}
	if len(cs) == 0 {
		return nil
	}
	results, write, err := placement.ConfirmAll(ctx, tx, cs)
	if err != nil {
		return err
	}
	skip := make([]bool, len(asked))
	for i, r := range asked {
		r.owner, r.err = results[i].Owner, results[i].Err
		if r.err == nil && r.left != nil {
			r.err = r.left() // nothing is written yet
		}
		skip[i] = r.err != nil
	}
	return write(ctx, skip)
}

// fillInBindingsSQL completes rows that a roster bound before they were recorded. Where that gives a row
// its tenant, gateways must see it, for they answer nobody else: the revision grows, with its F. All else
// leaves the route and its revision as they are.
const fillInBindingsSQL = `
WITH    filled AS (
        UPDATE bindings AS b
        SET    tenant_id = CASE WHEN b.tenant_id = '' THEN said.tenant ELSE b.tenant_id END,
               revision = CASE WHEN b.tenant_id = '' AND said.tenant <> '' THEN GREATEST(b.revision + 1, nextval('revisions')) ELSE b.revision END,
               spread_key = CASE WHEN b.spread_key = '' THEN said.spread_key ELSE b.spread_key END,
               cpu_millis = CASE WHEN b.cpu_millis = 0 THEN said.cpu_millis ELSE b.cpu_millis END,
               memory_bytes = CASE WHEN b.memory_bytes = 0 THEN said.memory_bytes ELSE b.memory_bytes END,
               placement_id = COALESCE(b.placement_id, nullif(said.placement, 0))
        FROM   unnest(@ids::text[], @revisions::bigint[], @tenants::text[], @spread_keys::text[], @cpus::bigint[], @memories::bigint[],
                      @placements::bigint[]) AS said (id, revision, tenant, spread_key, cpu_millis, memory_bytes, placement)
        WHERE  b.sandbox_id = said.id
        RETURNING b.sandbox_id, b.state, b.cluster_id, b.node_id, b.revision, b.incarnation, b.tenant_id, b.revision <> said.revision AS seen),
        fed AS (
        INSERT INTO route_feed (kind, key, revision, state, cluster_id, node_id, incarnation, tenant_id)
        SELECT 'binding', sandbox_id, revision, state, cluster_id, node_id, incarnation, tenant_id
        FROM   filled
        WHERE  seen)
SELECT  sandbox_id, revision, incarnation
FROM    filled
WHERE   seen`

// fillIn completes the rows that are here already and lack something, which tx has locked, and returns
// those whose revision grew.
func fillIn(ctx context.Context, tx pgx.Tx, held map[sandbox.ID]*Held, all []*recording) ([]Assigned, error) {
	var (
		ids                                   []sandbox.ID
		revisions, cpus, memories, placements []int64
		tenants, spreadKeys                   []string
	)
	for _, r := range all {
		if r.err != nil {
			continue
		}
		for id := range r.here {
			if !held[id].lacks(r.owner) {
				continue
			}
			ids, revisions = append(ids, id), append(revisions, int64(held[id].Revision))
			tenants, spreadKeys = append(tenants, r.owner.Tenant), append(spreadKeys, r.owner.SpreadKey)
			cpus, memories = append(cpus, r.owner.Size.CPUMillis), append(memories, r.owner.Size.MemoryBytes)
			placements = append(placements, r.owner.PlacementID)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	rows, err := tx.Query(ctx, fillInBindingsSQL, pgx.StrictNamedArgs{
		"ids": ids, "revisions": revisions, "tenants": tenants, "spread_keys": spreadKeys,
		"cpus": cpus, "memories": memories, "placements": placements,
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

// lacks reports whether owner knows something that the row does not.
func (h *Held) lacks(owner placement.Owner) bool {
	return h.TenantID == "" && owner.Tenant != "" || h.SpreadKey == "" && owner.SpreadKey != "" ||
		h.CPUMillis == 0 && owner.Size.CPUMillis != 0 || h.MemoryBytes == 0 && owner.Size.MemoryBytes != 0 ||
		h.PlacementID == nil && owner.PlacementID != 0
}
