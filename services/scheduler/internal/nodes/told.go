package nodes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
)

// toldBatch bounds the events of one transaction, and with them its locks and how long it has them.
const toldBatch = 200

// Telling is what a node tells of its sandboxes between two rosters.
type Telling struct {
	Node     node.ID // "": no node can have the id that was sent
	Instance string  // "": none can hold a lease
	Events   []bindings.Told

	// Malformed counts the events that were left out, by kind.
	Malformed map[bindings.Kind]int
}

// Tell makes the bindings follow what a node tells, in order, and writes it into the log: each event once,
// in the commit of what it changed. Events do not act whose instance does not hold the node's lease, or whose
// seq is not above the last one's; they are in the log with that effect. Those of unknown nodes are counted
// only. It may repeat, in any order and to any replica: events are a shortcut, and the next roster is the truth.
// It refuses nothing, so an error is the store's or the caller's end.
func (n *Nodes) Tell(ctx context.Context, t Telling) error {
	for kind, count := range t.Malformed {
		n.routes.CountMany(kind, bindings.EffectMalformed, count)
	}
	if len(t.Malformed) > 0 && n.odd.first(t.Node) {
		n.log.WarnContext(ctx, "a node tells what is no event", slog.Any("node", t.Node), slog.Any("malformed", t.Malformed))
	}
	if t.Node == "" {
		n.unknown(t.Events)
		return nil
	}
	for events := range slices.Chunk(t.Events, toldBatch) {
		if err := n.tell(ctx, t, events); err != nil {
			return fmt.Errorf("events of %s: %w", t.Node, err)
		}
	}
	return nil
}

func (n *Nodes) unknown(events []bindings.Told) {
	for _, e := range events {
		n.routes.CountMany(e.Kind, bindings.EffectUnknownNode, 1)
	}
}

// tell takes a part of a telling that is one transaction.
func (n *Nodes) tell(ctx context.Context, t Telling, events []bindings.Told) error {
	select {
	case n.telling <- struct{}{}:
		defer func() { <-n.telling }()
	case <-ctx.Done():
		return ctx.Err()
	}
	var (
		heard bindings.Heard
		known bool
	)
	for races := 0; ; races++ {
		err := n.db.Tx(ctx, func(tx pgx.Tx) (err error) {
			heard, known, err = n.tellOnce(ctx, tx, t, events)
			return err
		})
		if errors.Is(err, bindings.ErrRaced) && races < maxRaces {
			continue
		}
		if err != nil {
			n.store.Failed("events", err)
			return err
		}
		break
	}
	if !known {
		n.unknown(events)
		return nil
	}
	n.routes.Listened(heard)
	return nil
}

const selectToldNodeSQL = `
SELECT  cluster_id, cordoned
FROM    nodes
WHERE   node_id = @node`

const raiseEventSeqSQL = `
UPDATE  node_leases
SET     event_seq = @seq
WHERE   node_id = @node AND event_seq < @seq`

func (n *Nodes) tellOnce(ctx context.Context, tx pgx.Tx, t Telling, events []bindings.Told) (heard bindings.Heard, known bool, err error) {
	// Nobody records one of these meanwhile, and the lease stays whose it is; a roster waits for it.
	err = n.store.Lock("sandbox", func() error { return pgdb.Lock(ctx, tx, locksOf(events)...) })
	if err != nil {
		return heard, false, err
	}
	h := bindings.Hearing{Node: t.Node, Instance: t.Instance}
	err = tx.QueryRow(ctx, selectToldNodeSQL, pgx.StrictNamedArgs{"node": t.Node}).Scan(&h.Cluster, &h.Cordoned)
	if errors.Is(err, pgx.ErrNoRows) {
		return heard, false, nil
	}
	if err != nil {
		return heard, false, fmt.Errorf("read the node: %w", err)
	}
	held, err := lockLease(ctx, tx, t.Node)
	if err != nil {
		return heard, false, err
	}
	seq := int64(0)
	h.Told, seq = held.hear(t.Instance, events)
	if heard, err = n.routes.Hear(ctx, tx, h); err != nil {
		return heard, false, err
	}
	if seq > 0 {
		if _, err := tx.Exec(ctx, raiseEventSeqSQL, pgx.StrictNamedArgs{"node": t.Node, "seq": seq}); err != nil {
			return heard, false, fmt.Errorf("raise the event seq: %w", err)
		}
	}
	return heard, true, nil
}

func locksOf(events []bindings.Told) []pgdb.Key {
	ids := make([]sandbox.ID, len(events))
	for i, e := range events {
		ids[i] = e.Sandbox
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	keys := make([]pgdb.Key, len(ids))
	for i, id := range ids {
		keys[i] = advisory.Sandbox(id)
	}
	return keys
}

// hear returns events with the reason why an event does not act, and the highest seq among those that do; 0:
// none was told. l is nil where there is no lease.
func (l *lease) hear(instance string, events []bindings.Told) (told []bindings.Told, seq int64) {
	told = slices.Clone(events)
	holds := l != nil && l.Live && l.ServiceInstanceID == instance
	last := int64(0)
	if holds {
		last = l.EventSeq
	}
	for i := range told {
		switch {
		case !holds:
			told[i].Refused = bindings.EffectStale
		case told[i].Seq == 0:
		case told[i].Seq <= last:
			told[i].Refused = bindings.EffectRepeated
		default:
			last, seq = told[i].Seq, told[i].Seq
		}
	}
	return told, seq
}
