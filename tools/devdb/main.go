// Command devdb keeps one PostgreSQL for a developer in .berth/db of the checkout: `devdb up` starts it and
// leaves it running, `devdb url` prints where it is, `devdb down` stops it. Data is never deleted.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pglocal"
)

const (
	database  = "berth"
	stopLimit = 30 * time.Second
	stopPoll  = 50 * time.Millisecond
)

var errNotRunning = errors.New("the database is not running: make db/up")

func main() {
	command, dir := "", filepath.Join(".berth", "db")
	if len(os.Args) == 2 {
		command = os.Args[1]
	}
	commands := map[string]func(context.Context, string) error{"up": up, "down": down, "url": printURL}
	run, ok := commands[command]
	if !ok {
		fmt.Fprintln(os.Stderr, "usage: devdb up|down|url")
		os.Exit(2)
	}
	if err := run(context.Background(), dir); err != nil {
		fmt.Fprintln(os.Stderr, "devdb:", err)
		os.Exit(1)
	}
}

// up starts the server, makes the database where it is missing, and leaves both.
func up(ctx context.Context, dir string) error {
	if _, err := pid(dir); err == nil {
		return printURL(ctx, dir)
	}
	server, err := pglocal.Start(ctx, pglocal.Options{Dir: dir})
	if err != nil {
		return err
	}
	if err := create(ctx, server.URL("postgres")); err != nil {
		return errors.Join(err, server.Stop(ctx, pglocal.Fast))
	}
	if err := os.WriteFile(filepath.Join(dir, "url"), []byte(server.URL(database)+"\n"), 0o600); err != nil {
		return errors.Join(err, server.Stop(ctx, pglocal.Fast))
	}
	fmt.Println(server.URL(database))
	return nil
}

const findDatabaseSQL = `SELECT EXISTS (SELECT FROM pg_catalog.pg_database WHERE datname = @name)`

func create(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return fmt.Errorf("connect to the new server: %w", err)
	}
	var found bool
	err = conn.QueryRow(ctx, findDatabaseSQL, pgx.StrictNamedArgs{"name": database}).Scan(&found)
	if err == nil && !found {
		_, err = conn.Exec(ctx, "CREATE DATABASE "+database)
	}
	return errors.Join(err, conn.Close(ctx))
}

// down asks the server for a fast shutdown and waits for its end.
func down(ctx context.Context, dir string) error {
	server, err := pid(dir)
	if err != nil {
		return err
	}
	if err := syscall.Kill(server, syscall.SIGINT); err != nil {
		return fmt.Errorf("stop the server, process %d: %w", server, err)
	}
	ctx, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	ticker := time.NewTicker(stopPoll)
	defer ticker.Stop()
	for {
		if _, err := pid(dir); errors.Is(err, errNotRunning) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the server, process %d, did not stop in %s", server, stopLimit)
		case <-ticker.C:
		}
	}
}

func printURL(_ context.Context, dir string) error {
	if _, err := pid(dir); err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(dir, "url"))
	if err != nil {
		return err
	}
	fmt.Print(string(text))
	return nil
}

// pid returns the process of the running server. A file that a crash left behind is none.
func pid(dir string) (int, error) {
	text, err := os.ReadFile(filepath.Join(dir, "data", "postmaster.pid"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, errNotRunning
	}
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(text), "\n")
	n, err := strconv.Atoi(first)
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("%s/data/postmaster.pid does not begin with a process id", dir)
	}
	command, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", n))
	if err != nil || strings.TrimSpace(string(command)) != "postgres" {
		return 0, errNotRunning
	}
	return n, nil
}
