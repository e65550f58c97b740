package placement

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
)

// A create key names one create of a tenant. The claim on it is the hold of its placement: who placed
// extends it while the node works. Past its expiry, for a while, the next caller takes the claim over.

// keyPatience is how long a call waits for another that has its key in flight.
const keyPatience = 2 * time.Second

// keyConstraints are broken by two who claim a key at once without its lock.
var keyConstraints = map[string]bool{"placements_create_key": true, "placements_request": true} //nolint:gochecknoglobals // a constant table

const selectClaimsSQL = `
SELECT  p.tenant_id, asked.create_key AS key, p.placement_id, p.fingerprint, p.create_digest, p.outcome, p.tries, p.node_id,
        p.reservation_id::text AS reservation, p.sandbox_ids, p.sealed_answer, COALESCE(n.endpoint, '') AS endpoint,
        COALESCE(n.capabilities, '{}') AS capabilities, held.millis AS hold_millis, COALESCE(held.millis < 0, false) AS overdue
FROM    unnest(@tenants::text[], @keys::text[]) AS asked (tenant_id, create_key)
JOIN    placements AS p ON p.tenant_id = asked.tenant_id AND p.create_key = asked.create_key AND p.outcome IN ('reserved', 'confirmed')
LEFT    JOIN nodes AS n ON n.node_id = p.node_id
LEFT    JOIN LATERAL (
        SELECT (extract(epoch FROM min(r.expires_at) - clock_timestamp()) * 1000)::bigint AS millis
        FROM   reservations AS r
        WHERE  r.reservation_id = p.reservation_id AND r.sandbox_id IS NULL) AS held ON true`

// takeOverSQL renews claims that are past their expiry still, under a new reservation id: a late release
// or extension by the former caller then does nothing. The request id goes over too, so that the new
// caller's repeated call finds its placement and the former one's does not.
const takeOverSQL = `
WITH    wanted AS MATERIALIZED (
        SELECT placement_id, old, id, request_id, fingerprint, ttl_millis
        FROM   unnest(@placements::bigint[], @olds::text[], @ids::text[], @request_ids::text[], @fingerprints::bytea[], @ttl_millis::bigint[])
               AS w (placement_id, old, id, request_id, fingerprint, ttl_millis)),
        locked AS MATERIALIZED (
        SELECT r.reservation_id, r.n, w.id, w.ttl_millis
        FROM   reservations AS r
        JOIN   wanted AS w ON r.reservation_id = w.old::uuid AND r.placement_id = w.placement_id
        WHERE  r.sandbox_id IS NULL AND r.expires_at < clock_timestamp()
        ORDER  BY r.reservation_id, r.n
        FOR    UPDATE OF r),
        renewed AS (
        UPDATE reservations AS r
        SET    reservation_id = locked.id::uuid, expires_at = clock_timestamp() + locked.ttl_millis * interval '1 millisecond'
        FROM   locked
        WHERE  r.reservation_id = locked.reservation_id AND r.n = locked.n AND r.sandbox_id IS NULL
        RETURNING r.reservation_id)
UPDATE  placements AS p
SET     reservation_id = w.id::uuid, request_id = w.request_id, fingerprint = w.fingerprint, tries = p.tries + 1,
        changed_at = clock_timestamp()
FROM    wanted AS w
WHERE   p.placement_id = w.placement_id AND p.reservation_id = w.old::uuid AND p.outcome = 'reserved'
AND     EXISTS (SELECT 1 FROM renewed WHERE renewed.reservation_id = w.id::uuid)
RETURNING p.reservation_id::text AS reservation, p.placement_id`

// takeover is a claim to be taken over.
type takeover struct {
	c   *call
	old earlier
	id  string // the new reservation id
}

// createKeys are the keys that the batch asks about, each once.
func (d *round) createKeys() (tenants, keys []string) {
	seen := map[[2]string]bool{}
	for _, r := range d.asked {
		key := [2]string{r.Tenant, r.CreateKey}
		if r.CreateKey == "" || seen[key] {
			continue
		}
		seen[key] = true
		tenants, keys = append(tenants, r.Tenant), append(keys, r.CreateKey)
	}
	return tenants, keys
}

// claimed answers a call whose create key is claimed already. One whose claim the call replaces is not.
func (d *round) claimed(c *call) bool {
	old, found := d.claims[[2]string{c.r.Tenant, c.r.CreateKey}]
	if !found || old.Outcome == Reserved && old.Reservation != nil && *old.Reservation == c.r.Replaces {
		return false
	}
	tell := func(a answer) bool {
		d.answers = append(d.answers, answered{c, a})
		return true
	}
	switch {
	case !bytes.Equal(old.CreateDigest, c.r.Digest):
		return tell(answer{err: node.ErrKeyReused})
	case old.Outcome == Recorded:
		placed := old.placement()
		placed.State, placed.SealedAnswer = KeyDone, old.SealedAnswer
		return tell(answer{placed: placed})
	case !old.Overdue || len(old.SandboxIDs) == 0:
		// A node that draws its own ids may have made a sandbox that nobody can name: see bindings.
		return tell(answer{placed: Placement{State: KeyPending}})
	}
	d.takeovers = append(d.takeovers, takeover{c: c, old: old, id: uuid.NewString()})
	d.claim(c)
	return true
}

