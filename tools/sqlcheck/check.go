package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// migrationTable is goose's own; pkg/migrate and the gate of pkg/pgdb read it.
const migrationTable = "goose_db_version"

const listTablesSQL = `
SELECT c.relname
FROM   pg_catalog.pg_class AS c
WHERE  c.relnamespace = 'public'::regnamespace
AND    c.relkind IN ('r', 'p')
AND    NOT c.relispartition
ORDER  BY c.relname`

// check prepares every statement on a migrated database and judges which tables it uses. It returns
// an error only where it could not look.
func check(ctx context.Context, conn *pgx.Conn, statements []Statement, owned map[string]Owner) ([]Finding, error) {
	rows, err := conn.Query(ctx, listTablesSQL)
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
	}

	var findings []Finding
	known := map[string]bool{}
	for _, name := range tables {
		if name == migrationTable {
			continue
		}
		known[name] = true
		if _, ok := owned[name]; !ok {
			findings = append(findings, Finding{"migrations", "table " + name + " has no owner; give it a line in tools/sqlcheck/owners.go and in ARCHITECTURE.md"})
		}
	}
	for _, s := range statements {
		found, err := checkStatement(ctx, conn, s, owned, known)
		if err != nil {
			return nil, err
		}
		for _, what := range found {
			findings = append(findings, Finding{s.At, s.Name + " " + what})
		}
	}
	return findings, nil
}

func checkStatement(ctx context.Context, conn *pgx.Conn, s Statement, owned map[string]Owner, known map[string]bool) ([]string, error) {
	var found []string
	if selectsAll(s.SQL) {
		found = append(found, "selects *: list the columns, for a new one must not change what Go scans")
	}
	for _, use := range uses(s.SQL, known) {
		owner, ok := owned[use.Table]
		if !ok {
			continue // said once, at the table
		}
		if why := owner.may(s.Package, use); why != "" {
			found = append(found, why)
		}
	}

	// The rewriting is pgx's own, so @name means here what it means when the statement runs.
	text, _, err := pgx.NamedArgs{}.RewriteQuery(ctx, conn, s.SQL, nil)
	if err != nil {
		return append(found, "has parameters that pgx cannot read: "+err.Error()), nil
	}
	_, err = conn.Prepare(ctx, "", text)
	if err == nil {
		return found, nil
	}
	refused, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return nil, fmt.Errorf("prepare %s: %w", s.Name, err)
	}
	return append(found, fmt.Sprintf("does not prepare: %s (%s)%s", refused.Message, refused.Code, near(text, refused))), nil
}

// near quotes the place in the statement that PostgreSQL points at.
func near(text string, refused *pgconn.PgError) string {
	runes, at := []rune(text), int(refused.Position)-1
	if at < 0 || at >= len(runes) {
		return ""
	}
	return fmt.Sprintf(" at %q", string(runes[at:min(at+40, len(runes))]))
}
