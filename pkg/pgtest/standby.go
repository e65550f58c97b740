//go:build unix

package pgtest

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pglocal"
)

// Standby returns a streaming standby of s with everything that s has, stopped when t ends. s is stopped
// for the copy and started again: connections to it end. It needs nothing but the server's own program.
func (s *Server) Standby(t testing.TB) *Server {
	t.Helper()
	settings := maps.Clone(s.options.Settings)
	if settings == nil {
		settings = map[string]string{}
	}
	settings["hot_standby"] = "on"
	settings["primary_conninfo"] = "host=" + s.running.SocketDir() + " user=postgres"
	dir, err := os.MkdirTemp("", "berth-pgtest-") //nolint:usetesting // t.TempDir is closed to another user
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	standby := &Server{t: t, options: s.options}
	standby.options.Dir, standby.options.Settings = dir, settings
	t.Cleanup(func() {
		standby.stop(pglocal.Immediate)
		if err := os.RemoveAll(dir); err != nil {
			t.Logf("pgtest: %v", err)
		}
	})
	s.Stop(pglocal.Fast)
	if err := copyData(t.Context(), filepath.Join(s.options.Dir, "data"), filepath.Join(dir, "data")); err != nil {
		t.Fatalf("pgtest: copy a server: %v", err)
	}
	s.Start()
	standby.Start()
	return standby
}

const promoteServerSQL = `
SELECT pg_promote(true, 120)`

// Promote makes a standby a primary of its own, and returns when it takes writes.
func (s *Server) Promote() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), setupLimit)
	defer cancel()
	err := onServer(ctx, s.URL("postgres"), func(conn *pgx.Conn) error {
		var promoted bool
		return conn.QueryRow(ctx, promoteServerSQL).Scan(&promoted)
	})
	if err != nil {
		s.t.Fatalf("pgtest: promote: %v", err)
	}
}

// copyData copies a stopped server's data, and makes the copy one that follows.
func copyData(ctx context.Context, from, to string) error {
	ctx, cancel := context.WithTimeout(ctx, setupLimit)
	defer cancel()
	// With owners and modes, for the server may run as another user.
	if out, err := exec.CommandContext(ctx, "cp", "-a", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("cp: %w: %s", err, out)
	}
	info, err := os.Stat(to)
	if err != nil {
		return err
	}
	signal := filepath.Join(to, "standby.signal")
	if err := os.WriteFile(signal, nil, 0o600); err != nil {
		return err
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		return os.Chown(signal, int(stat.Uid), int(stat.Gid))
	}
	return nil
}
