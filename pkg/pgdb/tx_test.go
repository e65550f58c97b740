package pgdb_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
	"berth/pkg/waittest"
)

func rands() string { return rand.Text() }

// withUser returns a URL that logs in as somebody else, on a server that asks for no password.
func withUser(t *testing.T, text, user string) string {
	t.Helper()
	u, err := url.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if _, asks := u.User.Password(); asks {
		t.Skip("this server asks for passwords")
	}
	u.User = url.User(user)
	return u.String()
}

func TestTxRunsAgainAfterWhatAFreshReadMayHeal(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	for name, tt := range map[string]struct {
		code string
		runs int
	}{
		"a serialization failure": {"40001", 4},
		"a deadlock":              {"40P01", 4},
		"a lock timeout":          {"55P03", 4},
		"a unique violation":      {"23505", 1},
		"a cancelled statement":   {"57014", 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			runs := 0
			err := db.Tx(t.Context(), func(tx pgx.Tx) error {
				runs++
				_, err := tx.Exec(t.Context(), `DO $$ BEGIN RAISE SQLSTATE '`+tt.code+`'; END $$`)
				return err
			})
			if pgdb.Code(err) != tt.code || runs != tt.runs {
				t.Errorf("%d runs, then %v; want %d runs, then %s", runs, err, tt.runs, tt.code)
			}
		})
	}
}

func TestTxRunsAgainWhenItsConnectionTurnsOutToBeClosed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	runs := 0
	err := db.Tx(t.Context(), func(pgx.Tx) error {
		if runs++; runs == 1 {
			return fmt.Errorf("read: %w", pgconn.ErrConnClosed)
		}
		return nil
	})
	if err != nil || runs != 2 {
		t.Errorf("%d runs, then %v; want a second run that commits", runs, err)
	}
}

func TestTxSucceedsWhenALaterRunDoes(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	runs := 0
	err := db.Tx(t.Context(), func(tx pgx.Tx) error {
		runs++
		if _, err := tx.Exec(t.Context(), `UPDATE counters SET n = n + 1 WHERE id = 1`); err != nil {
			return err
		}
		if runs < 3 {
			return &pgconn.PgError{Code: "40P01"}
		}
		return nil
	})
	var n int
	if scanErr := db.QueryRow(t.Context(), `SELECT n FROM counters WHERE id = 1`).Scan(&n); scanErr != nil {
		t.Fatal(scanErr)
	}
	if err != nil || n != 1 {
		t.Errorf("Tx = %v and the counter is %d; want nil and 1: the runs that failed left nothing", err, n)
	}
}

func TestTransactionsInOppositeOrderAllCommit(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	var workers sync.WaitGroup
	for worker := range 4 {
		workers.Go(func() {
			for round := range 10 {
				first, second := 1, 2
				if (worker+round)%2 == 0 {
					first, second = 2, 1
				}
				err := db.Tx(t.Context(), func(tx pgx.Tx) error {
					for _, id := range []int{first, second} {
						if _, err := tx.Exec(t.Context(), `UPDATE counters SET n = n + 1 WHERE id = $1`, id); err != nil {
							return err
						}
					}
					return nil
				})
				if err != nil && pgdb.Code(err) != "40P01" {
					t.Errorf("worker %d, round %d: %v", worker, round, err)
				}
			}
		})
	}
	workers.Wait()
	var first, second int
	if err := db.QueryRow(t.Context(), `SELECT (SELECT n FROM counters WHERE id = 1), (SELECT n FROM counters WHERE id = 2)`).Scan(&first, &second); err != nil {
		t.Fatal(err)
	}
	if first != second || first == 0 {
		t.Errorf("the counters are %d and %d, want equal: a transaction is whole or nothing", first, second)
	}
}

func TestTxRollsBackWhateverEndsIt(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	mistake := errors.New("mistake")
	for name, end := range map[string]func(cancel func()) error{
		"an error of the function": func(func()) error { return mistake },
		"a context that ends":      func(cancel func()) error { cancel(); return mistake },
	} {
		ctx, cancel := context.WithCancel(t.Context())
		err := db.Tx(ctx, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `UPDATE counters SET n = 50 WHERE id = 3`); err != nil {
				return err
			}
			return end(cancel)
		})
		cancel()
		if !errors.Is(err, mistake) {
			t.Errorf("%s: Tx = %v, want the function's error", name, err)
		}
	}
	func() {
		defer func() { _ = recover() }()
		_ = db.Tx(t.Context(), func(tx pgx.Tx) error { panic("mistake") })
	}()
	var n int
	if err := db.QueryRow(t.Context(), `SELECT n FROM counters WHERE id = 3`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if n != 0 {
		t.Errorf("the counter is %d, want 0", n)
	}
	if used := db.Stat().AcquiredConns(); used != 0 {
		t.Errorf("%d connections are still held", used)
	}
}

