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
	parkEvery = 5 * time.Second
	passBatch = 500

	loopPark = "park"

	// silence is how long no heartbeat at all may have been committed: then the database or the network
	// was away, not the nodes.
	silence = 10 * time.Second
)

// flow watches whether heartbeats arrive, on the database's clock: after an outage every lease looks
// expired, and nobody is judged until all nodes had the time to speak. The zero flow has just started.
type flow struct {
	since time.Time // heartbeats have flowed from then on; zero: they do not
	asked time.Time // when it was asked last

	well map[node.ID]bool // what was seen of each node in the last pass; nil: nothing yet
}

// judges reports whether nodes may be judged at asOf, when the last heartbeat of any node was committed
// at last and a lease lasts ttl. A gap between the questions is a silence too: passes failed, and the
// first heartbeat after an outage must not hide it.
func (f *flow) judges(asOf, last time.Time, ttl time.Duration) bool {
	unseen := !f.asked.IsZero() && asOf.Sub(f.asked) > silence
	f.asked = asOf
	if unseen {
		f.since = time.Time{}
	}
	if asOf.Sub(last) > silence {
		f.since = time.Time{}
		return false
	}
	if f.since.IsZero() {
		f.since = asOf
	}
	return asOf.Sub(f.since) >= ttl
}

// ParkLoop notes which nodes became unhealthy or well, parks what is bound to nodes that left, and forgets
// what was parked too long, until ctx ends.
func (b *Bindings) ParkLoop(ctx context.Context) error {
	var f flow
	return b.db.Loop(ctx, loopPark, parkEvery, b.store.Pass(loopPark, func(ctx context.Context) error { return b.park(ctx, &f) }), b.log)
}

const readFlowSQL = `
SELECT  clock_timestamp(), max(last_seen_at)
FROM    node_leases`

func (b *Bindings) park(ctx context.Context, f *flow) error {
	var (
		asOf time.Time
		last *time.Time // nil: no node was ever heard
	)
	if err := b.db.QueryRow(ctx, readFlowSQL).Scan(&asOf, &last); err != nil {
		return fmt.Errorf("read when nodes were heard: %w", err)
	}
	if last == nil || !f.judges(asOf, *last, b.cfg.LeaseTTL) {
		return nil
	}
	if f.well == nil {
		f.well = map[node.ID]bool{}
	}
	return errors.Join(b.noteHealth(ctx, f.well), b.parkLost(ctx), b.forgetParked(ctx))
}

// selectLostSQL returns nodes that left: they unregistered, or no source lists them and they have been
// silent. @node is ” for all of them.
const selectLostSQL = `
SELECT  n.node_id, CASE WHEN l.ended_at IS NOT NULL THEN 'unregistered' ELSE 'node_gone' END AS ended_by
FROM    nodes AS n
LEFT JOIN node_leases AS l ON l.node_id = n.node_id
WHERE   (@node::text = '' OR n.node_id = @node)
AND     (l.ended_at IS NOT NULL
        OR NOT n.present AND n.gone_at < clock_timestamp() - @lost::interval
           AND (l.node_id IS NULL OR l.expires_at < clock_timestamp() - @lost::interval))
AND     EXISTS (SELECT 1 FROM bindings AS b
                WHERE b.node_id = n.node_id AND b.state = 'bound' AND b.bound_at < clock_timestamp() - @grace::interval)
ORDER   BY n.node_id`

type lostNode struct {
	NodeID  node.ID
	EndedBy sandbox.Ending
}

type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

func (b *Bindings) lost(ctx context.Context, q querier, n node.ID) ([]lostNode, error) {
	rows, err := q.Query(ctx, selectLostSQL, pgx.StrictNamedArgs{"node": n, "lost": b.cfg.LostGrace, "grace": b.cfg.Grace})
	if err != nil {
		return nil, fmt.Errorf("read nodes that left: %w", err)
	}
	nodes, err := pgx.CollectRows(rows, pgx.RowToStructByPos[lostNode])
	if err != nil {
		return nil, fmt.Errorf("read nodes that left: %w", err)
	}
	return nodes, nil
}

func (b *Bindings) parkLost(ctx context.Context) error {
	nodes, err := b.lost(ctx, b.db, "")
	if err != nil {
		return err
	}
	var failed []error
	for _, n := range nodes {
		if err := b.parkOne(ctx, n); err != nil {
			failed = append(failed, err) // one node's trouble keeps no other's sandboxes where nobody can have them
		}
	}
	return errors.Join(failed...)
}

func (b *Bindings) parkOne(ctx context.Context, n lostNode) error {
	for parked := passBatch; parked == passBatch; {
		var err error
		if parked, err = b.parkSome(ctx, n.NodeID); err != nil {
			return fmt.Errorf("park what is bound to %s: %w", n.NodeID, err)
		}
		if parked > 0 {
			b.bell.Ring()
			b.CountMany(KindParked, Effect(n.EndedBy), parked)
			b.log.InfoContext(ctx, "bindings parked", slog.Any("node", n.NodeID),
				slog.Any("ended_by", n.EndedBy), slog.Int("count", parked))
		}
	}
	return nil
}

const lockNodesBoundSQL = `
SELECT  sandbox_id
FROM    bindings
WHERE   node_id = @node AND state = 'bound' AND bound_at < now() - @grace::interval
ORDER   BY sandbox_id
LIMIT   @most::bigint
FOR     UPDATE SKIP LOCKED`

