package pgtest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"testing"

	"berth/pkg/pglocal"
)

// Server is a PostgreSQL server of a test's own, with durability on, which the test may stop, start,
// freeze and configure. Its methods fail the test instead of returning errors. They are not for use
// at once.
type Server struct {
	t       testing.TB
	options pglocal.Options
	running *pglocal.Server
}

// NewServer starts a server with settings beside pglocal's; it is stopped when t ends. It needs local
// binaries, whatever the other tests use: without them t is skipped, or fails if CI is set.
func NewServer(t testing.TB, settings map[string]string) *Server {
	t.Helper()
	binaries, err := pglocal.Find(os.Getenv("BERTH_TEST_POSTGRES_BIN"))
	if errors.Is(err, pglocal.ErrNoBinaries) {
		err = fmt.Errorf("%w: %w", errNone, err)
	}
	refuse(t, err)
	dir, err := os.MkdirTemp("", "berth-pgtest-") //nolint:usetesting // t.TempDir is closed to another user
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	s := &Server{t: t, options: pglocal.Options{
		Dir: dir, Binaries: binaries, Settings: settings, DieWithParent: true,
	}}
	t.Cleanup(func() {
		s.stop(pglocal.Immediate)
		if err := os.RemoveAll(dir); err != nil {
			t.Logf("pgtest: %v", err)
		}
	})
	s.Start()
	return s
}

// Start starts the server again after Stop, with the same data and the same URL.
func (s *Server) Start() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), setupLimit)
	defer cancel()
	running, err := pglocal.Start(ctx, s.options)
	if err != nil {
		s.t.Fatalf("pgtest: start a server: %v", err)
	}
	s.running = running
}

// Stop ends the server: pglocal.Fast in order, pglocal.Immediate as in a crash.
func (s *Server) Stop(mode pglocal.StopMode) {
	s.t.Helper()
	s.stop(mode)
}

func (s *Server) stop(mode pglocal.StopMode) {
	s.t.Helper()
	if s.running == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), cleanupLimit)
	defer cancel()
	if err := s.running.Thaw(); err != nil { // a frozen server hears no signal
		s.t.Logf("pgtest: %v", err)
	}
	if err := s.running.Stop(ctx, mode); err != nil {
		s.t.Errorf("pgtest: %v", err)
	}
	s.running = nil
}

// Freeze stops every process of the server where it stands: connections stay open, nobody answers.
func (s *Server) Freeze() {
	s.t.Helper()
	if err := s.running.Freeze(); err != nil {
		s.t.Fatalf("pgtest: freeze: %v", err)
	}
}

// Thaw lets a frozen server go on.
func (s *Server) Thaw() {
	s.t.Helper()
	if err := s.running.Thaw(); err != nil {
		s.t.Fatalf("pgtest: thaw: %v", err)
	}
}

// URL returns how to reach a database of the server as its superuser.
func (s *Server) URL(database string) string { return s.running.URL(database) }

// New returns a migrated database on this server, as the package's New does on the shared one.
func (s *Server) New(fsys fs.FS) *Database {
	s.t.Helper()
	return clone(s.t, s.URL("postgres"), fsys)
}
