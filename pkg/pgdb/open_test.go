package pgdb_test

import (
	"context"
	"errors"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"berth/pkg/migrate"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
)

func TestOpenSaysWhereItFailedAndWhatToDo(t *testing.T) {
	t.Parallel()
	closed, err := net.Listen("tcp", "127.0.0.1:0") // a port that nobody listens on any more
	if err != nil {
		t.Fatal(err)
	}
	address := closed.Addr().String()
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	db := pgtest.Empty(t)
	elsewhere, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	elsewhere.Path = "/nowhere"
	for name, tt := range map[string]struct {
		url  string
		says []string
	}{
		"nothing listens":         {"postgres://u:s3cret@" + address + "/d", []string{address + "/d as u", "nothing listens there; start PostgreSQL"}},
		"no such socket":          {"postgres://u:s3cret@/d?host=/nowhere", []string{"/nowhere/.s.PGSQL.5432/d as u", "no such socket"}},
		"no such host":            {"postgres://u:s3cret@nowhere.invalid/d", []string{"nowhere.invalid:5432/d", "the host name is not known"}},
		"no such database":        {elsewhere.String(), []string{"/nowhere as", "create it with createdb"}},
		"no URL":                  {"", []string{"the database URL is empty", "BERTH_DATABASE_URL"}},
		"no URL at all":           {"postgres//u:s3cret@h/d", []string{"the database URL cannot be read", "want postgres://"}},
		"a port that is none":     {"postgres://u:s3cret@h:port/d", []string{"the database URL cannot be read", "want postgres://"}},
		"a password with a slash": {"postgres://u:s3cret/x@h:5432/d", []string{"the database URL cannot be read"}},
		"a mode that is none":     {"postgres://u:s3cret@h/d?sslmode=sometimes", []string{"the database URL cannot be read", "sslmode"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			_, err := pgdb.Open(ctx, pgdb.Config{URL: tt.url})
			if err == nil {
				t.Fatal("Open found a database")
			}
			for _, part := range tt.says {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("Open says %q, want %q in it", err, part)
				}
			}
			if strings.Contains(err.Error(), "s3cret") {
				t.Errorf("Open tells the password: %q", err)
			}
		})
	}
}

func TestOpenRefusesTimeoutsThatAreTooLong(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	login := "berth_test_login_" + strings.ToLower(rands())
	if err := migrate.EnsureLogin(t.Context(), db.URL, login, "", "berth_scheduler"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := db.Exec(context.WithoutCancel(t.Context()), "DROP ROLE "+login); err != nil {
			t.Error(err)
		}
	})
	as := pgdb.Config{URL: withUser(t, db.URL, login), MaxConns: 1, CheckTimeouts: new(pgdb.WriteTimeouts)}
	good, err := pgdb.Open(t.Context(), as)
	if err != nil {
		t.Fatalf("Open with the group's timeouts: %v", err)
	}
	good.Close()

	for _, change := range []string{" SET statement_timeout = '6s'", " SET idle_in_transaction_session_timeout = 0"} {
		if _, err := db.Exec(t.Context(), "ALTER ROLE "+login+change); err != nil {
			t.Fatal(err)
		}
	}
	_, err = pgdb.Open(t.Context(), as)
	if !errors.Is(err, pgdb.ErrTimeouts) {
		t.Fatalf("Open = %v, want ErrTimeouts", err)
	}
	for _, part := range []string{`ALTER ROLE "` + login + `" SET statement_timeout = '5000ms'`, "SET idle_in_transaction_session_timeout"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("Open says %q, want %q in it", err, part)
		}
	}
	if strings.Contains(err.Error(), "lock_timeout") {
		t.Errorf("Open says %q, but lock_timeout is right", err)
	}
}

func TestAPoolWithoutAFreeConnectionIsUnavailableSoon(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	one, err := pgdb.Open(t.Context(), pgdb.Config{URL: db.URL, MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(one.Close)
	held, err := one.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, err = one.Exec(t.Context(), "SELECT 1")
	if !errors.Is(err, pgdb.ErrPoolWait) || !pgdb.Unavailable(err) {
		t.Errorf("Exec on a used up pool = %v, want ErrPoolWait, unavailable", err)
	}
	var n int
	if err := one.QueryRow(t.Context(), "SELECT 1").Scan(&n); !errors.Is(err, pgdb.ErrPoolWait) {
		t.Errorf("QueryRow on a used up pool = %v, want ErrPoolWait", err)
	}
	held.Release()
	for range 3 { // each gives its connection back
		if err := one.QueryRow(t.Context(), "SELECT 1").Scan(&n); err != nil {
			t.Fatal(err)
		}
		rows, err := one.Query(t.Context(), "SELECT id FROM counters")
		if err != nil {
			t.Fatal(err)
		}
		for rows.Next() {
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
	}
	if used := one.Stat().AcquiredConns(); used != 0 {
		t.Errorf("%d connections are still held", used)
	}
}
