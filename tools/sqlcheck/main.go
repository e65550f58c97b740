// Command sqlcheck prepares every SQL constant of the product on a migrated database, so that a
// misspelled column or a wrong type fails before it is deployed. It also says where a statement uses a
// table that another package owns, asks for all columns, or has no name to be checked by. The statements of
// docs/ are prepared too.
//
// The database comes from BERTH_TEST_DATABASE_URL, a login that may create databases, or is a private
// server made of local binaries. Findings go to standard error; the exit code is then 1.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/migrations"
	"berth/pkg/migrate"
	"berth/pkg/pglocal"
)

// stopLimit bounds the end of the private server.
const stopLimit = 20 * time.Second

// modules are those with statements. Tools' own are prepared too, so that the checker is checked.
var modules = []string{"pkg", "services", "tools"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	findings, statements, err := run(ctx)
	for _, f := range findings {
		fmt.Fprintln(os.Stderr, f)
	}
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "sqlcheck:", err)
		os.Exit(2)
	case len(findings) > 0:
		fmt.Fprintf(os.Stderr, "sqlcheck: %d findings in %d statements\n", len(findings), statements)
		os.Exit(1)
	}
	fmt.Printf("sqlcheck: %d statements prepare and keep to their tables\n", statements)
}

func run(ctx context.Context) (findings []Finding, statements int, err error) {
	root, err := workspace()
	if err != nil {
		return nil, 0, err
	}
	var all []Statement
	for _, module := range modules {
		found, objections, err := scan(root, module)
		if err != nil {
			return nil, 0, err
		}
		all, findings = append(all, found...), append(findings, objections...)
	}
	pages, err := scanDocs(root)
	if err != nil {
		return nil, 0, err
	}
	all = append(all, pages...)

	database, drop, err := migrated(ctx)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, drop()) }()
	conn, err := pgx.Connect(ctx, database)
	if err != nil {
		return nil, 0, fmt.Errorf("connect to the migrated database: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }()
	found, err := check(ctx, conn, all, owners)
	return append(findings, found...), len(all), err
}

// workspace returns the folder of go.work.
func workspace() (string, error) {
	out, err := exec.Command("go", "env", "GOWORK").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOWORK: %w", err)
	}
	file := strings.TrimSpace(string(out))
	if !filepath.IsAbs(file) {
		return "", errors.New("run it inside the workspace: go env GOWORK names no file")
	}
	return filepath.Dir(file), nil
}

// migrated returns the URL of a database with every migration applied, and how to be rid of it.
func migrated(ctx context.Context) (string, func() error, error) {
	log := slog.New(slog.DiscardHandler)
	if given := os.Getenv("BERTH_TEST_DATABASE_URL"); given != "" {
		database, drop, err := create(ctx, given)
		if err != nil {
			return "", nil, err
		}
		if _, err := migrate.Up(ctx, database, migrations.FS, log); err != nil {
			return "", nil, errors.Join(err, drop())
		}
		return database, drop, nil
	}

	server, err := pglocal.Start(ctx, pglocal.Options{Ephemeral: true, DieWithParent: true})
	if err != nil {
		return "", nil, err
	}
	stop := func() error {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
		defer cancel()
		return server.Stop(limited, pglocal.Immediate)
	}
	if _, err := migrate.Up(ctx, server.URL("postgres"), migrations.FS, log); err != nil {
		return "", nil, errors.Join(err, stop())
	}
	return server.URL("postgres"), stop, nil
}

// create makes a database of its own on a server that others use too.
func create(ctx context.Context, server string) (string, func() error, error) {
	u, err := url.Parse(server)
	if err != nil {
		return "", nil, errors.New("BERTH_TEST_DATABASE_URL is no URL such as postgres://user@host:5432/postgres")
	}
	name := "berth_sqlcheck_" + strings.ToLower(rand.Text())
	execute := func(ctx context.Context, statement string) error {
		conn, err := pgx.Connect(ctx, server)
		if err != nil {
			return fmt.Errorf("connect to BERTH_TEST_DATABASE_URL: %w", err)
		}
		_, err = conn.Exec(ctx, statement+pgx.Identifier{name}.Sanitize())
		return errors.Join(err, conn.Close(ctx))
	}
	if err := execute(ctx, "CREATE DATABASE "); err != nil {
		return "", nil, err
	}
	u.Path = "/" + name
	return u.String(), func() error {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
		defer cancel()
		return execute(limited, "DROP DATABASE ")
	}, nil
}
