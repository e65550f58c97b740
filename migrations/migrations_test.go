package migrations

import (
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
)

func TestVersionsAreAllNumbersAscending(t *testing.T) {
	t.Parallel()
	if got, want := Versions(), []int64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 200, 400, 401}; !slices.Equal(got, want) {
		t.Errorf("Versions() = %v, want %v", got, want)
	}
}

func TestEachFileIsNumberedOnceAndSafeToApply(t *testing.T) {
	t.Parallel()
	names, err := fs.Glob(FS, "*.sql")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[int64]string{}
	for _, name := range names {
		version := number(name)
		if other, ok := seen[version]; ok {
			t.Errorf("%s and %s have one number", other, name)
		}
		seen[version] = name
		text, err := fs.ReadFile(FS, name)
		if err != nil {
			t.Fatal(err)
		}
		up, down, found := strings.Cut(string(text), "-- +goose Down\n")
		if !found {
			t.Errorf("%s has no way down", name)
		}
		for part, sql := range map[string]string{"Up": up, "Down": down} {
			sql = strings.TrimPrefix(sql, "-- +goose Up\n")
			if !strings.HasPrefix(sql, "SET lock_timeout = '50ms';\n") {
				t.Errorf("%s, %s: does not begin with SET lock_timeout = '50ms'", name, part)
			}
		}
		if _, err := os.Stat(path.Join("testdata", "fixtures", name[:5]+".sql")); err != nil {
			t.Errorf("%s has no fixture: %v", name, err)
		}
	}
}
