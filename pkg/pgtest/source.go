package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"berth/pkg/pglocal"
)

// errNone means that this machine offers no PostgreSQL to tests.
var errNone = errors.New("no PostgreSQL for tests: install it (apt-get install postgresql), " +
	"or set BERTH_TEST_DATABASE_URL to a server where a role may create databases, or start a container engine")

// shared is the server of this test binary: started by the first test that asks, ended with the
// process.
var shared struct {
	sync.Mutex
	url string
	err error
}

// sharedServer returns the URL of the server's own database. Where there is no server, t is skipped,
// or fails if CI is set.
func sharedServer(t testing.TB) string {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.url == "" && shared.err == nil {
		ctx, cancel := context.WithTimeout(t.Context(), setupLimit)
		defer cancel()
		shared.url, shared.err = findServer(ctx, environment{
			url: os.Getenv("BERTH_TEST_DATABASE_URL"), source: os.Getenv("BERTH_TEST_POSTGRES"),
			bin: os.Getenv("BERTH_TEST_POSTGRES_BIN"), keep: os.Getenv("BERTH_TEST_KEEP") != "",
		})
	}
	refuse(t, shared.err)
	return shared.url
}

// refuse ends t when err is not nil: a machine without PostgreSQL skips, CI and every other error fail.
func refuse(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, errNone) && os.Getenv("CI") == "" {
		t.Skipf("pgtest: %v", err)
	}
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
}

// environment is what the variables in the package's comment say.
type environment struct {
	url, source, bin string
	keep             bool
}

func findServer(ctx context.Context, env environment) (string, error) {
	switch env.source {
	case "":
		if env.url != "" {
			return env.url, nil
		}
		url, err := startLocal(ctx, env)
		if errors.Is(err, pglocal.ErrNoBinaries) && env.bin == "" {
			return startContainer(ctx)
		}
		return url, err
	case "local":
		url, err := startLocal(ctx, env)
		if errors.Is(err, pglocal.ErrNoBinaries) {
			return "", fmt.Errorf("%w: %w", errNone, err)
		}
		return url, err
	case "container":
		return startContainer(ctx)
	}
	return "", fmt.Errorf("BERTH_TEST_POSTGRES=%s: want local or container", env.source)
}

// startLocal starts a server that ends with this process, or stays for whoever keeps databases.
func startLocal(ctx context.Context, env environment) (string, error) {
	binaries, err := pglocal.Find(env.bin)
	if err != nil {
		return "", err
	}
	server, err := pglocal.Start(ctx, pglocal.Options{Binaries: binaries, Ephemeral: true, DieWithParent: !env.keep})
	if err != nil {
		return "", fmt.Errorf("start a server for tests: %w", err)
	}
	return server.URL("postgres"), nil
}