// claim lets the calls after c in this round find what c has claimed.
func (d *round) claim(c *call) {
	if c.r.CreateKey == "" {
		return
	}
	if d.claims == nil {
		d.claims = map[[2]string]earlier{}
	}
	d.claims[[2]string{c.r.Tenant, c.r.CreateKey}] = earlier{CreateDigest: c.r.Digest, Outcome: Reserved}
}

func (d *round) takeOverArgs() pgx.StrictNamedArgs {
	var (
		placements   []int64
		olds, ids    []string
		requestIDs   []*string
		fingerprints [][]byte
		ttls         []int64
	)
	for _, t := range d.takeovers {
		r := &t.c.r
		placements, olds, ids = append(placements, t.old.PlacementID), append(olds, *t.old.Reservation), append(ids, t.id)
		ttls = append(ttls, r.TTL.Milliseconds())
		own, named := d.before[[2]string{r.Tenant, r.RequestID}]
		if r.RequestID == "" || named && own.PlacementID != t.old.PlacementID {
			// A try of this request that came to nothing has a row; the claim is found by its key alone.
			requestIDs, fingerprints = append(requestIDs, nil), append(fingerprints, nil)
			continue
		}
		requestIDs, fingerprints = append(requestIDs, &r.RequestID), append(fingerprints, r.Fingerprint)
	}
	return pgx.StrictNamedArgs{
		"placements": placements, "olds": olds, "ids": ids, "request_ids": requestIDs, "fingerprints": fingerprints, "ttl_millis": ttls,
	}
}

// tookOver answers the callers whose claims were renewed. A claim that was not has just been extended,
// recorded or ended: its caller goes another round.
func (d *round) tookOver(renewed []placedRow) {
	taken := make(map[string]bool, len(renewed))
	for _, row := range renewed {
		taken[row.Reservation] = true
	}
	for _, t := range d.takeovers {
		if !taken[t.id] {
			d.rest = append(d.rest, t.c)
			continue
		}
		placed := t.old.placement()
		placed.State, placed.Reservation, placed.Hold = KeyTakeover, t.id, t.c.r.TTL
		d.answers = append(d.answers, answered{t.c, answer{placed: placed}})
	}
}

func stateOfNew(r *Request) State {
	if r.CreateKey == "" {
		return ""
	}
	return KeyNew
}

// await asks again whenever something became of the key of r, and answers KeyPending when nothing did in
// time. Between the questions it holds neither a connection nor a lock.
func (p *Placer) await(ctx context.Context, r *Request) (Placement, error) {
	limit := time.NewTimer(keyPatience)
	defer limit.Stop()
	for {
		settled, leave := p.keys.join(r.Tenant, r.CreateKey)
		select {
		case <-settled:
		case <-limit.C:
			leave()
			return Placement{State: KeyPending}, nil
		case <-ctx.Done():
			leave()
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return Placement{State: KeyPending}, nil // that much is known
			}
			return Placement{}, ctx.Err()
		case <-p.stopped:
			leave()
			return Placement{}, errStopped
		}
		if placed, err := p.ask(ctx, r); err != nil || placed.State != KeyPending {
			return placed, err
		}
	}
}

const selectRenewedClaimSQL = `
SELECT  reservation_id::text
FROM    placements
WHERE   placement_id = @placement AND node_id = @node AND reservation_id <> @reservation::uuid AND create_key IS NOT NULL
AND     outcome IN ('reserved', 'confirmed') AND sandbox_ids @> @ids::text[] AND (@tenant::text = '' OR tenant_id = @tenant)`

// renewedClaim returns c under the reservation that has taken its claim over, if one has: whose claim was
// taken over still made the very sandboxes that were drawn for it.
func renewedClaim(ctx context.Context, tx pgx.Tx, c Confirmation) ([]Confirmation, error) {
	if c.PlacementID != 0 && isReservation(c.ReservationID) {
		err := tx.QueryRow(ctx, selectRenewedClaimSQL, pgx.StrictNamedArgs{
			"placement": c.PlacementID, "node": c.Node, "reservation": c.ReservationID, "tenant": c.Tenant, "ids": c.Sandbox,
		}).Scan(&c.ReservationID)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return nil, fmt.Errorf("read the claim of placement %d: %w", c.PlacementID, err)
		}
	}
	return []Confirmation{c}, nil
}

// settleLate is settle for a placement that may have lost its create key: should another placement get
// the key at this moment, the sandbox stays without it.
func settleLate(ctx context.Context, tx pgx.Tx, settled []settlement) error {
	inner, err := tx.Begin(ctx) // a savepoint: what is broken in it breaks no more than it
	if err != nil {
		return fmt.Errorf("settle late: %w", err)
	}
	if err = settle(ctx, inner, settled); err == nil {
		return inner.Commit(ctx)
	}
	if undone := inner.Rollback(ctx); undone != nil || !keyConstraints[pgdb.Constraint(err)] {
		return errors.Join(err, undone)
	}
	return nil
}
