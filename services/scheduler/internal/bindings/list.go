package bindings

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// OrphanPage says which orphans to list, by node and sandbox. What is zero does not narrow.
type OrphanPage struct {
	Node   node.ID
	Reason OrphanReason
	Limit  int // from 1

	// The last orphan of the page before; zero: from the first.
	AfterNode    node.ID
	AfterSandbox sandbox.ID
}

// Orphan is a sandbox that a node's roster lists and that may not be bound there.
type Orphan struct {
	NodeID       node.ID
	SandboxID    sandbox.ID
	Reason       OrphanReason
	HolderNodeID *node.ID // nil: nobody has it
	FirstSeenAt  time.Time
	LastSeenAt   time.Time // to within a minute
}

const listOrphansSQL = `
SELECT  node_id, sandbox_id, reason, holder_node_id, first_seen_at, last_seen_at
FROM    orphans
WHERE   (@node::text = '' OR node_id = @node)
AND     (@reason::text = '' OR reason = @reason)
AND     (node_id, sandbox_id) > (@after_node::text, @after_sandbox::text)
ORDER   BY node_id, sandbox_id
LIMIT   @limit`

// ListOrphans returns a page of the orphans that were seen lately; a page shorter than its limit is the
// last one.
func (b *Bindings) ListOrphans(ctx context.Context, page OrphanPage) ([]Orphan, error) {
	rows, err := b.db.Query(ctx, listOrphansSQL, pgx.StrictNamedArgs{
		"node": page.Node, "reason": string(page.Reason), "limit": page.Limit,
		"after_node": page.AfterNode, "after_sandbox": page.AfterSandbox,
	})
	if err != nil {
		return nil, fmt.Errorf("list orphans: %w", err)
	}
	orphans, err := pgx.CollectRows(rows, pgx.RowToStructByName[Orphan])
	if err != nil {
		return nil, fmt.Errorf("list orphans: %w", err)
	}
	return orphans, nil
}

// EventPage says which events to list, newest first. What is zero does not narrow.
type EventPage struct {
	Sandbox sandbox.ID
	Node    node.ID
	Kind    Kind
	Limit   int // from 1

	Before EventCursor // the last event of the page before; zero: from the newest
}

// EventCursor is the place of an event in the log.
type EventCursor struct {
	At time.Time
	ID int64
}

// ErrBadCursor says that a text names no place in the log.
var ErrBadCursor = errors.New("cursor is not valid")

// String returns c as a text that ParseEventCursor takes; "" for the zero cursor.
func (c EventCursor) String() string {
	if c == (EventCursor{}) {
		return ""
	}
	return strconv.FormatInt(c.At.UnixMicro(), 10) + "-" + strconv.FormatInt(c.ID, 10)
}

// maxCursorMicros is in the year 9999, which PostgreSQL's timestamps reach.
const maxCursorMicros = 253_402_300_799_999_999

// ParseEventCursor returns the cursor that s is; "" is zero. Any other text gives ErrBadCursor.
func ParseEventCursor(s string) (EventCursor, error) {
	if s == "" {
		return EventCursor{}, nil
	}
	at, id, _ := strings.Cut(s, "-")
	micros, err := strconv.ParseUint(at, 10, 63)
	if err != nil || micros > maxCursorMicros {
		return EventCursor{}, ErrBadCursor
	}
	number, err := strconv.ParseUint(id, 10, 63)
	if err != nil {
		return EventCursor{}, ErrBadCursor
	}
	return EventCursor{At: time.UnixMicro(int64(micros)), ID: int64(number)}, nil
}

// Logged is one event as the log has it.
type Logged struct {
	EventID           int64
	At                time.Time
	Source            string // node, scheduler
	Kind              Kind
	Effect            Effect
	ClusterID         string
	NodeID            node.ID
	ServiceInstanceID string
	SandboxID         sandbox.ID
	CPUMillis         *int64 // nil: not told
	MemoryBytes       *int64
	DiskBytes         *int64
	Detail            map[string]any // nil: none
}

// Cursor returns the event's place, from which the next page goes on.
func (l Logged) Cursor() EventCursor { return EventCursor{At: l.At, ID: l.EventID} }

const listEventsSQL = `
SELECT  event_id, at, source, kind, effect, cluster_id, node_id, service_instance_id, sandbox_id, cpu_millis, memory_bytes,
        disk_bytes, detail
FROM    sandbox_events
WHERE   (@sandbox::text = '' OR sandbox_id = @sandbox)
AND     (@node::text = '' OR node_id = @node)
AND     (@kind::text = '' OR kind = @kind)
AND     (at, event_id) < (COALESCE(@before_at::timestamptz, 'infinity'), @before_id::bigint)
ORDER   BY at DESC, event_id DESC
LIMIT   @limit`

// ListEvents returns a page of the log; a page shorter than its limit is the last one.
func (b *Bindings) ListEvents(ctx context.Context, page EventPage) ([]Logged, error) {
	var before *time.Time
	if page.Before != (EventCursor{}) {
		before = &page.Before.At
	}
	rows, err := b.db.Query(ctx, listEventsSQL, pgx.StrictNamedArgs{
		"sandbox": page.Sandbox, "node": page.Node, "kind": string(page.Kind),
		"before_at": before, "before_id": page.Before.ID, "limit": page.Limit,
	})
	if err != nil {
		return nil, fmt.Errorf("list events: %w", err)
	}
	events, err := pgx.CollectRows(rows, pgx.RowToStructByName[Logged])
	if err != nil {
		return nil, fmt.Errorf("list events: %w", err)
	}
	return events, nil
}
