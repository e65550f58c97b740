package bindings

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// Kind says what happened.
type Kind string

// What nodes tell, as scheduler.v1 names it.
const (
	KindCreate Kind = "create"
	KindDelete Kind = "delete"
	KindPause  Kind = "pause"
	KindResume Kind = "resume"
	KindFork   Kind = "fork" // of the child

	// KindUnknown is counted for what is none of these; it is never stored.
	KindUnknown Kind = "unknown"
)

// What the scheduler did to a binding. Effect says why, where there is more than one reason.
const (
	KindAdopted Kind = "adopted" // a roster brought a sandbox that nobody had recorded
	KindMoved   Kind = "moved"   // a roster took a sandbox over that was parked or whose node is dead
	KindRevived Kind = "revived" // a roster brought back what was gone
	KindParked  Kind = "parked"
	KindGone    Kind = "gone"
	KindOrphan  Kind = "orphan" // a roster lists what may not be bound there; told once
)

// What happened to a node.
const (
	KindUnhealthy    Kind = "node_unhealthy"
	KindWell         Kind = "node_well"
	KindConflict     Kind = "node_conflict" // two live claimants of one id; once a minute
	KindUnregistered Kind = "node_unregistered"
	KindRegistered   Kind = "node_registered"
	KindRemoved      Kind = "node_removed"
	KindCordoned     Kind = "node_cordoned"
	KindUncordoned   Kind = "node_uncordoned"
	KindDrain        Kind = "node_drain" // Effect is the drain's state, of which there is one event each
)

// Effect says what came of a node's event, or why the scheduler did something.
type Effect string

// What came of a node's event.
const (
	EffectBound    Effect = "bound"          // the sandbox is bound here now
	EffectAlready  Effect = "already"        // it was bound here
	EffectEnded    Effect = "ended"          // its binding is gone
	EffectNoted    Effect = "noted"          // its binding stays
	EffectOrphan   Effect = "orphan"         // another node that is alive has it
	EffectDeleted  Effect = "deleted"        // it was deleted: the next roster that lists it makes it an orphan
	EffectIgnored  Effect = "ignored"        // about a sandbox that is not bound here
	EffectStale    Effect = "stale_instance" // the instance does not hold the node's lease
	EffectRepeated Effect = "repeated"       // its seq is not above the last one

	// These are counted, not stored.
	EffectUnknownNode Effect = "unknown_node"
	EffectMalformed   Effect = "malformed"
)

// Event is one line of the log.
type Event struct {
	Kind     Kind
	Effect   Effect       // "": nothing to add
	Told     bool         // by the node; else the scheduler did it
	Cluster  string       // "": its node's
	Node     node.ID      // "": of no node
	Instance string       // "": not told
	Sandbox  sandbox.ID   // "": of a node
	Size     sandbox.Size // stored where Told is set
	Disk     int64        // bytes, likewise
	Detail   map[string]any
}

const insertEventsSQL = `
INSERT  INTO sandbox_events (source, kind, effect, cluster_id, node_id, service_instance_id, sandbox_id, cpu_millis,
        memory_bytes, disk_bytes, detail)
SELECT  source, kind, effect,
        CASE WHEN cluster = '' THEN COALESCE((SELECT n.cluster_id FROM nodes AS n WHERE n.node_id = told.node), '') ELSE cluster END,
        node, instance, sandbox, cpu, memory, disk, nullif(detail, '')::jsonb
FROM    unnest(@sources::text[], @kinds::text[], @effects::text[], @clusters::text[], @nodes::text[], @instances::text[],
               @sandboxes::text[], @cpus::bigint[], @memories::bigint[], @disks::bigint[], @details::text[])
        WITH ORDINALITY AS told (source, kind, effect, cluster, node, instance, sandbox, cpu, memory, disk, detail, place)
ORDER   BY place`

