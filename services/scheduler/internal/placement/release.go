package placement

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
)

// Reasons for which a caller gives a reservation back.
const (
	NodeFull   = "node_full"
	DialFailed = "dial_failed"
	NodeError  = "node_error"
	Canceled   = "canceled"
)

// isReservation reports whether id may name a reservation at all: it is the text of a UUID, as rows spell
// it. Of other texts that some call UUIDs PostgreSQL would refuse the cast, and the transaction with it.
func isReservation(id string) bool {
	parsed, err := uuid.Parse(id)
	return err == nil && parsed.String() == id
}

// extendHoldsSQL lets open holds run from now on. Past its expiry a hold that nobody has swept yet is
// still open.
const extendHoldsSQL = `
UPDATE  reservations
SET     expires_at = clock_timestamp() + @ttl::interval
WHERE   reservation_id = @reservation::uuid AND placement_id = @placement AND sandbox_id IS NULL`

// Extend lets an open reservation hold for ttl from now. The error is node.ErrNotOpen where it was
// confirmed, has ended, or never was. A second call extends again.
func (p *Placer) Extend(ctx context.Context, placementID int64, reservation string, ttl time.Duration) error {
	if !isReservation(reservation) {
		return node.ErrNotOpen // it never was
	}
	tag, err := p.db.Exec(ctx, extendHoldsSQL, pgx.StrictNamedArgs{
		"ttl": ttl, "reservation": reservation, "placement": placementID,
	})
	if err != nil {
		return fmt.Errorf("extend placement %d: %w", placementID, err)
	}
	if tag.RowsAffected() == 0 {
		return node.ErrNotOpen
	}
	return nil
}

// releaseHoldsSQL deletes what is open of a reservation; whoever deletes a row gives its room back.
const releaseHoldsSQL = `
WITH    named AS MATERIALIZED (
        SELECT reservation_id, n
        FROM   reservations
        WHERE  reservation_id = @reservation::uuid AND placement_id = @placement AND sandbox_id IS NULL
        ORDER  BY n
        FOR    UPDATE),
        gone AS (
        DELETE FROM reservations AS r
        USING  named
        WHERE  r.reservation_id = named.reservation_id AND r.n = named.n AND r.sandbox_id IS NULL
        RETURNING r.node_id),
        settled AS (
        UPDATE placements AS p
        SET    outcome = 'released', changed_at = clock_timestamp()
        WHERE  p.placement_id = @placement AND p.reservation_id = @reservation::uuid AND p.outcome = 'reserved'
        AND    EXISTS (SELECT 1 FROM gone)
        RETURNING p.placement_id)
SELECT  node_id
FROM    gone`

// Release gives the room of an open reservation back and reports whether it did: false where it was
// confirmed, has ended, or never was. After NodeFull and DialFailed this replica prefers other nodes to
// that one for two seconds. A second call changes nothing.
func (p *Placer) Release(ctx context.Context, placementID int64, reservation, reason string) (bool, error) {
	if !isReservation(reservation) {
		return false, nil // it never was
	}
	rows, err := p.db.Query(ctx, releaseHoldsSQL, pgx.StrictNamedArgs{"reservation": reservation, "placement": placementID})
	if err != nil {
		return false, fmt.Errorf("release placement %d: %w", placementID, err)
	}
	held, err := pgx.CollectRows(rows, pgx.RowTo[node.ID])
	if err != nil {
		return false, fmt.Errorf("release placement %d: %w", placementID, err)
	}
	if len(held) == 0 {
		return false, nil
	}
	p.metrics.holdsEnded("released", len(held))
	if reason == NodeFull || reason == DialFailed {
		p.overlooking.Lock()
		p.overlook[held[0]] = time.Now().Add(passOver)
		p.overlooking.Unlock()
	}
	return true, nil
}

// overlooked returns the nodes that are passed over now, nil if there are none.
func (p *Placer) overlooked() map[node.ID]bool {
	p.overlooking.Lock()
	defer p.overlooking.Unlock()
	var over map[node.ID]bool
	for id, until := range p.overlook {
		if time.Now().After(until) {
			delete(p.overlook, id)
			continue
		}
		if over == nil {
			over = map[node.ID]bool{}
		}
		over[id] = true
	}
	return over
}

// limiter lets most pass in each second; one goroutine asks it.
type limiter struct {
	most   int
	window time.Time
	used   int
}

func (l *limiter) allow() bool {
	if time.Since(l.window) >= time.Second {
		l.window, l.used = time.Now(), 0
	}
	l.used++
	return l.used <= l.most
}
