package schema

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
)

// describeSQL lists all that a migration can make, one line a thing: tables with their settings and
// rights, columns, constraints, indexes, sequences, functions, triggers, views and types.
const describeSQL = `
WITH ours AS (SELECT oid FROM pg_namespace WHERE nspname = 'public')
SELECT format('relation %s %s options %s owner %s rights %s', c.relkind, c.relname, c.reloptions, c.relowner::regrole, c.relacl) AS line
FROM   pg_class AS c WHERE c.relnamespace IN (SELECT oid FROM ours) AND c.relname NOT LIKE 'goose_%'
UNION ALL
SELECT format('column %s.%s %s not null %s default %s identity %s collation %s', c.relname, a.attname, format_type(a.atttypid, a.atttypmod),
       a.attnotnull, pg_get_expr(d.adbin, d.adrelid), a.attidentity, a.attcollation::regcollation)
FROM   pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE  c.relnamespace IN (SELECT oid FROM ours) AND a.attnum > 0 AND NOT a.attisdropped AND c.relname NOT LIKE 'goose_%'
UNION ALL
SELECT format('constraint %s on %s %s', k.conname, k.conrelid::regclass, pg_get_constraintdef(k.oid))
FROM   pg_constraint AS k WHERE k.connamespace IN (SELECT oid FROM ours) AND k.conrelid::regclass::text NOT LIKE 'goose_%'
UNION ALL
SELECT format('index %s', pg_get_indexdef(i.indexrelid))
FROM   pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid WHERE c.relnamespace IN (SELECT oid FROM ours) AND c.relname NOT LIKE 'goose_%'
UNION ALL
SELECT format('function %s owner %s rights %s', pg_get_functiondef(p.oid), p.proowner::regrole, p.proacl)
FROM   pg_proc AS p WHERE p.pronamespace IN (SELECT oid FROM ours)
UNION ALL
SELECT format('trigger %s', pg_get_triggerdef(t.oid))
FROM   pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid WHERE NOT t.tgisinternal AND c.relnamespace IN (SELECT oid FROM ours)
UNION ALL
SELECT format('view %s %s', v.viewname, v.definition) FROM pg_views AS v WHERE v.schemaname = 'public'
ORDER BY line`

// describe returns the schema of db as sorted lines.
func describe(t *testing.T, db *pgdb.DB) []string {
	t.Helper()
	rows, err := db.Query(t.Context(), describeSQL)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

func mustExec(t *testing.T, db *pgdb.DB, sql string) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}