// Note writes events into the log, in this order, in the transaction of what they tell of. What is
// written cannot be changed. After the commit the caller counts them with Count.
func Note(ctx context.Context, tx pgx.Tx, events ...Event) error {
	for some := range slices.Chunk(events, rowsAtOnce) {
		if err := note(ctx, tx, some); err != nil {
			return err
		}
	}
	return nil
}

func note(ctx context.Context, tx pgx.Tx, events []Event) error {
	details := make([]string, len(events))
	for i, e := range events {
		if len(e.Detail) == 0 {
			continue
		}
		text, err := json.Marshal(e.Detail)
		if err != nil {
			return fmt.Errorf("note %s: %w", e.Kind, err)
		}
		details[i] = string(text)
	}
	told := func(number func(Event) int64) []*int64 {
		return fields(events, func(e Event) *int64 {
			if !e.Told {
				return nil
			}
			return new(number(e))
		})
	}
	_, err := tx.Exec(ctx, insertEventsSQL, pgx.StrictNamedArgs{
		"sources": fields(events, Event.source), "kinds": fields(events, func(e Event) string { return string(e.Kind) }),
		"effects":   fields(events, func(e Event) string { return string(e.Effect) }),
		"clusters":  fields(events, func(e Event) string { return e.Cluster }),
		"nodes":     fields(events, func(e Event) string { return string(e.Node) }),
		"instances": fields(events, func(e Event) string { return e.Instance }),
		"sandboxes": fields(events, func(e Event) string { return string(e.Sandbox) }),
		"cpus":      told(func(e Event) int64 { return e.Size.CPUMillis }),
		"memories":  told(func(e Event) int64 { return e.Size.MemoryBytes }),
		"disks":     told(func(e Event) int64 { return e.Disk }),
		"details":   details,
	})
	if err != nil {
		return fmt.Errorf("note %d events: %w", len(events), err)
	}
	return nil
}

func (e Event) source() string {
	if e.Told {
		return "node"
	}
	return "scheduler"
}

func fields[T any](events []Event, of func(Event) T) []T {
	values := make([]T, len(events))
	for i, e := range events {
		values[i] = of(e)
	}
	return values
}

const selectNotedLatelySQL = `
SELECT  EXISTS (
        SELECT 1
        FROM   sandbox_events
        WHERE  node_id = @node AND kind = @kind AND at > clock_timestamp() - @pause::interval)`

// NoteSeldom writes e, an event of a node, in a transaction of its own, unless the log has one of its kind
// and node that is younger than pause, whichever replica wrote it.
func (b *Bindings) NoteSeldom(ctx context.Context, e Event, pause time.Duration) error {
	noted := false
	err := b.db.Tx(ctx, func(tx pgx.Tx) error {
		noted = false
		// Who has the lock is writing the same.
		mine, err := pgdb.TryLock(ctx, tx, advisory.Loop(string(e.Kind)+" of "+string(e.Node)))
		if err != nil || !mine {
			return err
		}
		var lately bool
		err = tx.QueryRow(ctx, selectNotedLatelySQL, pgx.StrictNamedArgs{"node": e.Node, "kind": string(e.Kind), "pause": pause}).Scan(&lately)
		if err != nil || lately {
			return err
		}
		noted = true
		return Note(ctx, tx, e)
	})
	if err != nil {
		return fmt.Errorf("note %s of %s: %w", e.Kind, e.Node, err)
	}
	if noted {
		b.Count(e)
	}
	return nil
}

// Count shows events in events_total, after the commit of what they tell of.
func (b *Bindings) Count(events ...Event) {
	for _, e := range events {
		b.CountMany(e.Kind, e.Effect, 1)
	}
}

// CountMany shows count events of one sort.
func (b *Bindings) CountMany(kind Kind, effect Effect, count int) {
	if count > 0 {
		b.metrics.events.WithLabelValues(string(kind), string(effect)).Add(float64(count))
	}
}
