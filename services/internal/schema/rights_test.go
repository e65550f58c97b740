package schema

import (
	"fmt"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"berth/migrations"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
)

const insufficientPrivilege = "42501"

// rights is what each role may do to each table: r read, a insert, w update, d delete. What is not
// here is forbidden.
var rights = map[string]map[string]string{
	"berth_scheduler": {
		"nodes": "rawd", "node_leases": "rawd", "peer_endpoints": "rawd", "drains": "rawd", "discovery_writer": "raw", "cpu_templates": "rawd",
		"placements": "rawd", "reservations": "rawd", "tenant_quotas": "rawd", "bindings": "rawd",
		"route_feed": "rad", "feed_meta": "rw", "feed_marks": "rad",
		"p2p_artifacts": "rawd", "p2p_holders": "rad",
		"orphans": "rawd", "sandbox_events": "ra",
	},
	"berth_gateway": {
		"nodes": "r", "node_leases": "r", "peer_endpoints": "r", "bindings": "r", "route_feed": "r", "feed_meta": "r",
	},
	"berth_sessions":   {"bindings": "r", "principals": "rawd"},
	"berth_dispatcher": {"principals": "r"},
	"berth_history":    {},
	"berth_console":    {},
}

// attempts are statements that touch no row, so that only the right to run them is tried. column is
// the table's first.
var attempts = map[rune]func(table, column string) string{
	'r': func(table, column string) string { return fmt.Sprintf("SELECT %s FROM %s LIMIT 0", column, table) },
	'a': func(table, column string) string {
		return fmt.Sprintf("INSERT INTO %s (%s) OVERRIDING SYSTEM VALUE SELECT (json_populate_record(NULL::%s, '{}')).%s LIMIT 0", table, column, table, column)
	},
	'w': func(table, column string) string {
		return fmt.Sprintf("UPDATE %s SET %s = DEFAULT WHERE false", table, column)
	},
	'd': func(table, column string) string { return fmt.Sprintf("DELETE FROM %s WHERE false", table) },
}

const tablesSQL = `
SELECT  c.relname AS name, (SELECT a.attname FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum LIMIT 1) AS column
FROM    pg_class AS c
WHERE   c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND c.relname NOT LIKE 'goose_%'
ORDER   BY c.relname`

func TestEachRoleMayDoWhatItIsGrantedAndNothingElse(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	rows, err := db.Query(t.Context(), tablesSQL)
	if err != nil {
		t.Fatal(err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ Name, Column string }])
	if err != nil {
		t.Fatal(err)
	}
	if len(tables) < 11 {
		t.Fatalf("only %d tables: the query for them is wrong", len(tables))
	}
	for role, granted := range rights {
		as := db.As(t, role)
		for table := range granted {
			if !slices.ContainsFunc(tables, func(x struct{ Name, Column string }) bool { return x.Name == table }) {
				t.Errorf("%s is granted rights on %s, which does not exist", role, table)
			}
		}
		for _, table := range tables {
			for right, attempt := range attempts {
				_, err := as.Exec(t.Context(), attempt(table.Name, table.Column))
				may := pgdb.Code(err) != insufficientPrivilege
				want := slices.Contains([]rune(granted[table.Name]), right)
				if may != want || (want && err != nil) {
					t.Errorf("%s, right %c on %s: allowed %v, want %v (%v)", role, right, table.Name, may, want, err)
				}
			}
		}
	}
}

func TestNoServiceCanChangeTheSchema(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	for role := range rights {
		as := db.As(t, role)
		for _, ddl := range []string{
			"CREATE TABLE public.mine (id int)", "ALTER TABLE bindings ADD COLUMN mine int", "DROP TABLE bindings",
			"TRUNCATE bindings", "CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
		} {
			if _, err := as.Exec(t.Context(), ddl); pgdb.Code(err) != insufficientPrivilege {
				t.Errorf("%s: %s: %v, want SQLSTATE %s", role, ddl, err, insufficientPrivilege)
			}
		}
	}
}

func TestOnlySessionsMayFeedAKey(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	for role := range rights {
		_, err := db.As(t, role).Exec(t.Context(), "SELECT feed_key('0123456789ab')")
		if want := role == "berth_sessions"; (err == nil) != want {
			t.Errorf("%s calls feed_key: %v, want allowed %v", role, err, want)
		}
	}
	const fedSQL = `SELECT kind, key, revision > 0, state FROM route_feed`
	rows, err := db.Query(t.Context(), fedSQL)
	if err != nil {
		t.Fatal(err)
	}
	type fed struct {
		Kind, Key   string
		HasRevision bool
		State       string
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[fed])
	if err != nil {
		t.Fatal(err)
	}
	if want := []fed{{"key", "0123456789ab", true, ""}}; !slices.Equal(got, want) {
		t.Errorf("the feed after one allowed call = %v, want %v", got, want)
	}
}

func TestTheGatewayReadsItsPositionInTheFeed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	const identitySQL = `
SELECT (SELECT system_identifier FROM pg_control_system()), (SELECT oid FROM pg_database WHERE datname = current_database()),
       substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8), (SELECT epoch FROM feed_meta), pg_current_snapshot()::text`
	if _, err := db.As(t, "berth_gateway").Exec(t.Context(), identitySQL); err != nil {
		t.Errorf("berth_gateway reads the identity of the feed: %v", err)
	}
}
