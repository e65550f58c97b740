package migrate

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"path"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"berth/pkg/pgdb"
)

const (
	// lockTries bounds how often a file that meets a lock is tried again, with pauses up to maxPause.
	lockTries  = 60
	firstPause = 20 * time.Millisecond
	maxPause   = time.Second

	// The locker asks every second, for as long as another process may need for all files.
	probeSeconds, probes = 1, 600
)

// Entry is one migration and what became of it.
type Entry struct {
	Version   int64     `json:"version"`
	Name      string    `json:"name"`
	Applied   bool      `json:"applied"`
	AppliedAt time.Time `json:"applied_at,omitzero"`
}

// Up makes the group roles and applies every file of fsys that the database lacks, in order. It
// returns the versions that this call applied, also beside an error, which names the file. Calling
// it again, or in many processes at once, is harmless.
func Up(ctx context.Context, url string, fsys fs.FS, log *slog.Logger) ([]int64, error) {
	if err := EnsureRoles(ctx, url); err != nil {
		return nil, err
	}
	r, err := open(ctx, url, fsys)
	if err != nil {
		return nil, err
	}
	defer r.close()

	var applied []int64
	err = r.again(ctx, log, func() error {
		results, err := r.provider.Up(ctx)
		if partial, ok := errors.AsType[*goose.PartialError](err); ok {
			results = partial.Applied
		}
		for _, done := range results {
			applied = append(applied, done.Source.Version)
			log.InfoContext(ctx, "migration applied", slog.String("file", path.Base(done.Source.Path)), slog.Duration("took", done.Duration))
		}
		return failure("apply", err)
	})
	if err != nil {
		return applied, err
	}
	return applied, r.grantVersions(ctx)
}

// Down takes back the newest steps applied migrations, newest first. It destroys their data: for
// development only. Fewer than steps being applied is no error.
func Down(ctx context.Context, url string, fsys fs.FS, steps int, log *slog.Logger) error {
	r, err := open(ctx, url, fsys)
	if err != nil {
		return err
	}
	defer r.close()

	for range steps {
		var ended bool
		err := r.again(ctx, log, func() error {
			done, err := r.provider.Down(ctx)
			if errors.Is(err, goose.ErrNoNextVersion) {
				ended = true
				return nil
			}
			if err == nil {
				log.InfoContext(ctx, "migration taken back", slog.String("file", path.Base(done.Source.Path)), slog.Duration("took", done.Duration))
			}
			return failure("take back", err)
		})
		if err != nil || ended {
			return err
		}
	}
	return nil
}

// Status returns every migration of fsys by version. It changes nothing: a database that was never
// migrated has them all unapplied.
func Status(ctx context.Context, url string, fsys fs.FS) ([]Entry, error) {
	entries, err := list(fsys)
	if err != nil {
		return nil, err
	}
	conn, err := connect(ctx, url)
	if err != nil {
		return nil, err
	}
	defer closeConn(ctx, conn)

	applied := map[int64]time.Time{}
	rows, err := conn.Query(ctx, appliedVersionsSQL)
	if err == nil {
		var version int64
		var at time.Time
		_, err = pgx.ForEachRow(rows, []any{&version, &at}, func() error {
			applied[version] = at
			return nil
		})
	}
	if err != nil && pgdb.Code(err) != undefinedTable {
		return nil, fmt.Errorf("read applied migrations: %w", err)
	}
	for i := range entries {
		entries[i].AppliedAt, entries[i].Applied = applied[entries[i].Version]
	}
	return entries, nil
}

const appliedVersionsSQL = `
SELECT  version_id, max(tstamp) AT TIME ZONE current_setting('TimeZone') AS at
FROM    goose_db_version
WHERE   is_applied AND version_id > 0
GROUP   BY version_id`

// list returns the files of fsys as entries, ascending.
func list(fsys fs.FS) ([]Entry, error) {
	names, err := fs.Glob(fsys, "*.sql")
	if err != nil {
		return nil, fmt.Errorf("list migrations: %w", err)
	}
	var entries []Entry
	for _, name := range names {
		version, err := goose.NumericComponent(name)
		if err != nil {
			return nil, fmt.Errorf("migration %s: its name must begin with a number and an underscore: %w", name, err)
		}
		entries = append(entries, Entry{Version: version, Name: name})
	}
	slices.SortFunc(entries, func(a, b Entry) int { return cmp.Compare(a.Version, b.Version) })
	return entries, nil
}

// failure names the file that an error of goose is about.
func failure(verb string, err error) error {
	if err == nil {
		return nil
	}
	if partial, ok := errors.AsType[*goose.PartialError](err); ok && partial.Failed != nil {
		return fmt.Errorf("%s %s: %w", verb, path.Base(partial.Failed.Source.Path), partial.Err)
	}
	return fmt.Errorf("%s migrations: %w", verb, err)
}

// runner is goose on a connection of its own.
type runner struct {
	db       *sql.DB
	provider *goose.Provider
	lockID   int64
}

