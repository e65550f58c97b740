package pgtest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"log/slog"
	"sync"

	"github.com/jackc/pgx/v5"

	"berth/pkg/migrate"
	"berth/pkg/pgdb"
)

// templates remembers which templates this process has seen finished, by server and name.
var templates struct {
	sync.Mutex
	done map[string]bool
}

// ensureTemplate returns the name of a database with all migrations of fsys, building it unless
// another test or process has. A finished one refuses connections; an unfinished one was left by a
// builder that died, and is built again.
func ensureTemplate(ctx context.Context, server string, fsys fs.FS) (string, error) {
	hash, err := hashOf(fsys)
	if err != nil {
		return "", err
	}
	name := "berth_template_" + hash
	templates.Lock()
	defer templates.Unlock()
	if templates.done[server+name] {
		return name, nil
	}
	err = onServer(ctx, server, func(conn *pgx.Conn) error { return buildTemplate(ctx, conn, server, name, fsys) })
	if err != nil {
		return "", fmt.Errorf("build the template %s: %w", name, err)
	}
	if templates.done == nil {
		templates.done = map[string]bool{}
	}
	templates.done[server+name] = true
	return name, nil
}

// lockTemplateSQL is lock_key(126, name), which this database does not have. The session's end
// releases it.
const lockTemplateSQL = `
SELECT pg_advisory_lock((126::bigint << 56) | (hashtextextended(@name::text, 0) & 72057594037927935))`

const templateFinishedSQL = `
SELECT  datistemplate AND NOT datallowconn
FROM    pg_database
WHERE   datname = @name`

func buildTemplate(ctx context.Context, conn *pgx.Conn, server, name string, fsys fs.FS) error {
	named := pgx.StrictNamedArgs{"name": name}
	if _, err := conn.Exec(ctx, lockTemplateSQL, named); err != nil {
		return fmt.Errorf("wait for another builder: %w", err)
	}
	rows, err := conn.Query(ctx, templateFinishedSQL, named)
	if err != nil {
		return fmt.Errorf("look for the template: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[bool])
	if err != nil {
		return fmt.Errorf("look for the template: %w", err)
	}
	if len(found) == 1 && found[0] {
		return nil
	}
	if len(found) == 1 {
		err := execAll(ctx, conn,
			"ALTER DATABASE "+quote(name)+" IS_TEMPLATE false",
			"DROP DATABASE "+quote(name)+" WITH (FORCE)")
		if err != nil {
			return fmt.Errorf("drop an unfinished template: %w", err)
		}
	}
	if err := execAll(ctx, conn, "CREATE DATABASE "+quote(name)+" TEMPLATE template0"); err != nil {
		return err
	}
	if _, err := migrate.Up(ctx, withDatabase(server, name), fsys, slog.New(slog.DiscardHandler)); err != nil {
		return err
	}
	return execAll(ctx, conn, "ALTER DATABASE "+quote(name)+" IS_TEMPLATE true ALLOW_CONNECTIONS false")
}

func execAll(ctx context.Context, conn *pgx.Conn, statements ...string) error {
	for _, statement := range statements {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %s: %w", statement, pgdb.Code(err), err)
		}
	}
	return nil
}

// hashOf names the contents of all migration files.
func hashOf(fsys fs.FS) (string, error) {
	names, err := fs.Glob(fsys, "*.sql") // sorted
	if err != nil {
		return "", fmt.Errorf("list migrations: %w", err)
	}
	hash := sha256.New()
	for _, name := range names {
		text, err := fs.ReadFile(fsys, name)
		if err != nil {
			return "", fmt.Errorf("read migration: %w", err)
		}
		fmt.Fprintf(hash, "%s %d\n%s", name, len(text), text)
	}
	return hex.EncodeToString(hash.Sum(nil))[:16], nil
}
