package migrate_test

import (
	"log/slog"
	"testing"
	"testing/fstest"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.DiscardHandler)

func file(up, down string) *fstest.MapFile {
	return &fstest.MapFile{Data: []byte("-- +goose Up\nSET lock_timeout = '50ms';\n" + up + "\n-- +goose Down\nSET lock_timeout = '50ms';\n" + down + "\n")}
}

var files = fstest.MapFS{
	"00001_things.sql": file("CREATE TABLE things (id int);", "DROP TABLE things;"),
	"00002_parts.sql":  file("CREATE TABLE parts (id int);", "DROP TABLE parts;"),
}
