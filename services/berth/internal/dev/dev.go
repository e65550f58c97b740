// Package dev runs a whole Berth on one machine: an embedded PostgreSQL and the services, each a
// process of its own made from this same binary, on free loopback ports.
//
// Start brings everything up in the order in which one part needs the other and returns when a create
// would succeed; Stop takes it down in reverse. Who dies by itself meanwhile is started again on the
// same ports, with a growing pause, unless Options.NoRestart says to leave it dead.
//
// Failures, one line each:
//
//   - a second stack on the same data folder: refused by a lock file that dies with its holder
//   - a service that does not become ready: everything is stopped, the error has the end of its log
//   - PostgreSQL ends by itself: Wait returns; nothing else makes sense without it
//   - this process is killed: the kernel kills the services, a guard process stops PostgreSQL
package dev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"berth/migrations"
	"berth/pkg/migrate"
	"berth/pkg/pglocal"
)

const (
	database = "postgres" // exists in every server; the private one has no other use for it

	readyTimeout = 90 * time.Second
	stopTimeout  = 20 * time.Second // for each kind of process, then it is killed
)

// Options says which stack to run.
type Options struct {
	Schedulers, Gateways, Nodes int

	Data        string // folder of everything that is kept; made if it is not there
	Ephemeral   bool   // a temporary folder in place of Data, deleted at the end
	PostgresBin string // folder with the embedded server's programs; empty: those of this machine, else fetched
	DatabaseURL string // an existing server in place of the embedded one, as a login that may create roles
	Domain      string // sandboxes answer at {port}-{sandbox}.{Domain}
	Templates   string // file with more templates for the nodes; empty: the built-in ones
	Isolation   string // of the nodes; empty: their default
	ReadyFile   string // gets Info as JSON when everything is ready, and again after each restart
	NoRestart   bool   // a process that dies stays dead

	LogLevel string    // of the services
	Logs     io.Writer // gets the services' lines, each with its process in front; nil: only files
	Color    bool      // of the prefixes
	Log      *slog.Logger
	Binary   string // the program to run; empty: this one
}

// Validate returns all mistakes at once, each naming its flag and what is wanted.
func (o *Options) Validate() error {
	var errs []error
	for _, c := range []struct {
		flag    string
		n, most int
	}{{"schedulers", o.Schedulers, 16}, {"gateways", o.Gateways, 16}, {"nodes", o.Nodes, 64}} {
		if c.n < 1 || c.n > c.most {
			errs = append(errs, fmt.Errorf("--%s %d: 1 to %d are wanted", c.flag, c.n, c.most))
		}
	}
	if o.Data == "" && !o.Ephemeral {
		errs = append(errs, errors.New("--data: a folder is wanted, or --ephemeral"))
	}
	if o.Domain == "" {
		errs = append(errs, errors.New("--domain: a name like berth.localhost is wanted"))
	}
	return errors.Join(errs...)
}

// Stack is a running Berth. Its methods may be called at the same time, Stop once.
type Stack struct {
	o      Options
	dir    string
	lock   *os.File
	state  *state
	logs   *logs
	server *pglocal.Server // nil with Options.DatabaseURL
	urls   databaseURLs
	spawn  *spawner

	mu        sync.Mutex
	processes []*process
	readyMu   sync.Mutex // one writer of the ready file at a time
}

// Start brings a stack up. An error leaves nothing running. ctx limits the start only.
func Start(ctx context.Context, o Options) (_ *Stack, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Binary == "" {
		if o.Binary, err = os.Executable(); err != nil {
			return nil, fmt.Errorf("find this program: %w", err)
		}
	}
	s := &Stack{o: o, spawn: newSpawner()}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Stop(context.WithoutCancel(ctx)))
		}
	}()
	if err := s.open(); err != nil {
		return nil, err
	}
	if err := s.startDatabase(ctx); err != nil {
		return nil, err
	}
	if err := s.startServices(ctx); err != nil {
		return nil, err
	}
	if err := s.writeReadyFile(); err != nil {
		return nil, err
	}
	return s, nil
}

