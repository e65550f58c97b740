package pgdb

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Key names one advisory lock. Class is 0 to 127 and orders the locks: whoever holds a lock never
// waits for one of a lower class. Two ids of one class may share a lock; they then only wait for
// each other.
type Key struct {
	Class int
	ID    string
}

// lockKeysSQL takes every lock once, in ascending order of key, so that two transactions with
// overlapping keys wait for each other instead of deadlocking.
const lockKeysSQL = `
SELECT  pg_advisory_xact_lock(key)
FROM    (SELECT DISTINCT lock_key(class, id) AS key
        FROM   unnest(@classes::int[], @ids::text[]) AS wanted (class, id)
        ORDER  BY key) AS sorted`

// Lock waits for the locks of all keys and holds them until tx ends. What they guard is read in a
// later statement: this one's snapshot is older than the locks. The role's lock_timeout limits the
// wait, and Tx runs again after it.
func Lock(ctx context.Context, tx pgx.Tx, keys ...Key) error {
	if len(keys) == 0 {
		return nil
	}
	classes := make([]int32, len(keys))
	ids := make([]string, len(keys))
	for i, k := range keys {
		classes[i], ids[i] = int32(k.Class), k.ID
	}
	if _, err := tx.Exec(ctx, lockKeysSQL, pgx.StrictNamedArgs{"classes": classes, "ids": ids}); err != nil {
		return fmt.Errorf("lock %d keys from class %d: %w", len(keys), keys[0].Class, err)
	}
	return nil
}

const tryLockKeySQL = `SELECT pg_try_advisory_xact_lock(lock_key(@class::int, @id::text))`

// TryLock takes the lock of key if nobody holds it, until tx ends, and tells whether it did.
func TryLock(ctx context.Context, tx pgx.Tx, key Key) (bool, error) {
	var held bool
	err := tx.QueryRow(ctx, tryLockKeySQL, pgx.StrictNamedArgs{"class": int32(key.Class), "id": key.ID}).Scan(&held)
	if err != nil {
		return false, fmt.Errorf("try the lock of class %d: %w", key.Class, err)
	}
	return held, nil
}
