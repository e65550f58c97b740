package pgtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
)

const defaultImage = "postgres:15"

// startContainer starts a server in a container, which ends with this process: by the library's
// reaper, or where that is switched off by a guard that runs docker.
func startContainer(ctx context.Context) (string, error) {
	log.SetDefault(silent{}) // it would tell of its progress on every test's output
	provider, err := testcontainers.NewDockerProvider()
	if err != nil {
		return "", fmt.Errorf("%w: %w", errNone, err)
	}
	defer func() { _ = provider.Close() }()
	if err := provider.Health(ctx); err != nil {
		return "", fmt.Errorf("%w: %w", errNone, err)
	}
	image := cmp.Or(os.Getenv("BERTH_TEST_POSTGRES_IMAGE"), defaultImage)
	container, err := postgres.Run(ctx, image,
		postgres.WithDatabase("postgres"), postgres.WithUsername("postgres"), postgres.WithPassword(random()),
		postgres.BasicWaitStrategies(),
		testcontainers.WithCmd("postgres", "-c", "fsync=off", "-c", "full_page_writes=off", "-c", "synchronous_commit=off",
			"-c", "max_connections=200", "-c", "deadlock_timeout=200ms", "-c", "jit=off"))
	if err != nil {
		return "", fmt.Errorf("start PostgreSQL in a container from %s: %w", image, err)
	}
	url, err := container.ConnectionString(ctx, "sslmode=disable")
	if err != nil {
		return "", errors.Join(fmt.Errorf("find the container's port: %w", err), container.Terminate(context.WithoutCancel(ctx)))
	}
	if os.Getenv("TESTCONTAINERS_RYUK_DISABLED") != "" {
		if err := guardContainer(container.GetContainerID()); err != nil {
			return "", errors.Join(err, container.Terminate(context.WithoutCancel(ctx)))
		}
	}
	return url, nil
}

// guardContainer starts a process that removes the container when this process ends, however it
// ends: the pipe closes with it.
func guardContainer(id string) error {
	docker, err := exec.LookPath("docker")
	if err != nil {
		return fmt.Errorf("the library's reaper is switched off, and there is no docker to remove the container with: %w", err)
	}
	guard := exec.Command("/bin/sh", "-c", `read -r line; "$1" rm --force --volumes "$2" >/dev/null 2>&1`, "berth-container-guard", docker, id) //nolint:noctx // it outlives this process
	if _, err := guard.StdinPipe(); err != nil {
		return fmt.Errorf("make the guard's pipe: %w", err)
	}
	ownGroup(guard)
	if err := guard.Start(); err != nil {
		return fmt.Errorf("start the guard of the container: %w", err)
	}
	guards = append(guards, guard)
	return nil
}

// guards keeps the pipes of container guards from being collected, which would close them.
var guards []*exec.Cmd

// silent keeps the library's progress out of test output.
type silent struct{}

var _ log.Logger = silent{}

// Printf drops a line.
func (silent) Printf(format string, v ...any) { fmt.Fprintf(io.Discard, format, v...) }
