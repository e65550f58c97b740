package pgtest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
)

const (
	testConns    = 4
	setupLimit   = 5 * time.Minute // on a loaded machine, with a server and a template to make
	cleanupLimit = time.Minute
)

// clones limits how many databases are copied at once: copying is disk and CPU, and more at once
// only wait for each other.
var clones = make(chan struct{}, 2*runtime.NumCPU())

// Database is one test's database, with a pool that logs in as its owner.
type Database struct {
	*pgdb.DB
	URL string
}

// New returns a database with all migrations of fsys applied, which lives as long as t. It may be
// called at once in parallel tests, and more than once in one test.
func New(t testing.TB, fsys fs.FS) *Database {
	t.Helper()
	return clone(t, sharedServer(t), fsys)
}

// Empty returns a database without any migration, which lives as long as t.
func Empty(t testing.TB) *Database {
	t.Helper()
	return clone(t, sharedServer(t), nil)
}

func clone(t testing.TB, server string, fsys fs.FS) *Database {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), setupLimit)
	defer cancel()

	template := "template0"
	if fsys != nil {
		var err error
		if template, err = ensureTemplate(ctx, server, fsys); err != nil {
			t.Fatalf("pgtest: %v", err)
		}
	}
	name := "berth_test_" + random()
	if err := copyDatabase(ctx, server, template, name); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	d := &Database{URL: withDatabase(server, name)}
	t.Cleanup(func() { drop(t, server, name) })
	d.DB = open(t, pgdb.Config{URL: d.URL, Name: "pgtest"})
	return d
}

// As returns a pool of the same database whose connections act as role, one of the group roles, with
// nothing but its grants. It closes when t ends.
func (d *Database) As(t testing.TB, role string) *pgdb.DB {
	t.Helper()
	return open(t, pgdb.Config{URL: d.URL, Name: "pgtest as " + role, Role: role})
}

func open(t testing.TB, cfg pgdb.Config) *pgdb.DB {
	t.Helper()
	cfg.MaxConns, cfg.MinConns = testConns, -1
	db, err := pgdb.Open(t.Context(), cfg)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(db.Close)
	return db
}

// copyDatabase takes the slot of a copy. Another session may still be leaving the template, and then
// the server refuses: so it is asked again.
func copyDatabase(ctx context.Context, server, template, name string) error {
	select {
	case clones <- struct{}{}:
		defer func() { <-clones }()
	case <-ctx.Done():
		return fmt.Errorf("wait to copy a database: %w", ctx.Err())
	}
	return onServer(ctx, server, func(conn *pgx.Conn) error {
		const objectInUse = "55006"
		create := fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s STRATEGY FILE_COPY", quote(name), quote(template))
		for {
			_, err := conn.Exec(ctx, create)
			if err == nil {
				return nil
			}
			if pgdb.Code(err) != objectInUse || ctx.Err() != nil {
				return fmt.Errorf("copy %s: %w", template, err)
			}
		}
	})
}

func drop(t testing.TB, server, name string) {
	t.Helper()
	if t.Failed() && os.Getenv("BERTH_TEST_KEEP") != "" {
		t.Logf("pgtest: kept for you: psql '%s'", withDatabase(server, name))
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), cleanupLimit)
	defer cancel()
	err := onServer(ctx, server, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+quote(name)+" WITH (FORCE)")
		return err
	})
	if err != nil {
		t.Logf("pgtest: drop %s: %v", name, err)
	}
}

// onServer runs f on one connection to the server's own database.
func onServer(ctx context.Context, server string, f func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, server)
	if err != nil {
		return pgdb.ExplainConnect(server, err)
	}
	defer func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(ending) // the work is done or has failed; either way the session ends
	}()
	return f(conn)
}

// withDatabase returns server's URL with another database.
func withDatabase(server, name string) string {
	u, err := url.Parse(server)
	if err != nil || u.Scheme == "" {
		var words []string
		for word := range strings.FieldsSeq(server) { // key=value form
			if !strings.HasPrefix(word, "dbname=") {
				words = append(words, word)
			}
		}
		return strings.Join(append(words, "dbname="+name), " ")
	}
	u.Path = "/" + name
	return u.String()
}

func random() string {
	bytes := make([]byte, 8)
	_, _ = rand.Read(bytes) // never fails
	return hex.EncodeToString(bytes)
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }
