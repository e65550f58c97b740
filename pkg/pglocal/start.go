//go:build unix

package pglocal

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	superuser  = "postgres"
	socketFile = ".s.PGSQL.5432"

	// maxSocketPath is what sun_path holds beside its closing zero.
	maxSocketPath = 107

	startLimit    = 2 * time.Minute // a loaded machine, and a crash to recover from
	killGrace     = 5 * time.Second
	maxLogBytes   = 8 << 20
	readinessPoll = 10 * time.Millisecond
)

// Options says which server to start.
type Options struct {
	// Dir holds the server: data, log, and the socket where its path is short enough. It is made if
	// it is not there. Empty: a temporary folder, deleted by Stop.
	Dir string

	// Binaries to run; nil: those that Find finds, of the data folder's version; where it finds
	// none, those that Fetch gets.
	Binaries *Binaries

	// Cache is where fetched binaries are kept; empty: the user's cache folder, as root /var/cache.
	Cache string

	// Ephemeral trades durability for speed: a crash of the machine loses the data.
	Ephemeral bool

	// Settings are parameters beside and above the defaults.
	Settings map[string]string

	// DieWithParent stops the server when this process ends, however it ends, SIGKILL included; a
	// temporary folder goes too.
	DieWithParent bool

	Log *slog.Logger // nil: nothing is logged
}

// Server is a running PostgreSQL. Its methods may be called at once.
type Server struct {
	binaries *Binaries
	owner    owner
	dir      string
	sockets  string
	folders  []string // temporary, deleted by Stop
	cmd      *exec.Cmd
	guard    *guard
	log      *slog.Logger

	reap  sync.Once
	ended chan struct{}
}

// StopMode says how a server ends.
type StopMode int

const (
	// Fast ends all sessions and writes everything down.
	Fast StopMode = iota
	// Immediate ends at once, as in a crash: the next start recovers.
	Immediate
)

// Start starts a server and returns when it accepts connections. ctx limits the start only. An error
// leaves no process and says what to do; the data folder is as it was, or new and complete.
func Start(ctx context.Context, o Options) (_ *Server, err error) {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	s := &Server{log: o.Log, ended: make(chan struct{})}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	defer func() {
		if err != nil {
			s.removeFolders()
		}
	}()
	if err := s.prepare(ctx, o); err != nil {
		return nil, err
	}
	if err := s.launch(ctx, o); err != nil {
		return nil, err
	}
	if err := s.waitReady(ctx); err != nil {
		return nil, errors.Join(err, s.abandon(ctx))
	}
	s.log.InfoContext(ctx, "PostgreSQL runs", slog.String("version", s.binaries.Version), slog.Int("pid", s.PID()),
		slog.String("data", s.data()), slog.String("user", s.owner.name))
	return s, nil
}

// prepare makes the folders and their data.
func (s *Server) prepare(ctx context.Context, o Options) error {
	var err error
	if o.Dir == "" {
		if s.dir, err = os.MkdirTemp("", "berth-pg-"); err != nil {
			return fmt.Errorf("make a temporary folder: %w", err)
		}
		s.folders = append(s.folders, s.dir)
	} else {
		if s.dir, err = filepath.Abs(o.Dir); err != nil {
			return fmt.Errorf("find the folder %s: %w", o.Dir, err)
		}
		if err := os.MkdirAll(s.dir, 0o755); err != nil {
			return fmt.Errorf("make the folder of PostgreSQL: %w", err)
		}
	}
	if s.owner, err = chooseOwner(s.data()); err != nil {
		return err
	}
	if o.Dir == "" {
		if err := s.owner.mkdir(s.dir); err != nil {
			return err
		}
	}
	if err := s.owner.reaches(s.data()); err != nil {
		return err
	}
	major, err := majorOf(s.data())
	if err != nil {
		return err
	}
	if s.binaries, err = binariesFor(ctx, s.data(), major, o); err != nil {
		return err
	}
	if err := clearStale(ctx, s.data()); err != nil {
		return err
	}
	if major == 0 {
		if err := initialize(ctx, s.owner, s.binaries, s.data(), o.Ephemeral); err != nil {
			return err
		}
	}
	return s.prepareSockets()
}

// prepareSockets chooses a private folder whose path leaves room for the socket's name.
func (s *Server) prepareSockets() error {
	s.sockets = filepath.Join(s.dir, "run")
	if len(filepath.Join(s.sockets, socketFile)) > maxSocketPath {
		short, err := os.MkdirTemp("/tmp", "berth-pg-")
		if err != nil {
			return fmt.Errorf("make a short folder for the socket: %w", err)
		}
		s.folders = append(s.folders, short)
		s.sockets = short
	}
	if err := s.owner.mkdir(s.sockets); err != nil {
		return err
	}
	// The data folder has no live server, so whatever lies here is left over.
	for _, name := range []string{socketFile, socketFile + ".lock"} {
		if err := os.Remove(filepath.Join(s.sockets, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove what a crash left: %w", err)
		}
	}
	return nil
}

// settings returns the parameters of a server, those of o above all others.
func (s *Server) settings(o Options) map[string]string {
	merged := map[string]string{
		"listen_addresses":                 "",
		"port":                             "5432", // names the socket; there is no TCP
		"unix_socket_directories":          s.sockets,
		"unix_socket_permissions":          "0700",
		"max_connections":                  "200",
		"client_connection_check_interval": "2s",
		"deadlock_timeout":                 "200ms",
		"jit":                              "off",
		"max_locks_per_transaction":        "256",
		"log_line_prefix":                  "%m [%p] %q%u@%d %a ",
		"logging_collector":                "off",
		"log_destination":                  "stderr",
	}
	if o.Ephemeral {
		maps.Copy(merged, map[string]string{
			"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off",
			"shared_buffers": "32MB", "wal_level": "minimal", "max_wal_senders": "0",
			"max_locks_per_transaction": "64", "checkpoint_timeout": "1h",
		})
	}
	maps.Copy(merged, o.Settings)
	return merged
}

func (s *Server) launch(ctx context.Context, o Options) error {
	args := []string{"-D", s.data()}
	settings := s.settings(o)
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		args = append(args, "-c", name+"="+settings[name])
	}
	log, err := s.openLog()
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }() // the server has its own copy
	s.cmd = s.owner.command(s.binaries.Path("postgres"), args...)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	if err := s.cmd.Start(); err != nil {
		return fmt.Errorf("start postgres: %w", err)
	}
	if !o.DieWithParent {
		return nil
	}
	signal := "INT"
	if o.Dir == "" {
		signal = "QUIT" // nobody will read the data again
	}
	if s.guard, err = startGuard(s.owner, s.PID(), signal, s.folders); err != nil {
		return errors.Join(err, s.abandon(ctx))
	}
	return nil
}

// openLog opens the server's log for appending; a long one is put aside first.
func (s *Server) openLog() (*os.File, error) {
	path := s.LogFile()
	if info, err := os.Stat(path); err == nil && info.Size() > maxLogBytes {
		if err := os.Rename(path, path+".1"); err != nil {
			return nil, fmt.Errorf("put the log aside: %w", err)
		}
	}
	log, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, fmt.Errorf("open the log of PostgreSQL: %w", err)
	}
	return log, nil
}

// waitReady waits until postmaster.pid says that connections are accepted, as pg_ctl does.
func (s *Server) waitReady(ctx context.Context) error {
	for {
		if s.ready() {
			return nil
		}
		if s.over() {
			return fmt.Errorf("PostgreSQL ended while it started: %s", s.logTail())
		}
		if err := wait(ctx, readinessPoll); err != nil {
			return fmt.Errorf("PostgreSQL was not ready in time: %w: %s", err, s.logTail())
		}
	}
}

func (s *Server) ready() bool {
	pid, status, err := readPostmaster(filepath.Join(s.data(), "postmaster.pid"))
	return err == nil && pid == s.PID() && status == "ready"
}

// over tells whether the process has ended, without taking its result from whoever waits for it.
func (s *Server) over() bool { return !alive(s.PID()) }

func (s *Server) logTail() string {
	text, err := os.ReadFile(s.LogFile())
	if err != nil {
		return "its log cannot be read: " + err.Error()
	}
	return "the end of " + s.LogFile() + ":\n" + lastLines(string(text[max(0, len(text)-8<<10):]))
}

// abandon ends a server that did not come up.
func (s *Server) abandon(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*killGrace)
	defer cancel()
	return s.Stop(ctx, Immediate)
}

// PID returns the server's process.
func (s *Server) PID() int { return s.cmd.Process.Pid }

// Binaries returns what the server runs.
func (s *Server) Binaries() *Binaries { return s.binaries }

// LogFile returns the path of the server's log.
func (s *Server) LogFile() string { return filepath.Join(s.dir, "postgres.log") }

func (s *Server) data() string { return filepath.Join(s.dir, "data") }

// SocketDir returns the folder of the socket; with it as host, psql connects.
func (s *Server) SocketDir() string { return s.sockets }

// URL returns how to reach a database as the superuser, for pgx and libpq.
func (s *Server) URL(database string) string { return s.URLAs(superuser, "", database) }

// URLAs returns how to reach a database as a login. The socket asks for no password, so it may be empty.
func (s *Server) URLAs(login, password, database string) string {
	u := url.URL{Scheme: "postgres", User: url.User(login), Path: "/" + database}
	if password != "" {
		u.User = url.UserPassword(login, password)
	}
	query := url.Values{"host": {s.sockets}, "sslmode": {"disable"}}
	u.RawQuery = query.Encode()
	return u.String()
}

// Done returns a channel that closes when the server has ended, by Stop or by itself.
func (s *Server) Done() <-chan struct{} {
	s.reap.Do(func() {
		go func() {
			_ = s.cmd.Wait() // how it ended is in its log
			close(s.ended)
		}()
	})
	return s.ended
}

// Stop ends the server and deletes its temporary folders; data in Options.Dir stays. It returns nil
// when the server has ended, now or before. When ctx ends first, the server is ended the hard way and
// the error is the context's.
func (s *Server) Stop(ctx context.Context, mode StopMode) error {
	signal := syscall.SIGINT
	if mode == Immediate {
		signal = syscall.SIGQUIT
	}
	ended := s.Done()
	var stopErr error
	if err := s.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop PostgreSQL: %w", err)
	}
	select {
	case <-ended:
	case <-ctx.Done():
		stopErr = fmt.Errorf("stop PostgreSQL in order: %w", ctx.Err())
		s.endHard(ended)
	}
	s.guard.dismiss()
	s.removeFolders()
	return stopErr
}

// endHard ends the server immediately, or with SIGKILL when even that takes too long.
func (s *Server) endHard(ended <-chan struct{}) {
	_ = s.cmd.Process.Signal(syscall.SIGQUIT) // it may have ended by itself
	timer := time.NewTimer(killGrace)
	defer timer.Stop()
	select {
	case <-ended:
		return
	case <-timer.C:
	}
	_ = signalFamily(s.PID(), syscall.SIGKILL, false) // the children end by themselves when their parent is gone
	<-ended
}

func (s *Server) removeFolders() {
	for _, folder := range s.folders {
		if err := os.RemoveAll(folder); err != nil {
			s.log.Warn("temporary folder stays", slog.String("folder", folder), slog.Any("error", err))
		}
	}
}

// Freeze stops every process of the server where it stands, as SIGSTOP does: connections stay open
// and nobody answers. Sessions that begin later wait. Linux only.
func (s *Server) Freeze() error { return signalFamily(s.PID(), syscall.SIGSTOP, false) }

// Thaw lets a frozen server go on.
func (s *Server) Thaw() error { return signalFamily(s.PID(), syscall.SIGCONT, true) }
