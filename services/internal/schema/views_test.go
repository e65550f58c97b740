package schema

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"berth/migrations"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
)

var rewrite = flag.Bool("rewrite", false, "write the golden texts of the views anew")

// views has the question that each golden text answers. What moves with the clock is asked in whole days,
// and the fixture's times are half a day off those.
var views = map[string]string{
	"node_standing": `SELECT node_id, endpoint, status FROM node_standing ORDER BY node_id`,
	"node_overview": `
SELECT  node_id, cluster_id, endpoint, source, present, status, service_instance_id, epoch, last_seen_at,
        extract(day FROM lease_left) AS lease_days, clock_skew, cpu_percent, cpu_count, allocated_cpu, memory_used_bytes,
        memory_total_bytes, allocated_memory_bytes, sandbox_count, sandbox_starting_count, paused_sandbox_count,
        bound_sandboxes, open_holds, confirmed_holds, held_cpu_millis, held_memory_bytes, orphans, lingering, cordoned,
        cordon_reason, drain_id, drain_state, drain_mode, extract(day FROM drain_deadline_left) AS drain_days, version, cpu_config_error
FROM    node_overview
ORDER   BY node_id`,
	"binding_overview": `
SELECT  sandbox_id, state, tenant_id, node_id, cluster_id, node_endpoint, node_status, revision, incarnation, origin, cpu_millis,
        memory_bytes, placement_id, bound_at, abs(extract(epoch FROM age - (clock_timestamp() - bound_at))) < 3600 AS of_that_age,
        ended_at, ended_by, held
FROM    binding_overview
ORDER   BY sandbox_id`,
	"sandbox_timeline": `
SELECT  sandbox_id, at, source, what, effect, node_id, revision, detail, rank, place > 0 AS placed
FROM    sandbox_timeline
ORDER   BY sandbox_id, at, rank, place`,
	"placement_refusals": `
SELECT  placement_id, created_at, tenant_id, outcome, refusal, reason, nodes_refused, node_id, value, limit_value
FROM    placement_refusals`,
}

// fixtureOf loads the rows that the views are asked about.
func fixtureOf(t *testing.T) *pgtest.Database {
	t.Helper()
	db := pgtest.New(t, migrations.FS)
	text, err := os.ReadFile("testdata/views.sql")
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, db.DB, string(text))
	return db
}

func TestViewsAnswerFromAKnownDatabase(t *testing.T) {
	t.Parallel()
	db := fixtureOf(t)
	console := db.As(t, "berth_console")
	for name, question := range views {
		got := ask(t, console, question)
		file := filepath.Join("testdata", "views", name+".golden")
		if *rewrite {
			if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// ask returns the rows as lines: the columns' names first, then a line for each row, null as ∅.
func ask(t *testing.T, db *pgdb.DB, question string) string {
	t.Helper()
	var out strings.Builder
	err := db.Tx(t.Context(), func(tx pgx.Tx) error {
		out.Reset()
		const settingsSQL = `SET LOCAL timezone = 'UTC'; SET LOCAL intervalstyle = 'postgres'`
		if _, err := tx.Exec(t.Context(), settingsSQL); err != nil {
			return err
		}
		return lines(t.Context(), tx, question, &out)
	})
	if err != nil {
		t.Fatalf("%s: %v", question, err)
	}
	return out.String()
}

func lines(ctx context.Context, tx pgx.Tx, question string, out *strings.Builder) error {
	// The simple protocol has texts for answers, as psql shows them.
	rows, err := tx.Query(ctx, question, pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		return err
	}
	defer rows.Close()
	var names []string
	for _, field := range rows.FieldDescriptions() {
		names = append(names, field.Name)
	}
	out.WriteString(strings.Join(names, " | ") + "\n")
	for rows.Next() {
		var cells []string
		for _, value := range rows.RawValues() {
			if value == nil {
				cells = append(cells, "∅")
				continue
			}
			cells = append(cells, string(value))
		}
		out.WriteString(strings.Join(cells, " | ") + "\n")
	}
	return rows.Err()
}

// uncommentedSQL lists views and their columns that say nothing of themselves.
const uncommentedSQL = `
SELECT  c.relname || COALESCE('.' || a.attname, '')
FROM    pg_class AS c
LEFT    JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0
WHERE   c.relnamespace = 'public'::regnamespace AND c.relkind = 'v'
AND     COALESCE(col_description(c.oid, a.attnum), '') = ''
UNION   ALL
SELECT  c.relname
FROM    pg_class AS c
WHERE   c.relnamespace = 'public'::regnamespace AND c.relkind = 'v' AND COALESCE(obj_description(c.oid, 'pg_class'), '') = ''
ORDER   BY 1`

func TestEachViewAndEachOfItsColumnsSaysWhatItIs(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	read := func(sql string) []string {
		t.Helper()
		rows, err := db.Query(t.Context(), sql)
		if err != nil {
			t.Fatal(err)
		}
		names, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		return names
	}
	for _, name := range read(uncommentedSQL) {
		t.Errorf("%s has no comment", name)
	}
	const viewsSQL = `SELECT viewname::text FROM pg_views WHERE schemaname = 'public'`
	all := read(viewsSQL)
	for _, name := range all {
		if _, asked := views[name]; !asked {
			t.Errorf("view %s has no golden text", name)
		}
	}
	if len(all) != len(views) {
		t.Errorf("%d views, want the %d that have golden texts", len(all), len(views))
	}
	mustExec(t, db.DB, "CREATE VIEW silent AS SELECT 1 AS one; COMMENT ON VIEW silent IS 'but not its column'")
	if got := read(uncommentedSQL); len(got) != 1 || got[0] != "silent.one" {
		t.Errorf("a column without a comment is not found: %v", got)
	}
}

// Every column of a view is in its golden text, or in one that is asked in whole days.
func TestGoldenTextsAskForEveryColumn(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	const columnsSQL = `
SELECT  table_name::text, column_name::text
FROM    information_schema.columns
WHERE   table_schema = 'public' AND table_name IN (SELECT viewname FROM pg_views WHERE schemaname = 'public')`
	rows, err := db.Query(t.Context(), columnsSQL)
	if err != nil {
		t.Fatal(err)
	}
	columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ View, Column string }])
	if err != nil {
		t.Fatal(err)
	}
	if len(columns) < 60 {
		t.Errorf("only %d columns: the query for them is wrong", len(columns))
	}
	for _, c := range columns {
		words := strings.FieldsFunc(views[c.View], func(r rune) bool { return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyz_", r) })
		found := false
		for _, word := range words {
			found = found || word == c.Column
		}
		if !found {
			t.Errorf("the golden text of %s leaves out %s", c.View, c.Column)
		}
	}
}