// lockIDSQL is lock_key(127, 'berth') without the function, which the first file makes.
const lockIDSQL = `SELECT (127::bigint << 56) | (hashtextextended('berth', 0) & 72057594037927935)`

func open(ctx context.Context, url string, fsys fs.FS) (*runner, error) {
	config, err := parse(url)
	if err != nil {
		return nil, err
	}
	db := stdlib.OpenDB(*config, stdlib.OptionAfterConnect(becomeMigrator))
	r := &runner{db: db}
	if err := db.QueryRowContext(ctx, lockIDSQL).Scan(&r.lockID); err != nil {
		r.close()
		return nil, explain(url, err)
	}
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockID(r.lockID),
		lock.WithLockTimeout(probeSeconds, probes), lock.WithUnlockTimeout(probeSeconds, 10))
	if err != nil {
		r.close()
		return nil, fmt.Errorf("make the migration lock: %w", err)
	}
	r.provider, err = goose.NewProvider(goose.DialectPostgres, db, fsys,
		goose.WithSessionLocker(locker), goose.WithAllowOutofOrder(true),
		goose.WithDisableGlobalRegistry(true), goose.WithLogger(goose.NopLogger()))
	if err != nil {
		r.close()
		return nil, fmt.Errorf("read migrations: %w", err)
	}
	return r, nil
}

func (r *runner) close() { _ = r.db.Close() } // nothing is pending: all work was committed or failed

// again runs f until it succeeds or fails for another reason than a lock that was not free in time.
func (r *runner) again(ctx context.Context, log *slog.Logger, f func() error) error {
	limit := firstPause
	for try := 1; ; try++ {
		err := f()
		if err == nil || !lockNotFree(err) {
			return err
		}
		if try == lockTries {
			return fmt.Errorf("no lock in %d tries; end the long transactions that pg_stat_activity shows, and run it again: %w", try, err)
		}
		log.DebugContext(ctx, "migration meets a lock, trying again", slog.Int("try", try))
		timer := time.NewTimer(limit/2 + rand.N(limit/2))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return errors.Join(ctx.Err(), err)
		}
		limit = min(2*limit, maxPause)
	}
}

func lockNotFree(err error) bool {
	switch pgdb.Code(err) {
	case lockNotAvailable, deadlockDetected:
		return true
	}
	return false
}

// grantVersionsSQL lets every service read which migrations were applied, once.
const grantVersionsSQL = `
GRANT SELECT ON goose_db_version
TO berth_scheduler, berth_gateway, berth_sessions, berth_history, berth_dispatcher, berth_console`

const versionsReadableSQL = `
SELECT  bool_and(has_table_privilege(role, 'goose_db_version', 'SELECT'))
FROM    unnest(ARRAY['berth_scheduler', 'berth_gateway', 'berth_sessions', 'berth_history', 'berth_dispatcher', 'berth_console']) AS role`

// grantVersions takes the migration lock, for two GRANTs on one table at once fail.
func (r *runner) grantVersions(ctx context.Context) error {
	tx, err := r.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("grant goose_db_version: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // after a commit it does nothing
	if _, err := tx.ExecContext(ctx, `SET LOCAL lock_timeout = 0`); err != nil {
		return fmt.Errorf("grant goose_db_version: %w", err)
	}
	if _, err := tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock(`+strconv.FormatInt(r.lockID, 10)+`)`); err != nil {
		return fmt.Errorf("wait for the migration lock: %w", err)
	}
	var readable bool
	if err := tx.QueryRowContext(ctx, versionsReadableSQL).Scan(&readable); err != nil {
		return fmt.Errorf("read grants of goose_db_version: %w", err)
	}
	if readable {
		return nil
	}
	if _, err := tx.ExecContext(ctx, grantVersionsSQL); err != nil {
		return fmt.Errorf("grant goose_db_version: %w", err)
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("grant goose_db_version: %w", err)
	}
	return nil
}

// parse returns how to connect: without a statement cache, for DDL runs here, and with the
// timeouts of the migrator's role, whoever logs in.
func parse(url string) (*pgx.ConnConfig, error) {
	config, err := pgdb.ParseURL(url)
	if err != nil {
		return nil, err
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	config.RuntimeParams["application_name"] = "berth migrate"
	for _, s := range pgdb.MigratorTimeouts.Settings() {
		config.RuntimeParams[s.Name] = strconv.FormatInt(s.Value.Milliseconds(), 10)
	}
	return config, nil
}

func connect(ctx context.Context, url string) (*pgx.Conn, error) {
	config, err := parse(url)
	if err != nil {
		return nil, err
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, explain(url, err)
	}
	return conn, nil
}

func closeConn(ctx context.Context, conn *pgx.Conn) {
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = conn.Close(ending)
}

// explain says what to do about an error of connecting; others it leaves alone.
func explain(url string, err error) error {
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return pgdb.ExplainConnect(url, err)
	}
	return err
}
