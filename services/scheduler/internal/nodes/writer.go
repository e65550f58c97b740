package nodes

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// WriterLease is how long the writer of a dynamic source may be silent before another replica takes over.
const WriterLease = 15 * time.Second

// ErrNotWriter is a write of a dynamic source by somebody who is not its writer, or no longer.
var ErrNotWriter = errors.New("another replica writes this source of nodes")

// Writer is the right to write what Kubernetes says. It is shown with each write.
type Writer struct {
	Holder string // one for each process start
	Fence  int64
}

// claimWriterSQL takes the lease where it is free, or renews the holder's own. Only a lease that never
// ended keeps its fence: a write that was begun under an ended one must not come through later.
const claimWriterSQL = `
INSERT  INTO discovery_writer AS w (source, holder, expires_at)
SELECT  'kubernetes', @holder, clock_timestamp() + @lease::interval
ON CONFLICT (source) DO UPDATE
SET     holder = EXCLUDED.holder, expires_at = clock_timestamp() + @lease::interval,
        fence = w.fence + CASE WHEN w.holder = EXCLUDED.holder AND w.expires_at > clock_timestamp() THEN 0 ELSE 1 END
WHERE   w.holder = EXCLUDED.holder OR w.expires_at <= clock_timestamp()
RETURNING fence`

// ClaimWriter makes holder the writer of what Kubernetes says for WriterLease, or renews that. While
// another replica is the writer it returns ErrNotWriter.
func (n *Nodes) ClaimWriter(ctx context.Context, holder string) (Writer, error) {
	w := Writer{Holder: holder}
	err := n.db.QueryRow(ctx, claimWriterSQL, pgx.StrictNamedArgs{"holder": holder, "lease": WriterLease}).Scan(&w.Fence)
	if errors.Is(err, pgx.ErrNoRows) {
		return Writer{}, ErrNotWriter
	}
	if err != nil {
		return Writer{}, fmt.Errorf("claim the writer's lease: %w", err)
	}
	return w, nil
}

const releaseWriterSQL = `
UPDATE  discovery_writer
SET     expires_at = clock_timestamp()
WHERE   source = 'kubernetes' AND holder = @holder AND fence = @fence AND expires_at > clock_timestamp()`

// ReleaseWriter ends the lease of w, so that another replica need not wait for it. One that has ended is
// left alone.
func (n *Nodes) ReleaseWriter(ctx context.Context, w Writer) error {
	if _, err := n.db.Exec(ctx, releaseWriterSQL, pgx.StrictNamedArgs{"holder": w.Holder, "fence": w.Fence}); err != nil {
		return fmt.Errorf("release the writer's lease: %w", err)
	}
	return nil
}

// lockWriterSQL keeps the lease from being taken until the transaction ends. A takeover that waits for it
// gets the next fence afterwards.
const lockWriterSQL = `
SELECT  true
FROM    discovery_writer
WHERE   source = 'kubernetes' AND holder = @holder AND fence = @fence AND expires_at > clock_timestamp()
FOR     SHARE`

// checkWriter returns ErrNotWriter unless w has the lease, which then cannot change hands before tx ends.
// What tx waits for, it waits for before.
func checkWriter(ctx context.Context, tx pgx.Tx, w Writer) error {
	var held bool
	err := tx.QueryRow(ctx, lockWriterSQL, pgx.StrictNamedArgs{"holder": w.Holder, "fence": w.Fence}).Scan(&held)
	if errors.Is(err, pgx.ErrNoRows) {
		return ErrNotWriter
	}
	if err != nil {
		return fmt.Errorf("check the writer's lease: %w", err)
	}
	return nil
}
