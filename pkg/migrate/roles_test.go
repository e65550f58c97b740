package migrate_test

import (
	"context"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"berth/pkg/migrate"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
)

// as returns a URL of the same database for another login.
func as(t *testing.T, text, login, password string) string {
	t.Helper()
	u, err := url.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(login, password)
	return u.String()
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func exec(t *testing.T, conn *pgx.Conn, statements ...string) {
	t.Helper()
	for _, sql := range statements {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
}

func TestRolesAreMadeOnceWithTheirTimeouts(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, nil) // roles are the server's, and this one has none
	root := connect(t, server.URL("postgres"))
	exec(t, root, "CREATE DATABASE one", "CREATE DATABASE two")
	var replicas sync.WaitGroup
	for i := range 10 {
		replicas.Go(func() {
			if err := migrate.EnsureRoles(t.Context(), server.URL([]string{"one", "two"}[i%2])); err != nil {
				t.Errorf("one of ten: %v", err)
			}
		})
	}
	replicas.Wait()
	var settings []string
	const settingsSQL = `SELECT rolconfig FROM pg_roles WHERE rolname = 'berth_gateway' AND NOT rolcanlogin`
	if err := root.QueryRow(t.Context(), settingsSQL).Scan(&settings); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"statement_timeout=2000ms", "lock_timeout=200ms", "idle_in_transaction_session_timeout=2000ms"} {
		if !slices.Contains(settings, want) {
			t.Errorf("berth_gateway has %v, want %s among them", settings, want)
		}
	}
	var roles int
	if err := root.QueryRow(t.Context(), `SELECT count(*) FROM pg_roles WHERE rolname = ANY ($1)`, migrate.Groups()).Scan(&roles); err != nil {
		t.Fatal(err)
	}
	if roles != len(migrate.Groups()) {
		t.Errorf("%d roles were made, want %d", roles, len(migrate.Groups()))
	}
}

func TestARoleThatAnotherProcessIsMakingIsWaitedFor(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, nil)
	root := connect(t, server.URL("postgres"))
	other, err := connect(t, server.URL("postgres")).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Exec(t.Context(), "CREATE ROLE berth_scheduler NOLOGIN"); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- migrate.EnsureRoles(t.Context(), server.URL("postgres")) }()

	// Two waits of two statements: its lock_timeout has ended the first.
	const waitingSQL = `SELECT query_start::text FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'CREATE ROLE%'`
	waits := map[string]bool{}
	for len(waits) < 2 {
		var start string
		if err := root.QueryRow(t.Context(), waitingSQL).Scan(&start); err == nil {
			waits[start] = true
		} else if !errors.Is(err, pgx.ErrNoRows) {
			t.Fatal(err)
		}
		select {
		case err := <-done:
			t.Fatalf("EnsureRoles = %v before the other process had its role", err)
		default:
		}
	}
	if err := other.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("EnsureRoles = %v, want success once the other has made the role", err)
	}
}

