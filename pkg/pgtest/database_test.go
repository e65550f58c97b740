package pgtest_test

import (
	"testing"
	"testing/fstest"

	"go.uber.org/goleak"

	"berth/pkg/pgdb"
	"berth/pkg/pglocal"
	"berth/pkg/pgtest"
)

// Every package that tests with a database looks for leaks, so the server must not be one.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var schema = fstest.MapFS{"00001_things.sql": {Data: []byte(`-- +goose Up
CREATE TABLE things (id int PRIMARY KEY);
GRANT SELECT ON things TO berth_gateway;
-- +goose Down
DROP TABLE things;
`)}}

func TestEachTestHasItsOwnDatabase(t *testing.T) {
	t.Parallel()
	first, second := pgtest.New(t, schema), pgtest.New(t, schema)
	if _, err := first.Exec(t.Context(), `INSERT INTO things VALUES (1)`); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := second.QueryRow(t.Context(), `SELECT count(*) FROM things`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if n != 0 {
		t.Errorf("the second database has %d rows of the first", n)
	}
}

func TestARoleHasItsGrantsAndNoMore(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	gateway := db.As(t, "berth_gateway")
	if _, err := gateway.Exec(t.Context(), `SELECT id FROM things`); err != nil {
		t.Errorf("a granted read: %v", err)
	}
	if _, err := gateway.Exec(t.Context(), `INSERT INTO things VALUES (1)`); pgdb.Code(err) != "42501" {
		t.Errorf("a write that is not granted: %v, want 42501", err)
	}
}

func TestAServerOfItsOwnCrashesAndKeepsWhatWasCommitted(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, map[string]string{"max_connections": "20"})
	db := server.New(schema)
	if _, err := db.Exec(t.Context(), `INSERT INTO things VALUES (1)`); err != nil {
		t.Fatal(err)
	}
	server.Stop(pglocal.Immediate)
	if err := db.Ping(t.Context()); !pgdb.Unavailable(err) {
		t.Errorf("a stopped server answers %v, want unavailable", err)
	}
	server.Start()
	again, err := pgdb.Open(t.Context(), pgdb.Config{URL: db.URL, MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Close)
	var n, limit int
	if err := again.QueryRow(t.Context(), `SELECT count(*), current_setting('max_connections')::int FROM things`).Scan(&n, &limit); err != nil {
		t.Fatal(err)
	}
	if n != 1 || limit != 20 {
		t.Errorf("after a crash: %d rows and max_connections %d, want 1 and 20", n, limit)
	}
}
