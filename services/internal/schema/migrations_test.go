package schema

import (
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/migrations"
	"berth/pkg/migrate"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
)

const fixtures = "../../../migrations/testdata/fixtures"

var quiet = slog.New(slog.DiscardHandler)

// upTo returns the migrations up to a number.
func upTo(t *testing.T, last int64) fs.FS {
	t.Helper()
	dir := t.TempDir()
	names, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if name[:5] > fmt.Sprintf("%05d", last) {
			continue
		}
		text, err := fs.ReadFile(migrations.FS, name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return os.DirFS(dir)
}

func loadFixture(t *testing.T, db *pgdb.DB, version int64) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(fixtures, fmt.Sprintf("%05d.sql", version)))
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, db, string(text))
}

func versions(t *testing.T, url string) []int64 {
	t.Helper()
	entries, err := migrate.Status(t.Context(), url, migrations.FS)
	if err != nil {
		t.Fatal(err)
	}
	var all []int64
	for _, e := range entries {
		all = append(all, e.Version)
	}
	return all
}

func TestEachMigrationCanBeTakenBackAndAppliedAgainWithRows(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	for _, version := range versions(t, db.URL) {
		files := upTo(t, version)
		before := describe(t, db.DB)
		if _, err := migrate.Up(t.Context(), db.URL, files, quiet); err != nil {
			t.Fatal(err)
		}
		applied := describe(t, db.DB)
		loadFixture(t, db.DB, version)

		if err := migrate.Down(t.Context(), db.URL, files, 1, quiet); err != nil {
			t.Fatalf("down from %05d: %v", version, err)
		}
		if diff := cmp.Diff(before, describe(t, db.DB)); diff != "" {
			t.Errorf("%05d down leaves another schema than was before it (-before +after):\n%s", version, diff)
		}
		again, err := migrate.Up(t.Context(), db.URL, files, quiet)
		if err != nil {
			t.Fatalf("up again to %05d: %v", version, err)
		}
		if !slices.Equal(again, []int64{version}) {
			t.Errorf("up again applied %v, want %d alone", again, version)
		}
		if diff := cmp.Diff(applied, describe(t, db.DB)); diff != "" {
			t.Errorf("%05d makes another schema the second time (-first +second):\n%s", version, diff)
		}
		loadFixture(t, db.DB, version) // so the next one meets rows of this one
	}
}

func TestAllMigrationsTogetherGoDownToNothingAndUpAgain(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	full := describe(t, db.DB)
	all := versions(t, db.URL)
	for _, version := range all {
		loadFixture(t, db.DB, version)
	}
	if err := migrate.Down(t.Context(), db.URL, migrations.FS, len(all)+1, quiet); err != nil {
		t.Fatal(err)
	}
	if left := describe(t, db.DB); len(left) != 0 {
		t.Errorf("after all are taken back there is still: %v", left)
	}
	if _, err := migrate.Up(t.Context(), db.URL, migrations.FS, quiet); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(full, describe(t, db.DB)); diff != "" {
		t.Errorf("up again makes another schema (-first +second):\n%s", diff)
	}
}

func TestTenReplicasMayMigrateAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	want := versions(t, db.URL)
	var mu sync.Mutex
	var applied []int64
	var replicas sync.WaitGroup
	for range 10 {
		replicas.Go(func() {
			mine, err := migrate.Up(t.Context(), db.URL, migrations.FS, quiet)
			if err != nil {
				t.Errorf("one of ten: %v", err)
			}
			mu.Lock()
			defer mu.Unlock()
			applied = append(applied, mine...)
		})
	}
	replicas.Wait()
	slices.Sort(applied)
	if diff := cmp.Diff(want, applied); diff != "" {
		t.Errorf("migrations applied by all ten together (-want +got):\n%s", diff)
	}
	if err := pgdb.Gate(t.Context(), db.DB, migrations.Versions()); err != nil {
		t.Errorf("the gate after ten replicas: %v", err)
	}
}

func TestMigrationsOfALowerRangeMayComeLater(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	if _, err := migrate.Up(t.Context(), db.URL, migrations.FS, quiet); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.CopyFS(dir, upTo(t, 99999)); err != nil {
		t.Fatal(err)
	}
	late := "-- +goose Up\nCREATE TABLE late (id int);\n-- +goose Down\nDROP TABLE late;\n"
	if err := os.WriteFile(filepath.Join(dir, "00150_late.sql"), []byte(late), 0o600); err != nil {
		t.Fatal(err)
	}
	applied, err := migrate.Up(t.Context(), db.URL, os.DirFS(dir), quiet)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(applied, []int64{150}) {
		t.Errorf("Up with a file of a lower range applied %v, want 150", applied)
	}
}

func TestAServiceOnAnOlderSchemaIsToldWhatIsMissing(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	if _, err := migrate.Up(t.Context(), db.URL, upTo(t, 3), quiet); err != nil {
		t.Fatal(err)
	}
	err := pgdb.Gate(t.Context(), db.As(t, "berth_gateway"), migrations.Versions())
	const want = "schema is older than this build: run berth migrate up (missing 00004, 00005, 00006, 00007, 00008, 00009, 00010, 00011, 00200, 00400, 00401)"
	if err == nil || err.Error() != want {
		t.Errorf("Gate on a schema up to 00003 = %v, want %q", err, want)
	}
}
