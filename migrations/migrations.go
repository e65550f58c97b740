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
	"slices"
	"strconv"
	"strings"
)

// FS has the files at its root.
//
//go:embed *.sql
var FS embed.FS

// Versions returns the numbers of all files, ascending. A service asks for these before it serves, and
// not only for the highest: a later release may add a number below one that a database has. A database
// may have more.
func Versions() []int64 {
	names, err := fs.Glob(FS, "*.sql")
	if err != nil {
		panic(fmt.Sprintf("list embedded migrations: %v", err)) // the pattern is a constant
	}
	versions := make([]int64, len(names))
	for i, name := range names {
		versions[i] = number(name)
	}
	slices.Sort(versions)
	return versions
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