func TestALoginWithoutARightIsToldWhichStatementHelps(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, nil)
	root := connect(t, server.URL("postgres"))
	exec(t, root, "CREATE ROLE plain LOGIN", "CREATE DATABASE d")
	plain := as(t, server.URL("d"), "plain", "x")

	refused := func(what string) string {
		t.Helper()
		_, err := migrate.Up(t.Context(), plain, files, quiet)
		if err == nil || !strings.Contains(err.Error(), what) {
			t.Fatalf("Up as plain = %v, want %q", err, what)
		}
		return err.Error()
	}
	says := refused(`plain may not create the role berth_migrator: a superuser must run: ALTER ROLE "plain" CREATEROLE`)
	if !strings.Contains(says, `or a superuser runs: CREATE ROLE "berth_migrator" NOLOGIN`) {
		t.Errorf("Up says %q, want the statement instead of the right", says)
	}
	if err := migrate.EnsureRoles(t.Context(), server.URL("postgres")); err != nil { // another database of the server
		t.Fatal(err)
	}
	refused("plain may not give the schema to berth_migrator: a superuser must run: ALTER DATABASE … OWNER TO \"plain\"")
	exec(t, root, "ALTER DATABASE d OWNER TO plain")
	refused(`plain may not become berth_migrator: a superuser must run: GRANT berth_migrator TO "plain"`)
	exec(t, root, "GRANT berth_migrator TO plain")
	if _, err := migrate.Up(t.Context(), plain, files, quiet); err != nil {
		t.Errorf("Up as plain with what it was told = %v", err)
	}
	if err := migrate.EnsureLogin(t.Context(), plain, "berth_dev_gateway", "pw", "berth_gateway"); err == nil ||
		!strings.Contains(err.Error(), `plain may not create the login berth_dev_gateway: a superuser must run: ALTER ROLE "plain" CREATEROLE`) {
		t.Errorf("EnsureLogin as plain = %v, want the missing right", err)
	}
}

func TestALoginGetsItsGroupItsTimeoutsAndItsPassword(t *testing.T) {
	t.Parallel()
	rules := filepath.Join(t.TempDir(), "pg_hba.conf")
	if err := os.Chmod(filepath.Dir(rules), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(rules, []byte("local all postgres trust\nlocal all all scram-sha-256\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		parent := filepath.Dir(filepath.Dir(rules)) // the server's user must get there
		if err := os.Chmod(parent, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	server := pgtest.NewServer(t, map[string]string{"hba_file": rules})
	db := server.New(files)
	for _, password := range []string{"first", "second"} { // the second call changes it
		if err := migrate.EnsureLogin(t.Context(), db.URL, "gateway1", password, "berth_gateway"); err != nil {
			t.Fatal(err)
		}
		own, err := pgdb.Open(t.Context(), pgdb.Config{URL: as(t, db.URL, "gateway1", password), MaxConns: 1, CheckTimeouts: new(pgdb.ReadTimeouts)})
		if err != nil {
			t.Fatalf("log in with %q: %v", password, err)
		}
		if err := pgdb.Gate(t.Context(), own, []int64{1, 2}); err != nil {
			t.Errorf("the gate for the new login: %v", err)
		}
		own.Close()
	}
	_, err := pgdb.Open(t.Context(), pgdb.Config{URL: as(t, db.URL, "gateway1", "first")})
	if err == nil || !strings.Contains(err.Error(), "as gateway1: the password is wrong; correct user and password") || strings.Contains(err.Error(), "first") {
		t.Errorf("Open with the old password = %v, want a refusal that says what to do", err)
	}
	if err := migrate.EnsureLogin(t.Context(), db.URL, "x", "", "berth_nobody"); err == nil || !strings.Contains(err.Error(), "berth_nobody is none of the group roles") {
		t.Errorf("EnsureLogin in an unknown group = %v", err)
	}
}

func TestAServerThatWasNeverMigratedHasNothingToTakeBack(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, nil)
	err := migrate.Down(t.Context(), server.URL("postgres"), files, 1, quiet)
	if err == nil || !strings.Contains(err.Error(), "this server was never migrated, run berth migrate up first") {
		t.Errorf("Down = %v, want what to do", err)
	}
}

func TestAnOwnerWhoMayCreateRolesNeedsNoSuperuser(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, nil)
	root := connect(t, server.URL("postgres"))
	exec(t, root, "CREATE ROLE operator LOGIN CREATEROLE", "CREATE DATABASE d OWNER operator")
	operator := as(t, server.URL("d"), "operator", "x")
	if _, err := migrate.Up(t.Context(), operator, files, quiet); err != nil {
		t.Errorf("Up as operator = %v", err)
	}
	if err := migrate.EnsureLogin(t.Context(), operator, "scheduler1", "", "berth_scheduler"); err != nil {
		t.Errorf("EnsureLogin as operator = %v", err)
	}
}
