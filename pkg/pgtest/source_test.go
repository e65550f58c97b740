package pgtest

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5"
)

var things = fstest.MapFS{"00001_things.sql": {Data: []byte(
	"-- +goose Up\nCREATE TABLE things (id int);\n-- +goose Down\nDROP TABLE things;\n")}}

func TestTheServerComesFromWhereTheVariablesSay(t *testing.T) {
	t.Parallel()
	const url = "postgres://somewhere/d"
	for name, tt := range map[string]struct {
		env  environment
		url  string
		none bool
		says string
	}{
		"a URL":                      {environment{url: url}, url, false, ""},
		"a URL before binaries":      {environment{url: url, bin: "/nowhere"}, url, false, ""},
		"local, and none there":      {environment{source: "local", url: url, bin: "/nowhere"}, "", true, "/nowhere"},
		"a folder without binaries":  {environment{bin: "/nowhere"}, "", false, "/nowhere"},
		"a source that is not known": {environment{source: "cloud"}, "", false, "want local or container"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := findServer(t.Context(), tt.env)
			if got != tt.url || (tt.says == "") != (err == nil) {
				t.Fatalf("findServer(%+v) = %q, %v; want %q", tt.env, got, err, tt.url)
			}
			if errors.Is(err, errNone) != tt.none {
				t.Errorf("findServer(%+v) = %v; a reason to skip: want %v", tt.env, err, tt.none)
			}
			if err != nil && !strings.Contains(err.Error(), tt.says) {
				t.Errorf("findServer(%+v) says %q, want %q in it", tt.env, err, tt.says)
			}
		})
	}
}

func TestAMachineWithoutPostgreSQLSkipsButCIFails(t *testing.T) {
	for name, tt := range map[string]struct {
		ci            string
		err           error
		skips, failed bool
	}{
		"nothing wrong":            {"", nil, false, false},
		"none, at somebody's desk": {"", errNone, true, false},
		"none, in CI":              {"1", errNone, false, true},
		"another mistake":          {"", errors.New("boom"), false, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("CI", tt.ci)
			r := &recorder{TB: t}
			r.run(func() { refuse(r, tt.err) })
			if r.skipped != tt.skips || r.failed != tt.failed {
				t.Errorf("with CI=%q and %v: skipped %v, failed %v; want %v, %v", tt.ci, tt.err, r.skipped, r.failed, tt.skips, tt.failed)
			}
		})
	}
}

// recorder is a test that only notes how it ended.
type recorder struct {
	testing.TB
	skipped, failed bool
	logged          []string
}

func (r *recorder) run(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { _ = recover() }()
		f()
	}()
	<-done
}

func (r *recorder) Skipf(string, ...any)  { r.skipped = true; panic("skipped") }
func (r *recorder) Fatalf(string, ...any) { r.failed = true; panic("failed") }
func (r *recorder) Failed() bool          { return r.failed }
func (r *recorder) Logf(format string, _ ...any) {
	r.logged = append(r.logged, format)
}

func exists(t *testing.T, server, name string) (found bool) {
	t.Helper()
	err := onServer(t.Context(), server, func(conn *pgx.Conn) error {
		return conn.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)`, name).Scan(&found)
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func databaseOf(t *testing.T, d *Database) (name string) {
	t.Helper()
	if err := d.QueryRow(t.Context(), `SELECT current_database()`).Scan(&name); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestADatabaseGoesWithItsTest(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	var name string
	t.Run("the test", func(t *testing.T) {
		d := New(t, things)
		name = databaseOf(t, d)
		if !exists(t, server, name) {
			t.Errorf("%s is not there while its test runs", name)
		}
		held, err := d.Acquire(t.Context()) // even a test that forgets a session
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { held.Release() })
	})
	if exists(t, server, name) {
		t.Errorf("%s is still there", name)
	}
}

func TestAFailedTestsDatabaseIsKeptOnRequest(t *testing.T) {
	server := sharedServer(t)
	name := databaseOf(t, New(t, things)) + "_kept"
	if err := copyDatabase(t.Context(), server, "template0", name); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		keep   string
		failed bool
		kept   bool
	}{{"1", true, true}, {"", true, false}} {
		t.Setenv("BERTH_TEST_KEEP", tt.keep)
		drop(&recorder{TB: t, failed: tt.failed}, server, name)
		if got := exists(t, server, name); got != tt.kept {
			t.Errorf("failed %v, BERTH_TEST_KEEP=%q: kept %v, want %v", tt.failed, tt.keep, got, tt.kept)
		}
	}
}

func TestATemplateIsBuiltOnceAndAgainWhenItsBuilderDied(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	files := fstest.MapFS{"00001_once.sql": {Data: []byte("-- +goose Up\nCREATE TABLE once AS SELECT clock_timestamp() AS at;\n-- +goose Down\nDROP TABLE once;\n-- " + random())}}
	built := func() (at string) {
		t.Helper()
		if err := New(t, files).QueryRow(t.Context(), `SELECT at::text FROM once`).Scan(&at); err != nil {
			t.Fatal(err)
		}
		return at
	}
	first := built()
	if second := built(); second != first {
		t.Errorf("built at %s and again at %s", first, second)
	}
	hash, err := hashOf(files)
	if err != nil {
		t.Fatal(err)
	}
	name := "berth_template_" + hash
	t.Cleanup(func() {
		err := onServer(context.WithoutCancel(t.Context()), server, func(conn *pgx.Conn) error {
			return execAll(context.WithoutCancel(t.Context()), conn, "ALTER DATABASE "+quote(name)+" IS_TEMPLATE false", "DROP DATABASE "+quote(name)+" WITH (FORCE)")
		})
		if err != nil {
			t.Error(err)
		}
	})
	err = onServer(t.Context(), server, func(conn *pgx.Conn) error {
		if err := buildTemplate(t.Context(), conn, server, name, files); err != nil { // another process finds it finished
			return err
		}
		return execAll(t.Context(), conn, "ALTER DATABASE "+quote(name)+" ALLOW_CONNECTIONS true") // as its builder left it
	})
	if err != nil {
		t.Fatal(err)
	}
	if third := built(); third != first {
		t.Errorf("another process built it again at %s", third)
	}
	templates.Lock()
	delete(templates.done, server+name) // what another process knows
	templates.Unlock()
	if fourth := built(); fourth == first {
		t.Error("an unfinished template was used")
	}
}

func TestWithDatabaseKeepsTheRestOfAURL(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"postgres://u:p@h:1/a?sslmode=disable": "postgres://u:p@h:1/b?sslmode=disable",
		"postgres://u@/a?host=%2Frun":          "postgres://u@/b?host=%2Frun",
		"host=h dbname=a user=u":               "host=h user=u dbname=b",
	} {
		if got := withDatabase(in, "b"); got != want {
			t.Errorf("withDatabase(%q) = %q, want %q", in, got, want)
		}
	}
}
