package migrate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
)

const (
	undefinedTable        = "42P01"
	noSuchRole            = "22023" // what SET ROLE says of an unknown one
	duplicateObject       = "42710"
	uniqueViolation       = "23505" // two CREATE ROLE of one name at the same moment
	insufficientPrivilege = "42501"
	internalError         = "XX000" // two ALTER ROLE of one role at the same moment: tuple concurrently updated
	lockNotAvailable      = "55P03"
	deadlockDetected      = "40P01"
)

const migrator = "berth_migrator"

// group is a role without login; logins are its members.
type group struct {
	name   string
	limits pgdb.Timeouts
}

// groups are the roles of the migrations' grants.
var groups = []group{
	{migrator, pgdb.MigratorTimeouts},
	{"berth_scheduler", pgdb.WriteTimeouts},
	{"berth_gateway", pgdb.ReadTimeouts},
	{"berth_sessions", pgdb.WriteTimeouts},
	{"berth_history", pgdb.WriteTimeouts},
	{"berth_dispatcher", pgdb.WriteTimeouts},
	{"berth_console", pgdb.ConsoleTimeouts},
}

// Groups returns the names of the group roles.
func Groups() []string {
	names := make([]string, len(groups))
	for i, g := range groups {
		names[i] = g.name
	}
	return names
}

// EnsureRoles makes the group roles that do not exist, with their timeouts, lets berth_migrator own
// the schema, and takes CREATE in it from everybody else. Roles are the server's, not the database's, so
// another database may have made them; that is success. Where the login lacks a right, the error
// says which statement a superuser must run. It may be called again, and by many at once.
func EnsureRoles(ctx context.Context, url string) error {
	conn, err := connect(ctx, url)
	if err != nil {
		return err
	}
	defer closeConn(ctx, conn)

	for _, g := range groups {
		if err := ensureGroup(ctx, conn, g); err != nil {
			return err
		}
	}
	return ensureSchema(ctx, conn)
}

const roleSettingsSQL = `SELECT coalesce(rolconfig, '{}'), rolcanlogin FROM pg_roles WHERE rolname = @role`

func ensureGroup(ctx context.Context, conn *pgx.Conn, g group) error {
	var settings []string
	var login bool
	err := conn.QueryRow(ctx, roleSettingsSQL, pgx.StrictNamedArgs{"role": g.name}).Scan(&settings, &login)
	if errors.Is(err, pgx.ErrNoRows) {
		create := "CREATE ROLE " + quote(g.name) + " NOLOGIN"
		err = execRaced(ctx, conn, create)
		switch pgdb.Code(err) {
		case duplicateObject:
			err = nil // another process made it
		case insufficientPrivilege:
			return missing(conn, "create the role "+g.name, err, "ALTER ROLE %s CREATEROLE", "or a superuser runs: "+create)
		}
	}
	if err != nil {
		return fmt.Errorf("make role %s: %w", g.name, err)
	}
	return setTimeouts(ctx, conn, g.name, g.limits, settings)
}

// setTimeouts gives a role the timeouts that its settings, as in pg_roles.rolconfig, lack.
func setTimeouts(ctx context.Context, conn *pgx.Conn, role string, limits pgdb.Timeouts, settings []string) error {
	for _, s := range limits.Settings() {
		value := fmt.Sprintf("%dms", s.Value.Milliseconds())
		if slices.Contains(settings, s.Name+"="+value) {
			continue
		}
		alter := fmt.Sprintf("ALTER ROLE %s SET %s = '%s'", quote(role), s.Name, value)
		err := execRaced(ctx, conn, alter)
		if pgdb.Code(err) == insufficientPrivilege {
			return missing(conn, "set the timeouts of "+role, err, "ALTER ROLE %s CREATEROLE", "or a superuser runs: "+alter)
		}
		if err != nil {
			return fmt.Errorf("set %s of role %s: %w", s.Name, role, err)
		}
	}
	return nil
}

// raced are the answers of a statement that met another change of the same catalog row, or waited longer
// for it than the login's lock_timeout allows.
var raced = map[string]bool{internalError: true, uniqueViolation: true, lockNotAvailable: true, deadlockDetected: true}

// execRaced runs a statement on roles or rights, again when it met another change of the same catalog row.
// Each try waits for at most the connection's lock_timeout, so all of them end within a few seconds.
func execRaced(ctx context.Context, conn *pgx.Conn, statement string) error {
	const tries = 40
	for try := 1; ; try++ {
		_, err := conn.Exec(ctx, statement)
		if try == tries || !raced[pgdb.Code(err)] {
			return err
		}
		timer := time.NewTimer(min(time.Duration(try)*10*time.Millisecond, 100*time.Millisecond))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}

const schemaRightsSQL = `
SELECT  has_schema_privilege('public', 'public', 'CREATE'),
        has_schema_privilege('berth_migrator', 'public', 'CREATE')`

func ensureSchema(ctx context.Context, conn *pgx.Conn) error {
	var everybody, owner bool
	rights := func() error {
		if err := conn.QueryRow(ctx, schemaRightsSQL).Scan(&everybody, &owner); err != nil {
			return fmt.Errorf("read the rights on schema public: %w", err)
		}
		return nil
	}
	if err := rights(); err != nil {
		return err
	}
	if everybody || !owner {
		const grant = "REVOKE CREATE ON SCHEMA public FROM PUBLIC; GRANT USAGE, CREATE ON SCHEMA public TO berth_migrator"
		// Without the right, PostgreSQL only warns: so the rights are read again.
		for statement := range strings.SplitSeq(grant, "; ") {
			err := execRaced(ctx, conn, statement)
			if err != nil && pgdb.Code(err) != insufficientPrivilege {
				return fmt.Errorf("give the schema to %s: %w", migrator, err)
			}
		}
		if err := rights(); err != nil {
			return err
		}
		if everybody || !owner {
			return missing(conn, "give the schema to "+migrator, nil, "ALTER DATABASE … OWNER TO %s", "or a superuser runs: "+grant)
		}
	}
	if err := becomeMigrator(ctx, conn); err == nil || pgdb.Code(err) != insufficientPrivilege {
		return err
	}
	const member = "GRANT berth_migrator TO CURRENT_USER"
	if err := execRaced(ctx, conn, member); err != nil && pgdb.Code(err) != insufficientPrivilege {
		return fmt.Errorf("become %s: %w", migrator, err)
	}
	if err := becomeMigrator(ctx, conn); err != nil {
		return missing(conn, "become "+migrator, err, "GRANT berth_migrator TO %s")
	}
	return nil
}

// becomeMigrator makes what a connection creates belong to the group instead of its login.
func becomeMigrator(ctx context.Context, conn *pgx.Conn) error {
	_, err := conn.Exec(ctx, "SET ROLE berth_migrator")
	if pgdb.Code(err) == noSuchRole {
		return fmt.Errorf("become %s: this server was never migrated, run berth migrate up first: %w", migrator, err)
	}
	if err != nil {
		return fmt.Errorf("become %s: %w", migrator, err)
	}
	return nil
}

// missing says which right the login of conn lacks. %s in the grant is the login.
func missing(conn *pgx.Conn, what string, cause error, grant string, more ...string) error {
	login := conn.Config().User
	text := fmt.Sprintf("%s may not %s: a superuser must run: %s", login, what, fmt.Sprintf(grant, quote(login)))
	if len(more) > 0 {
		text += "; " + strings.Join(more, "; ")
	}
	if cause == nil {
		return errors.New(text)
	}
	return fmt.Errorf("%s: %w", text, cause)
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }
