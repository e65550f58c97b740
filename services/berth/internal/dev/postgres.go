package dev

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"berth/pkg/pglocal"
)

// systemCache is where root keeps what was fetched: root's own cache is closed to the server's user.
const systemCache = "/var/cache"

// findPostgres returns the server's programs: the folder that was named; else nil, which lets pglocal
// choose among this machine's by the version of the data; else, where it has none, fetched ones.
func (s *Stack) findPostgres(ctx context.Context) (*pglocal.Binaries, error) {
	found, err := pglocal.Find(s.o.PostgresBin)
	if s.o.PostgresBin != "" {
		return found, err
	}
	if !errors.Is(err, pglocal.ErrNoBinaries) {
		return nil, err
	}
	cache, err := cacheFolder()
	if err != nil {
		return nil, err
	}
	s.o.Log.InfoContext(ctx, "this machine has no PostgreSQL; fetching one, once", slog.String("folder", cache))
	return pglocal.Fetch(ctx, cache, "")
}

func cacheFolder() (string, error) {
	root := systemCache
	if os.Geteuid() != 0 {
		var err error
		if root, err = os.UserCacheDir(); err != nil {
			return "", fmt.Errorf("find a folder for PostgreSQL: %w", err)
		}
	}
	return filepath.Join(root, "berth", "postgres"), nil
}
