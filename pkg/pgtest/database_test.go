package pgtest_test

import (
	"testing"
	"testing/fstest"

	"berth/pkg/pgtest"
)

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