func TestAConnectionLostDuringCommitIsUnknown(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	if _, err := db.Exec(t.Context(), `
CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER linger AFTER UPDATE ON counters DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION linger()`); err != nil {
		t.Fatal(err)
	}
	pid := make(chan uint32, 1)
	done := make(chan error, 1)
	runs := atomic.Int32{}
	go func() {
		done <- db.Tx(t.Context(), func(tx pgx.Tx) error {
			runs.Add(1)
			pid <- tx.Conn().PgConn().PID()
			_, err := tx.Exec(t.Context(), `UPDATE counters SET n = 1 WHERE id = 1`)
			return err
		})
	}()
	victim := waittest.Receive(t, "the transaction to begin", pid)
	const committingSQL = `SELECT query = 'commit' AND state = 'active' FROM pg_stat_activity WHERE pid = $1`
	for committing := false; !committing; {
		if err := db.QueryRow(t.Context(), committingSQL, victim).Scan(&committing); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.Exec(t.Context(), `SELECT pg_terminate_backend($1)`, victim); err != nil {
		t.Fatal(err)
	}
	err := waittest.Receive(t, "the end of the transaction", done)
	if !errors.Is(err, pgdb.ErrUnknown) || !pgdb.Unavailable(err) || runs.Load() != 1 {
		t.Errorf("Tx = %v after %d runs, want ErrUnknown, unavailable, after one", err, runs.Load())
	}
}

func TestADeferredConstraintThatFailsAtCommitIsNamed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	if _, err := db.Exec(t.Context(), `ALTER TABLE counters ADD CONSTRAINT counters_n_once UNIQUE (n, id) DEFERRABLE INITIALLY DEFERRED, ADD CONSTRAINT counters_parent FOREIGN KEY (n) REFERENCES counters DEFERRABLE INITIALLY DEFERRED NOT VALID`); err != nil {
		t.Fatal(err)
	}
	err := db.Tx(t.Context(), func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `UPDATE counters SET n = 99 WHERE id = 1`)
		return err
	})
	if pgdb.Constraint(err) != "counters_parent" || errors.Is(err, pgdb.ErrUnknown) {
		t.Errorf("Tx = %v, want the constraint counters_parent and no doubt", err)
	}
}

func TestConnectionsThatTheServerEndedInThePoolDoNotShow(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	other := db.As(t, "")
	endIdle := func() {
		var pid uint32
		if err := db.Tx(t.Context(), func(tx pgx.Tx) error {
			pid = tx.Conn().PgConn().PID()
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		// Within a second of its use the pool hands the connection out without a look at it.
		if _, err := other.Exec(t.Context(), "SELECT pg_terminate_backend($1, 5000)", int32(pid)); err != nil {
			t.Fatal(err)
		}
	}
	endIdle()
	if err := db.Tx(t.Context(), func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), "SELECT 1")
		return err
	}); err != nil {
		t.Errorf("Tx on a pool whose connection was ended = %v, want a run on another one", err)
	}
	endIdle()
	if _, err := db.Exec(t.Context(), "SELECT 1"); err != nil && !pgdb.Unavailable(err) {
		t.Errorf("Exec on a connection that was ended = %v, want nothing but unavailable", err)
	}
}

func TestAServerThatStopsIsUnavailableAndComesBack(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, nil)
	db := server.New(schema)
	server.Stop(0)
	err := db.Tx(t.Context(), func(tx pgx.Tx) error { return nil })
	if !pgdb.Unavailable(err) {
		t.Errorf("Tx on a stopped server = %v, want unavailable", err)
	}
	server.Start()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for {
		if err = db.Tx(ctx, func(tx pgx.Tx) error { return nil }); err == nil {
			return
		}
		if ctx.Err() != nil {
			t.Fatalf("Tx on a server that runs again: %v", err)
		}
	}
}
