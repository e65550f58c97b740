package migrate_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"

	"berth/pkg/migrate"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
)

func TestStatusTellsWhatWasApplied(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	status := func() []migrate.Entry {
		t.Helper()
		entries, err := migrate.Status(t.Context(), db.URL, files)
		if err != nil {
			t.Fatal(err)
		}
		return entries
	}
	want := []migrate.Entry{{Version: 1, Name: "00001_things.sql"}, {Version: 2, Name: "00002_parts.sql"}}
	when := cmpopts.IgnoreFields(migrate.Entry{}, "AppliedAt")
	if diff := cmp.Diff(want, status(), when); diff != "" {
		t.Errorf("status of an empty database (-want +got):\n%s", diff)
	}
	applied, err := migrate.Up(t.Context(), db.URL, files, quiet)
	if err != nil || !slices.Equal(applied, []int64{1, 2}) {
		t.Fatalf("Up = %v, %v; want 1 and 2", applied, err)
	}
	if again, err := migrate.Up(t.Context(), db.URL, files, quiet); err != nil || len(again) != 0 {
		t.Errorf("Up again = %v, %v; want nothing to do", again, err)
	}
	want[0].Applied, want[1].Applied = true, true
	got := status()
	if diff := cmp.Diff(want, got, when); diff != "" {
		t.Errorf("status after Up (-want +got):\n%s", diff)
	}
	if age := time.Since(got[0].AppliedAt); age < -time.Minute || age > time.Hour {
		t.Errorf("applied at %s, want about now", got[0].AppliedAt)
	}
	if err := migrate.Down(t.Context(), db.URL, files, 1, quiet); err != nil {
		t.Fatal(err)
	}
	want[1].Applied = false
	if diff := cmp.Diff(want, status(), when); diff != "" {
		t.Errorf("status after one Down (-want +got):\n%s", diff)
	}
	if err := migrate.Down(t.Context(), db.URL, files, 5, quiet); err != nil {
		t.Errorf("Down by more than there are: %v", err)
	}
}

func TestAFileThatFailsIsNamedAndLeavesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	broken := maps.Clone(files)
	broken["00003_broken.sql"] = file("CREATE TABLE half (id int);\nSELECT no_such_column;", "")
	applied, err := migrate.Up(t.Context(), db.URL, broken, quiet)
	if err == nil || !strings.Contains(err.Error(), "apply 00003_broken.sql") || pgdb.Code(err) != "42703" {
		t.Errorf("Up = %v, want 42703 in 00003_broken.sql", err)
	}
	if !slices.Equal(applied, []int64{1, 2}) {
		t.Errorf("Up applied %v before it failed, want 1 and 2", applied)
	}
	var half *string
	if err := db.QueryRow(t.Context(), `SELECT to_regclass('half')::text`).Scan(&half); err != nil || half != nil {
		t.Errorf("the broken file left %v (%v), want nothing", half, err)
	}
	if again, err := migrate.Up(t.Context(), db.URL, files, quiet); err != nil || len(again) != 0 {
		t.Errorf("Up without the broken file = %v, %v; want nothing to do", again, err)
	}
}

func TestAFileThatMeetsAReaderIsTriedAgain(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	if _, err := migrate.Up(t.Context(), db.URL, files, quiet); err != nil {
		t.Fatal(err)
	}
	reader, err := db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := reader.Exec(t.Context(), `SELECT * FROM things`); err != nil {
		t.Fatal(err)
	}
	wider := maps.Clone(files)
	wider["00003_wider.sql"] = file("ALTER TABLE things ADD COLUMN name text;", "ALTER TABLE things DROP COLUMN name;")
	done := make(chan error, 1)
	go func() {
		_, err := migrate.Up(t.Context(), db.URL, wider, quiet)
		done <- err
	}()
	// Another reader stands behind the migration for fifty milliseconds at most, whatever the first
	// one does. Three tries of it must have been seen to fail before the first reader ends.
	const triesSQL = `SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()`
	var before, now int
	if err := db.QueryRow(t.Context(), triesSQL).Scan(&before); err != nil {
		t.Fatal(err)
	}
	for now = before; now < before+3; {
		if err := db.QueryRow(t.Context(), triesSQL).Scan(&now); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-done:
			t.Fatalf("Up ended behind a reader: %v", err)
		default:
		}
	}
	if err := reader.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("Up when the reader has ended: %v", err)
	}
}

func TestAContextThatEndsStopsAWaitingMigration(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	if _, err := migrate.Up(t.Context(), db.URL, files, quiet); err != nil {
		t.Fatal(err)
	}
	reader, err := db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reader.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := reader.Exec(t.Context(), `SELECT * FROM parts`); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if err := migrate.Down(ctx, db.URL, files, 1, quiet); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Down behind a reader = %v, want the context's end", err)
	}
}

func TestADatabaseThatCannotBeReachedIsNamed(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(url string) error{
		"Up":       func(url string) error { _, err := migrate.Up(t.Context(), url, files, quiet); return err },
		"Down":     func(url string) error { return migrate.Down(t.Context(), url, files, 1, quiet) },
		"Status":   func(url string) error { _, err := migrate.Status(t.Context(), url, files); return err },
		"NewEpoch": func(url string) error { return migrate.NewEpoch(t.Context(), url) },
	} {
		err := call("postgres://u:s3cret@/d?host=/nowhere")
		if err == nil || !strings.Contains(err.Error(), "connect to PostgreSQL at /nowhere/.s.PGSQL.5432/d as u: there is no such socket") {
			t.Errorf("%s = %v, want where it failed and what to do", name, err)
		}
		if err != nil && strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s tells the password: %v", name, err)
		}
		if err := call(""); err == nil || !strings.Contains(err.Error(), "the database URL is empty") {
			t.Errorf("%s without a URL = %v", name, err)
		}
	}
}

func TestAMigrationWithoutANumberIsRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	_, err := migrate.Status(t.Context(), db.URL, fstest.MapFS{"things.sql": file("", "")})
	if err == nil || !strings.Contains(err.Error(), "things.sql: its name must begin with a number") {
		t.Errorf("Status = %v, want the name and the rule", err)
	}
}

func TestWhatMigrationsMakeBelongsToTheMigrators(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, files)
	const ownersSQL = `SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relnamespace = 'public'::regnamespace`
	rows, err := db.Query(t.Context(), ownersSQL)
	if err != nil {
		t.Fatal(err)
	}
	owners, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || !slices.Equal(owners, []string{"berth_migrator"}) {
		t.Errorf("owners are %v (%v), want berth_migrator alone", owners, err)
	}
}