// parkSome parks some of what is bound to n, if n still counts as having left once its lock is held: a
// node that comes back takes the same lock first. It returns how many.
func (b *Bindings) parkSome(ctx context.Context, n node.ID) (parked int, err error) {
	err = b.db.Tx(ctx, func(tx pgx.Tx) error {
		parked = 0
		for _, key := range []pgdb.Key{advisory.Node(n), advisory.Loop(loopPark)} {
			if mine, err := pgdb.TryLock(ctx, tx, key); err != nil || !mine {
				return err
			}
		}
		still, err := b.lost(ctx, tx, n)
		if err != nil || len(still) == 0 {
			return err
		}
		rows, err := tx.Query(ctx, lockNodesBoundSQL, pgx.StrictNamedArgs{"node": n, "grace": b.cfg.Grace, "most": passBatch})
		if err != nil {
			return fmt.Errorf("lock bindings of %s: %w", n, err)
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[sandbox.ID])
		if err != nil {
			return fmt.Errorf("lock bindings of %s: %w", n, err)
		}
		if err := placement.DropHolds(ctx, tx, ids); err != nil {
			return err
		}
		moved, err := end(ctx, tx, ids, sandbox.Parked, still[0].EndedBy)
		if err != nil {
			return err
		}
		parked = len(moved)
		return Note(ctx, tx, parkings(n, still[0].EndedBy, moved)...)
	})
	return parked, err
}

// lockParkedTooLongSQL spares what a drain parked while its node lives and is still cordoned: the sandbox is
// there, and comes back with the node.
const lockParkedTooLongSQL = `
SELECT  b.sandbox_id, b.node_id
FROM    bindings AS b
WHERE   b.state <> 'bound' AND b.state = 'parked' AND b.ended_at < now() - @ttl::interval
AND     NOT (b.ended_by = 'drain' AND EXISTS (
        SELECT 1 FROM nodes AS n JOIN node_leases AS l ON l.node_id = n.node_id
        WHERE  n.node_id = b.node_id AND n.cordoned AND l.ended_at IS NULL AND l.expires_at > clock_timestamp() - @ttl::interval))
ORDER   BY b.sandbox_id
LIMIT   @most::bigint
FOR     UPDATE OF b SKIP LOCKED`

func (b *Bindings) forgetParked(ctx context.Context) error {
	for gone := passBatch; gone == passBatch; {
		err := b.db.Tx(ctx, func(tx pgx.Tx) error {
			gone = 0
			if mine, err := pgdb.TryLock(ctx, tx, advisory.Loop(loopPark)); err != nil || !mine {
				return err
			}
			rows, err := tx.Query(ctx, lockParkedTooLongSQL, pgx.StrictNamedArgs{"ttl": b.cfg.ParkedTTL, "most": passBatch})
			if err != nil {
				return fmt.Errorf("lock parked bindings: %w", err)
			}
			type parked struct {
				SandboxID sandbox.ID
				NodeID    node.ID
			}
			list, err := pgx.CollectRows(rows, pgx.RowToStructByName[parked])
			if err != nil {
				return fmt.Errorf("lock parked bindings: %w", err)
			}
			ids, events := make([]sandbox.ID, len(list)), make([]Event, len(list))
			for i, p := range list {
				ids[i] = p.SandboxID
				events[i] = Event{Kind: KindGone, Effect: Effect(sandbox.EndedByNodeGone), Node: p.NodeID, Sandbox: p.SandboxID}
			}
			moved, err := end(ctx, tx, ids, sandbox.Gone, sandbox.EndedByNodeGone)
			if err != nil {
				return err
			}
			gone = len(moved)
			return Note(ctx, tx, events...)
		})
		if err != nil {
			return err
		}
		if gone > 0 {
			b.bell.Ring()
			b.CountMany(KindGone, Effect(sandbox.EndedByNodeGone), gone)
			b.log.InfoContext(ctx, "parked bindings are gone", slog.Int("count", gone))
		}
	}
	return nil
}

const lockBoundSQL = `
SELECT  sandbox_id
FROM    bindings
WHERE   node_id = @node AND state = 'bound'
ORDER   BY sandbox_id
LIMIT   @most::bigint
FOR     UPDATE`

// ParkNode parks what is bound to n, which unregisters, ends every hold of n, and returns how many it
// parked: the feed was written where there are any. Of very many, what a caller would not wait for is left
// to ParkLoop. It joins the caller's transaction, which holds
// advisory.Node of n and waits for nothing after it.
func ParkNode(ctx context.Context, tx pgx.Tx, n node.ID) (parked int, err error) {
	return parkBound(ctx, tx, n, sandbox.EndedByUnregister, ChangesAtOnce)
}

func parkBound(ctx context.Context, tx pgx.Tx, n node.ID, by sandbox.Ending, most int) (parked int, err error) {
	rows, err := tx.Query(ctx, lockBoundSQL, pgx.StrictNamedArgs{"node": n, "most": most})
	if err != nil {
		return 0, fmt.Errorf("lock bindings of %s: %w", n, err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[sandbox.ID])
	if err != nil {
		return 0, fmt.Errorf("lock bindings of %s: %w", n, err)
	}
	if err := placement.ReleaseNode(ctx, tx, n); err != nil {
		return 0, err
	}
	moved, err := end(ctx, tx, ids, sandbox.Parked, by)
	if err != nil {
		return 0, err
	}
	return len(moved), Note(ctx, tx, parkings(n, by, moved)...)
}

func parkings(n node.ID, by sandbox.Ending, moved []Assigned) []Event {
	events := make([]Event, len(moved))
	for i, m := range moved {
		events[i] = Event{Kind: KindParked, Effect: Effect(by), Node: n, Sandbox: m.Sandbox}
	}
	return events
}
