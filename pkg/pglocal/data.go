//go:build unix

package pglocal

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

var (
	// ErrVersion is returned when the data folder belongs to another major version.
	ErrVersion = errors.New("data folder of another PostgreSQL version")

	// ErrRunning is returned when a live server uses the data folder.
	ErrRunning = errors.New("a PostgreSQL server runs on this data folder already")
)

// A former server, whose parent was killed, may not have heard of it yet, and then takes its time to
// write everything down.
const (
	hearGrace = 3 * time.Second
	stopGrace = time.Minute
)

// majorOf returns the major version that made a data folder; 0: the folder is not there or empty.
func majorOf(data string) (int, error) {
	text, err := os.ReadFile(filepath.Join(data, "PG_VERSION"))
	if err == nil {
		major, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			return 0, fmt.Errorf("read PG_VERSION of %s: %w", data, err)
		}
		return major, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("read PG_VERSION: %w", err)
	}
	entries, err := os.ReadDir(data)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("read data folder: %w", err)
	}
	if len(entries) > 0 {
		return 0, fmt.Errorf("%s is not empty and has no PG_VERSION, so it is no PostgreSQL data folder: use another folder, or move it away", data)
	}
	return 0, nil
}

// binariesFor returns the binaries to open data with, made by major; 0: a new one.
func binariesFor(ctx context.Context, data string, major int, o Options) (*Binaries, error) {
	candidates := []*Binaries{o.Binaries}
	if o.Binaries == nil {
		var err error
		if candidates, err = findOrFetch(ctx, o.Cache); err != nil {
			return nil, err
		}
	}
	for _, b := range candidates {
		if major == 0 || b.Major == major {
			return b, nil
		}
	}
	return nil, fmt.Errorf("%w: %s was made by PostgreSQL %d, the binaries in %s are %s: "+
		"install PostgreSQL %d, upgrade the data with pg_upgrade, or use another folder",
		ErrVersion, data, major, candidates[0].Dir, candidates[0].Version, major)
}

func findOrFetch(ctx context.Context, cache string) ([]*Binaries, error) {
	found, err := FindAll()
	if err == nil || !errors.Is(err, ErrNoBinaries) {
		return found, err
	}
	if cache == "" {
		if cache, err = defaultCache(); err != nil {
			return nil, err
		}
	}
	fetched, err := Fetch(ctx, cache, "")
	if err != nil {
		return nil, err
	}
	return []*Binaries{fetched}, nil
}

// defaultCache returns a folder that the server's user can reach, which root's own is not.
func defaultCache() (string, error) {
	if os.Geteuid() == 0 {
		return "/var/cache/berth", nil
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a folder to keep PostgreSQL in: %w", err)
	}
	return filepath.Join(dir, "berth"), nil
}

// initialize makes a data folder. It grows under another name, so that a killed initdb leaves
// nothing that looks like one.
func initialize(ctx context.Context, o owner, b *Binaries, data string, fast bool) error {
	growing := data + ".new-" + strconv.Itoa(os.Getpid())
	if err := os.RemoveAll(growing); err != nil {
		return fmt.Errorf("remove what a killed initdb left: %w", err)
	}
	if err := o.mkdir(growing); err != nil {
		return err
	}
	args := []string{"-D", growing, "-U", superuser, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-instructions"}
	if fast {
		args = append(args, "--no-sync")
	}
	cmd := o.command(b.Path("initdb"), args...)
	out := &strings.Builder{}
	cmd.Stdout, cmd.Stderr = out, out
	err := cmd.Start()
	if err == nil {
		err = waitFor(ctx, cmd)
	}
	if err != nil {
		_ = os.RemoveAll(growing) // the error below is the one to see
		return fmt.Errorf("initdb: %w: %s", err, lastLines(out.String()))
	}
	_ = os.Remove(data) // an empty one that was there
	if err := os.Rename(growing, data); err != nil {
		return fmt.Errorf("name the data folder: %w", err)
	}
	return nil
}

// clearStale makes sure that no live server uses data, and removes the postmaster.pid of a dead one.
// The server does so itself, unless the number belongs to another process by now.
func clearStale(ctx context.Context, data string) error {
	file := filepath.Join(data, "postmaster.pid")
	started := time.Now()
	for {
		pid, status, err := readPostmaster(file)
		if err != nil {
			return err
		}
		if pid == 0 {
			return nil
		}
		grace := hearGrace
		if status == "stopping" {
			grace = stopGrace
		}
		if !serves(pid, data) {
			if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("remove what a crash left: %w", err)
			}
			return nil
		}
		if time.Since(started) > grace {
			return fmt.Errorf("%w: process %d on %s; stop whoever started it (kill -INT %d stops the server alone), or use another folder", ErrRunning, pid, data, pid)
		}
		if err := wait(ctx, 50*time.Millisecond); err != nil {
			return fmt.Errorf("wait for the server %d on %s to stop: %w", pid, data, err)
		}
	}
}

// readPostmaster returns the process in a postmaster.pid and how far it says to be: starting, ready,
// stopping; 0: there is none.
func readPostmaster(file string) (pid int, status string, err error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, "", nil
	}
	if err != nil {
		return 0, "", fmt.Errorf("read postmaster.pid: %w", err)
	}
	lines := strings.Split(string(text), "\n")
	if pid, err = strconv.Atoi(strings.TrimSpace(lines[0])); err != nil {
		return 0, "", nil //nolint:nilerr // torn by a crash: the server writes its own
	}
	if len(lines) > 7 {
		status = strings.TrimSpace(lines[7])
	}
	return max(pid, -pid), status, nil // negative: a stand-alone backend
}

func lastLines(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-8):], "\n")
}
