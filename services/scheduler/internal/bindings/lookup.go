package bindings

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

const (
	// lookupBatch is how many lookups share a statement at most: beyond it the statement's own length is
	// what its first caller waits for.
	lookupBatch = 128

	// lookupsAtOnce keeps the next statement on its way while the answers of the former one are handed out.
	lookupsAtOnce = 2

	// lookupLimit ends a statement that hangs, a little before the role's statement timeout.
	lookupLimit = 4 * time.Second
)

// lookupSandboxesSQL reads endpoints of now, not of the day a sandbox was recorded.
const lookupSandboxesSQL = `
SELECT  b.sandbox_id, b.node_id, n.endpoint, b.revision, b.incarnation, n.present,
        n.lingering OR n.cordoned OR n.drain_id IS NOT NULL AS leaving,
        COALESCE(l.ended_at IS NULL AND l.expires_at > clock_timestamp(), false) AS lease_held,
        COALESCE(l.reported_status, 0) AS reported
FROM    bindings AS b
JOIN    nodes AS n ON n.node_id = b.node_id
LEFT JOIN node_leases AS l ON l.node_id = b.node_id
WHERE   b.sandbox_id = ANY (@ids::text[]) AND b.state = 'bound'`

// Lookup returns the node of a bound sandbox. One that is unknown, parked or gone is
// sandbox.ErrNotFound. While LookupLoop runs, calls that wait at the same time share a statement.
func (b *Bindings) Lookup(ctx context.Context, id sandbox.ID) (Found, error) {
	found, err := b.lookups.ask(ctx, id)
	if errors.Is(err, errAlone) {
		found, err = b.lookupAlone(ctx, id)
	}
	if err != nil {
		b.store.Failed("lookup", err)
		return Found{}, fmt.Errorf("look up %s: %w", id, err)
	}
	return found, nil
}

// LookupLoop looks up what Lookup brings until ctx ends, a few statements at a time.
func (b *Bindings) LookupLoop(ctx context.Context) error {
	var servers errgroup.Group
	for range lookupsAtOnce {
		servers.Go(func() error { return b.lookups.serve(ctx, b.lookupTogether) })
	}
	return servers.Wait()
}

func (b *Bindings) lookupAlone(ctx context.Context, id sandbox.ID) (Found, error) {
	found, err := LookupOn(ctx, b.db, []sandbox.ID{id})
	if err != nil {
		return Found{}, err
	}
	at, known := found[id]
	if !known {
		return Found{}, sandbox.ErrNotFound
	}
	return at, nil
}

func (b *Bindings) lookupTogether(ctx context.Context, batch []*caller[sandbox.ID, Found]) {
	ctx, cancel := context.WithTimeout(ctx, lookupLimit)
	defer cancel()
	b.sizes.lookups.Observe(float64(len(batch)))
	ids := make([]sandbox.ID, len(batch))
	for i, c := range batch {
		ids[i] = c.asked
	}
	found, err := LookupOn(ctx, b.db, ids)
	for _, c := range batch {
		at, known := found[c.asked]
		switch {
		case err != nil:
			c.answer(Found{}, err)
		case !known:
			c.answer(Found{}, sandbox.ErrNotFound)
		default:
			c.answer(at, nil)
		}
	}
}

// Reads is a pool or one connection, which may be a standby's.
type Reads interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// LookupOn returns where the bound ones of ids are, as on knows it.
func LookupOn(ctx context.Context, on Reads, ids []sandbox.ID) (map[sandbox.ID]Found, error) {
	rows, err := on.Query(ctx, lookupSandboxesSQL, pgx.StrictNamedArgs{"ids": ids})
	if err != nil {
		return nil, err
	}
	found := make(map[sandbox.ID]Found, len(ids))
	var (
		id       sandbox.ID
		at       Found
		standing node.Standing
	)
	_, err = pgx.ForEachRow(rows, []any{
		&id, &at.Node, &at.Endpoint, &at.Revision, &at.Incarnation,
		&standing.Present, &standing.Leaving, &standing.LeaseHeld, &standing.Reported,
	}, func() error {
		at.Status = standing.Effective()
		found[id] = at
		return nil
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}