// open takes the data folder and reads what an earlier run left there.
func (s *Stack) open() error {
	s.dir = s.o.Data
	if s.o.Ephemeral {
		dir, err := os.MkdirTemp("", "berth-")
		if err != nil {
			return fmt.Errorf("make a temporary folder: %w", err)
		}
		s.dir = dir
	}
	dir, err := filepath.Abs(s.dir)
	if err != nil {
		return fmt.Errorf("find the data folder: %w", err)
	}
	s.dir = dir
	// The server may run as another user, who must get through to its own folder.
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return fmt.Errorf("make the data folder: %w; choose another one with --data", err)
	}
	if s.o.Ephemeral {
		if err := os.Chmod(s.dir, 0o755); err != nil {
			return fmt.Errorf("open the data folder: %w", err)
		}
	}
	if s.lock, err = lockFolder(s.dir); err != nil {
		return err
	}
	// Whoever waits for the file must not meet the one of an earlier run.
	if err := s.removeReadyFile(); err != nil {
		return err
	}
	if s.state, err = openState(filepath.Join(s.dir, "state.json")); err != nil {
		return err
	}
	s.logs, err = newLogs(filepath.Join(s.dir, "logs"), s.o.Logs, s.o.Color)
	return err
}

// startDatabase starts PostgreSQL, brings its schema up to date and makes the logins.
func (s *Stack) startDatabase(ctx context.Context) error {
	admin := s.o.DatabaseURL
	if admin == "" {
		binaries, err := s.findPostgres(ctx)
		if err != nil {
			return err
		}
		s.server, err = pglocal.Start(ctx, pglocal.Options{
			Dir: filepath.Join(s.dir, "postgres"), Binaries: binaries, Ephemeral: s.o.Ephemeral, DieWithParent: true, Log: s.o.Log,
		})
		if err != nil {
			return fmt.Errorf("start PostgreSQL: %w", err)
		}
		admin = s.server.URL(database)
	}
	if _, err := migrate.Up(ctx, admin, migrations.FS, s.o.Log); err != nil {
		return err
	}
	urls, err := s.makeLogins(ctx, admin)
	if err != nil {
		return err
	}
	s.urls = urls
	return nil
}

// Wait blocks until ctx ends, which returns nil, or PostgreSQL does, which is an error.
func (s *Stack) Wait(ctx context.Context) error {
	if s.server == nil {
		<-ctx.Done()
		return nil
	}
	select {
	case <-ctx.Done():
		return nil
	case <-s.server.Done():
		return fmt.Errorf("PostgreSQL ended by itself; its log is %s", s.server.LogFile())
	}
}

// Stop ends gateways, nodes, schedulers and PostgreSQL, in this order, so that each can still say its
// last word to the next. What does not end in time is killed, and that is an error. Data stays unless
// the stack is ephemeral.
func (s *Stack) Stop(ctx context.Context) error {
	errs := []error{s.removeReadyFile()}
	for _, kind := range []kind{gateway, nodeagent, scheduler} {
		errs = append(errs, s.stopAll(ctx, kind))
	}
	s.spawn.stop()
	if s.server != nil {
		stopCtx, cancel := context.WithTimeout(ctx, stopTimeout)
		errs = append(errs, s.server.Stop(stopCtx, pglocal.Fast))
		cancel()
	}
	if s.logs != nil {
		errs = append(errs, s.logs.close())
	}
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
	}
	if s.o.Ephemeral && s.dir != "" {
		errs = append(errs, os.RemoveAll(s.dir))
	}
	return errors.Join(errs...)
}

// LogTail returns the last lines of each process, for a report of what went wrong.
func (s *Stack) LogTail() string {
	if s.logs == nil {
		return ""
	}
	return s.logs.tail()
}
