// Package migrations is Berth's schema: numbered SQL files, each with its way down, and the grants
// of the tables it makes. berth migrate applies them; no service does.
//
// Numbers have five digits and are sequential inside an area's range of a hundred: 00001 the
// scheduler and what all share, 00100 sessions and sandboxes, 00200 the gateway, 00300 the
// dispatcher, 00400 views and reports. A file names only objects of its own or a lower range.
package migrations

import (
	"embed"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// FS has the files at its root.
//
//go:embed *.sql
var FS embed.FS

// rangeSize is how many numbers each area has.
const rangeSize = 100

// Latest returns the highest number in each range that has files, ascending. A service asks for
// these before it serves; a database may have more.
func Latest() []int64 {
	names, err := fs.Glob(FS, "*.sql")
	if err != nil {
		panic(fmt.Sprintf("list embedded migrations: %v", err)) // the pattern is a constant
	}
	highest := map[int64]int64{}
	for _, name := range names {
		version := number(name)
		highest[version/rangeSize] = max(highest[version/rangeSize], version)
	}
	return slices.Sorted(maps.Values(highest))
}

// number returns the number of an embedded file.
func number(name string) int64 {
	digits, _, _ := strings.Cut(name, "_")
	version, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || len(digits) != 5 {
		panic(fmt.Sprintf("migration %s: its name must begin with five digits and an underscore", name))
	}
	return version
}
