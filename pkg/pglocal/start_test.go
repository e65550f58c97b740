package pglocal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/waittest"
)

// folder returns a folder that the server's user can reach, and that goes with t.
func folder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth-pglocal-") //nolint:usetesting // t.TempDir is closed to another user
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func start(t *testing.T, o Options) *Server {
	t.Helper()
	o.Ephemeral = true
	return startAs(t, o)
}

func startAs(t *testing.T, o Options) *Server {
	t.Helper()
	if _, err := Find(); errors.Is(err, ErrNoBinaries) && os.Getenv("CI") == "" { //nolint:forbidigo // CI must not skip
		t.Skip(err)
	}
	o.DieWithParent = true
	s, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop(t, s, Immediate) })
	return s
}

func stop(t *testing.T, s *Server, mode StopMode) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 30*time.Second)
	defer cancel()
	if err := s.Stop(ctx, mode); err != nil {
		t.Error(err)
	}
	if !s.over() {
		t.Errorf("process %d still runs after Stop", s.PID())
	}
}

func query(t *testing.T, s *Server, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	var answer *string
	if err := conn.QueryRow(t.Context(), sql).Scan(&answer); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	if answer == nil {
		return ""
	}
	return *answer
}

func TestAServerListensOnItsSocketOnly(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	if got := query(t, s, "SHOW listen_addresses"); got != "" {
		t.Errorf("listen_addresses is %q, want none", got)
	}
	info, err := os.Stat(s.SocketDir())
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o700 {
		t.Errorf("the folder of the socket has mode %04o, want 0700", info.Mode().Perm())
	}
}

func TestDataStayThroughStopAndCrash(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	s := startAs(t, Options{Dir: dir})
	query(t, s, "SELECT lo_from_bytea(4711, 'kept')::text")
	for name, mode := range map[string]StopMode{"an orderly stop": Fast, "a crash": Immediate} {
		stop(t, s, mode)
		s = startAs(t, Options{Dir: dir})
		if got := query(t, s, "SELECT convert_from(lo_get(4711), 'UTF8')"); got != "kept" {
			t.Errorf("after %s the data are %q", name, got)
		}
	}
}

func TestATemporaryFolderGoesWithItsServer(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	stop(t, s, Fast)
	if _, err := os.Stat(s.dir); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", s.dir, err)
	}
	stop(t, s, Fast) // again is harmless
}

func TestALongPathGetsAShortSocket(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(folder(t), strings.Repeat("long-", 20))
	s := start(t, Options{Dir: dir})
	if got := len(filepath.Join(s.SocketDir(), socketFile)); got > maxSocketPath {
		t.Errorf("the socket's path has %d bytes, at most %d are possible", got, maxSocketPath)
	}
	if got := query(t, s, "SELECT 'well'"); got != "well" {
		t.Errorf("the server says %q", got)
	}
	stop(t, s, Fast)
	if _, err := os.Stat(s.SocketDir()); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", s.SocketDir(), err)
	}
}

func TestASecondServerOnTheSameDataIsRefused(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	s := start(t, Options{Dir: dir})
	_, err := Start(t.Context(), Options{Dir: dir})
	if !errors.Is(err, ErrRunning) || !strings.Contains(err.Error(), fmt.Sprint(s.PID())) {
		t.Errorf("a second Start = %v, want ErrRunning and process %d", err, s.PID())
	}
	if got := query(t, s, "SELECT 'well'"); got != "well" {
		t.Errorf("the first server then says %q", got)
	}
}

func TestWhatACrashLeftIsRemoved(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	s := start(t, Options{Dir: dir})
	stop(t, s, Fast)
	// The number in the file belongs to a live process by now, which is no server.
	other := exec.CommandContext(t.Context(), "sleep", "600")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = other.Process.Kill()
		_ = other.Wait()
	})
	left := fmt.Sprintf("%d\n%s\n1\n5432\n%s\n\n1 1\nready\n", other.Process.Pid, s.data(), s.SocketDir())
	for _, file := range []string{filepath.Join(s.data(), "postmaster.pid"), filepath.Join(s.SocketDir(), socketFile+".lock")} {
		if err := os.WriteFile(file, []byte(left), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := query(t, start(t, Options{Dir: dir}), "SELECT 'well'"); got != "well" {
		t.Errorf("the server after a crash says %q", got)
	}
}

func TestAFolderThatIsNotOursIsLeftAlone(t *testing.T) {
	t.Parallel()
	if _, err := Find(); err != nil {
		t.Skip(err)
	}
	for name, tt := range map[string]struct {
		file, text string
		is         error
		says       []string
	}{
		"data of another version": {"PG_VERSION", "9\n", ErrVersion, []string{"PostgreSQL 9", "install PostgreSQL 9"}},
		"something else":          {"holiday.jpg", "…", nil, []string{"no PG_VERSION", "use another folder"}},
		"a broken PG_VERSION":     {"PG_VERSION", "?\n", nil, []string{"read PG_VERSION"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := folder(t)
			data := filepath.Join(dir, "data")
			if err := os.Mkdir(data, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(data, tt.file), []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := Start(t.Context(), Options{Dir: dir})
			if err == nil || (tt.is != nil && !errors.Is(err, tt.is)) {
				t.Fatalf("Start = %v, want an error that is %v", err, tt.is)
			}
			for _, part := range tt.says {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("Start says %q, want %q in it", err, part)
				}
			}
			entries, err := os.ReadDir(data)
			if err != nil || len(entries) != 1 || entries[0].Name() != tt.file {
				t.Errorf("the folder holds %v (%v), want %s alone", entries, err, tt.file)
			}
		})
	}
}

func TestAServerThatCannotStartSaysWhy(t *testing.T) {
	t.Parallel()
	if _, err := Find(); err != nil {
		t.Skip(err)
	}
	dir := folder(t)
	_, err := Start(t.Context(), Options{Dir: dir, Ephemeral: true, Settings: map[string]string{"no_such_setting": "1"}})
	if err == nil || !strings.Contains(err.Error(), "no_such_setting") {
		t.Errorf("Start = %v, want the server's own words", err)
	}
	if got := query(t, start(t, Options{Dir: dir}), "SELECT 'well'"); got != "well" {
		t.Errorf("the same folder without the mistake: %q", got)
	}
}

func TestAnUnreachableFolderIsNamed(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root starts servers as another user")
	}
	closed := folder(t)
	if err := os.Chmod(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := Start(t.Context(), Options{Dir: filepath.Join(closed, "pg")})
	if err == nil || !strings.Contains(err.Error(), closed+" (mode 0700)") || !strings.Contains(err.Error(), "chmod o+x") {
		t.Errorf("Start in a closed folder = %v, want its name, its mode and what to do", err)
	}
}

func TestAFrozenServerAnswersAfterThaw(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	conn, err := pgx.Connect(t.Context(), s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	if err := s.Freeze(); err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() { _, err := conn.Exec(t.Context(), "SELECT 1"); answered <- err }()
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	select {
	case err := <-answered:
		t.Errorf("a frozen server answers: %v", err)
	case <-short.Done():
	}
	if err := s.Thaw(); err != nil {
		t.Fatal(err)
	}
	if err := <-answered; err != nil {
		t.Errorf("after thaw: %v", err)
	}
}

func TestDoneTellsOfAServerThatEndsByItself(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	select {
	case <-s.Done():
		t.Fatal("Done before the server ended")
	default:
	}
	if err := s.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	waittest.Receive(t, "the end of the killed server", s.Done())
}
