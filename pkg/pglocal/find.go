package pglocal

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
)

// MinMajor is the oldest PostgreSQL that Berth works with.
const MinMajor = 15

// ErrNoBinaries is returned when this machine has no PostgreSQL server that is new enough.
var ErrNoBinaries = errors.New("no PostgreSQL server found on this machine")

// binVariable names the folder to use instead of looking for one. It is read here and not by a flag,
// for this package's error tells of it, in whatever program it appears.
const binVariable = "BERTH_POSTGRES_BIN"

// install says what to do about ErrNoBinaries.
const install = "install one (apt-get install postgresql; dnf install postgresql-server; brew install postgresql), " +
	"or set " + binVariable + " to the folder of its initdb and postgres, or use a running server by its URL"

// versionedFolders are where distributions put servers without adding them to PATH.
var versionedFolders = []string{
	"/usr/lib/postgresql/*/bin",
	"/usr/pgsql-*/bin",
	"/usr/lib64/pgsql/bin",
	"/usr/local/pgsql/bin",
	"/opt/homebrew/opt/postgresql@*/bin",
	"/usr/local/opt/postgresql@*/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
}

// Binaries is a folder with initdb and postgres.
type Binaries struct {
	Dir     string
	Major   int
	Version string // as the server says it: "15.18"
}

// Path returns the path of one of the programs.
func (b *Binaries) Path(program string) string { return filepath.Join(b.Dir, program) }

// Find returns the server to use: of the extra folders that are not empty, which must hold one; else
// of the folder in BERTH_POSTGRES_BIN, likewise; else the one on PATH; else the newest of the
// distribution's folders. Without any the error is ErrNoBinaries and says what to install.
func Find(extra ...string) (*Binaries, error) {
	found, err := FindAll(extra...)
	if err != nil {
		return nil, err
	}
	return found[0], nil
}

// FindAll returns every server that Find would choose from, best first; at least one if err is nil.
func FindAll(extra ...string) ([]*Binaries, error) {
	extra = slices.DeleteFunc(slices.Clone(extra), func(dir string) bool { return dir == "" })
	if len(extra) > 0 {
		return findIn(extra)
	}
	if dir := os.Getenv(binVariable); dir != "" { //nolint:forbidigo // see binVariable
		return findIn([]string{dir})
	}
	var found []*Binaries
	var tooOld []string
	add := func(dir string) {
		b, err := inspect(dir)
		switch {
		case err != nil || slices.ContainsFunc(found, func(f *Binaries) bool { return f.Dir == b.Dir }):
		case b.Major < MinMajor:
			tooOld = append(tooOld, b.Dir+" ("+b.Version+")")
		default:
			found = append(found, b)
		}
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		add(filepath.Dir(resolve(path)))
	}
	if path, err := exec.LookPath("initdb"); err == nil {
		add(filepath.Dir(resolve(path)))
	}
	onPath := len(found)
	for _, pattern := range versionedFolders {
		dirs, err := filepath.Glob(pattern)
		if err != nil {
			return nil, fmt.Errorf("look for PostgreSQL in %s: %w", pattern, err)
		}
		for _, dir := range dirs {
			add(dir)
		}
	}
	slices.SortStableFunc(found[onPath:], func(a, b *Binaries) int { return cmp.Compare(b.Major, a.Major) })
	if len(found) == 0 && len(tooOld) > 0 {
		return nil, fmt.Errorf("%w that is %d or newer, only %v: %s", ErrNoBinaries, MinMajor, tooOld, install)
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("%w: %s", ErrNoBinaries, install)
	}
	return found, nil
}

// findIn inspects folders that somebody named: each must be right.
func findIn(dirs []string) ([]*Binaries, error) {
	var found []*Binaries
	for _, dir := range dirs {
		b, err := inspect(dir)
		if err != nil {
			return nil, fmt.Errorf("%w in %s: %w", ErrNoBinaries, dir, err)
		}
		if b.Major < MinMajor {
			return nil, fmt.Errorf("%w in %s: it is %s, at least %d is needed", ErrNoBinaries, dir, b.Version, MinMajor)
		}
		found = append(found, b)
	}
	return found, nil
}

// resolve follows links: a program on PATH is often one into a versioned folder, and postgres finds
// its libraries beside the real one.
func resolve(path string) string {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}

var versionText = regexp.MustCompile(`\(PostgreSQL\) ((\d+)[^ \n]*)`)

func inspect(dir string) (*Binaries, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("inspect %s: %w", dir, err)
	}
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	for _, program := range []string{"initdb", "postgres"} {
		if _, err := os.Stat(filepath.Join(dir, program)); err != nil {
			return nil, fmt.Errorf("there is no %s: %w", program, err)
		}
	}
	out, err := exec.Command(filepath.Join(dir, "postgres"), "--version").Output() //nolint:noctx // it answers at once
	if err != nil {
		return nil, fmt.Errorf("ask postgres for its version: %w", err)
	}
	match := versionText.FindSubmatch(out)
	if match == nil {
		return nil, fmt.Errorf("postgres --version says %q, which has no version", out)
	}
	major, err := strconv.Atoi(string(match[2]))
	if err != nil {
		return nil, fmt.Errorf("postgres --version says %q: %w", out, err)
	}
	return &Binaries{Dir: dir, Major: major, Version: string(match[1])}, nil
}
