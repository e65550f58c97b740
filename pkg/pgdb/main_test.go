package pgdb_test

import (
	"testing"
	"testing/fstest"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// schema has what pgdb asks of a database.
var schema = fstest.MapFS{
	"00001_lock_key.sql": {Data: []byte(`-- +goose Up
CREATE FUNCTION lock_key(class int, id text) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (class::bigint << 56) | (hashtextextended(id, 0) & 72057594037927935);
CREATE TABLE counters (id int PRIMARY KEY, n int NOT NULL CONSTRAINT counters_small CHECK (n < 100));
INSERT INTO counters SELECT id, 0 FROM generate_series(1, 20) AS id;
GRANT SELECT, UPDATE ON counters TO berth_scheduler;
-- +goose Down
DROP TABLE counters;
DROP FUNCTION lock_key(int, text);
`)},
	"00101_later.sql": {Data: []byte("-- +goose Up\nCREATE TABLE later (id int);\n-- +goose Down\nDROP TABLE later;\n")},
}
