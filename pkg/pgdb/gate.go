package pgdb

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// ErrOldSchema is returned by Gate when the database lacks a migration.
var ErrOldSchema = errors.New("schema is older than this build")

const appliedMigrationsSQL = `
SELECT  version_id
FROM    goose_db_version
WHERE   is_applied AND version_id = ANY (@wanted::bigint[])`

const (
	undefinedTable        = "42P01"
	insufficientPrivilege = "42501"
)

// Gate returns nil when all migrations in wanted have been applied to db, and otherwise an error
// that is ErrOldSchema and names the missing ones. A newer schema passes: old and new versions run
// side by side. A service calls it once, before it serves.
func Gate(ctx context.Context, db *DB, wanted []int64) error {
	var applied []int64
	rows, err := db.Query(ctx, appliedMigrationsSQL, pgx.StrictNamedArgs{"wanted": wanted})
	if err == nil {
		applied, err = pgx.CollectRows(rows, pgx.RowTo[int64])
	}
	switch Code(err) {
	case undefinedTable: // an empty database: nothing was applied
	case insufficientPrivilege:
		user := pgx.Identifier{db.Config().ConnConfig.User}.Sanitize()
		return fmt.Errorf("read applied migrations: %s is in none of Berth's group roles: GRANT berth_… TO %s, or run berth migrate up: %w", user, user, err)
	default:
		if err != nil {
			return fmt.Errorf("read applied migrations: %w", err)
		}
	}
	var missing []string
	for _, version := range wanted {
		if !slices.Contains(applied, version) {
			missing = append(missing, fmt.Sprintf("%05d", version))
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("%w: run berth migrate up (missing %s)", ErrOldSchema, strings.Join(missing, ", "))
}
