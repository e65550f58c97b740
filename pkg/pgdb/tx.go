package pgdb

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	maxReruns  = 3
	firstRerun = 10 * time.Millisecond
	poolWait   = 2 * time.Second

	// rollbackLimit is what an abandoned transaction gets to end in order; then its connection is closed.
	rollbackLimit = 2 * time.Second
)

// rerunCodes are answers after which the same transaction may succeed, from a fresh read.
var rerunCodes = map[string]bool{
	"40001": true, // serialization_failure
	"40P01": true, // deadlock_detected
	"55P03": true, // lock_not_available
	"53300": true, // too_many_connections, when the pool dialled
}

// Tx runs f in a READ COMMITTED transaction and commits it when f returns nil. After a
// serialization failure, a deadlock, a lock timeout, or a connection that turns out to be ended
// before COMMIT, f runs again, at most three times more, after a pause with jitter: it must start from
// fresh reads and have no effect but its SQL. A connection lost during COMMIT gives ErrUnknown, and
// is never repeated. An error of f comes back as it is.
func (db *DB) Tx(ctx context.Context, f func(tx pgx.Tx) error) error {
	for reruns := 0; ; reruns++ {
		err := db.once(ctx, f)
		if err == nil || reruns == maxReruns || !mayRerun(err) {
			return err
		}
		if pause(ctx, rand.N(firstRerun<<reruns)+time.Millisecond) != nil {
			return err
		}
	}
}

func mayRerun(err error) bool {
	if errors.Is(err, ErrUnknown) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	// A connection that the server ended while it lay in the pool is found closed, or brings the server's
	// last words for an answer. Neither promises that nothing was sent; but before COMMIT nothing that was
	// sent takes effect.
	if answered, ok := errors.AsType[*pgconn.PgError](err); ok {
		return rerunCodes[answered.Code] || fatal(answered)
	}
	return pgconn.SafeToRetry(err) || errors.Is(err, pgconn.ErrConnClosed)
}

// once is one try of Tx.
func (db *DB) once(ctx context.Context, f func(tx pgx.Tx) error) error {
	conn, err := db.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release() // closes the connection if it is still in a transaction

	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	committed := false
	defer func() {
		if committed {
			return
		}
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackLimit)
		defer cancel()
		_ = tx.Rollback(cleanup) // a failed rollback closes the connection, which rolls back too
	}()
	if err := f(tx); err != nil {
		return err
	}
	committed = true
	return commitResult(tx.Commit(ctx))
}

// commitResult says what an error of COMMIT means. The server's own answer is definite, unless it
// ended the connection: a wait for a standby that was cut short has committed already.
func commitResult(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, pgx.ErrTxCommitRollback) || pgconn.SafeToRetry(err) {
		return fmt.Errorf("commit: %w", err)
	}
	if answered, ok := errors.AsType[*pgconn.PgError](err); ok && !fatal(answered) {
		return fmt.Errorf("commit: %w", err)
	}
	return fmt.Errorf("%w: %w", ErrUnknown, err)
}

// Acquire returns a connection of the pool, waiting at most two seconds for one: then the error is
// ErrPoolWait, so that a storm turns into quick refusals instead of a long queue.
func (db *DB) Acquire(ctx context.Context) (*pgxpool.Conn, error) {
	limited, cancel := context.WithTimeoutCause(ctx, poolWait, ErrPoolWait)
	defer cancel()
	conn, err := db.Pool.Acquire(limited)
	if err != nil && ctx.Err() == nil && errors.Is(context.Cause(limited), ErrPoolWait) {
		return nil, fmt.Errorf("%w: %w", ErrPoolWait, err)
	}
	if err != nil {
		return nil, fmt.Errorf("take a database connection: %w", err)
	}
	return conn, nil
}
