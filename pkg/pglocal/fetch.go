//go:build unix

package pglocal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"

	embedded "github.com/fergusstrange/embedded-postgres"
)

// fetchVersion is the server that is fetched where this machine has none.
const fetchVersion = embedded.V18

// unusableData is no path on any system. embedded-postgres can fetch binaries only on its way to
// starting a server: it fetches, then clears the data folder, then runs initdb. A data folder that
// cannot be named ends that way after the first step, before any program of the archive runs.
const unusableData = "fetch only\x00"

// Fetch returns the binaries kept in cache, which it makes and fills from repository when they are
// not there yet; an empty repository is the library's own, Maven Central. As root it writes and
// unpacks as the unprivileged user that will run the server. Fetching cannot be interrupted: when ctx
// ends first, it goes on in the background and its result is in cache the next time. An error is
// ErrNoBinaries and says what to install.
func Fetch(ctx context.Context, cache, repository string) (*Binaries, error) {
	cache, err := filepath.Abs(cache)
	if err != nil {
		return nil, fmt.Errorf("find the folder %s: %w", cache, err)
	}
	folder := filepath.Join(cache, fmt.Sprintf("postgres-%s-%s-%s", fetchVersion, runtime.GOOS, runtime.GOARCH))
	if b, err := inspect(filepath.Join(folder, "bin")); err == nil {
		return b, nil
	}
	o, err := chooseOwner(folder)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(cache), 0o755); err != nil {
		return nil, fmt.Errorf("make the folder for PostgreSQL: %w", err)
	}
	for _, dir := range []string{cache, folder} {
		if err := o.mkdir(dir); err != nil {
			return nil, err
		}
	}
	if err := o.reaches(folder); err != nil {
		return nil, err
	}
	fetched := make(chan error, 1)
	go func() { fetched <- fetchAs(context.WithoutCancel(ctx), o, cache, folder, repository) }()
	select {
	case err = <-fetched:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("%w, and none could be fetched (%w): %s", ErrNoBinaries, err, install)
	}
	b, err := inspect(filepath.Join(folder, "bin"))
	if err != nil {
		return nil, fmt.Errorf("%w, and what was fetched does not run (%w): %s", ErrNoBinaries, err, install)
	}
	return b, nil
}

// fetchAs fetches with the rights of o on files. It runs on a thread that ends with it, for the
// rights are the thread's.
func fetchAs(ctx context.Context, o owner, cache, folder, repository string) error {
	runtime.LockOSThread() // never unlocked: the thread is not used again
	if err := o.takeFileRights(); err != nil {
		return err
	}
	runtimeFolder, err := os.MkdirTemp(cache, "runtime-")
	if err != nil {
		return fmt.Errorf("make a folder to fetch into: %w", err)
	}
	defer func() { _ = os.RemoveAll(runtimeFolder) }() // empty, or the library's litter
	port, err := freePort(ctx)
	if err != nil {
		return err
	}
	config := embedded.DefaultConfig().Version(fetchVersion).Port(port).Logger(io.Discard).
		CachePath(cache).BinariesPath(folder).RuntimePath(runtimeFolder).DataPath(unusableData)
	if repository != "" {
		config = config.BinaryRepositoryURL(repository)
	}
	err = embedded.NewDatabase(config).Start()
	if _, statErr := os.Stat(filepath.Join(folder, "bin", "postgres")); statErr == nil {
		return nil // fetched; the error is the data folder's, as intended
	}
	if err == nil {
		err = errors.New("the archive has no postgres in it")
	}
	return err
}

// freePort returns a port that nobody listens on: the library wants one although it never listens.
func freePort(ctx context.Context) (uint32, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "localhost:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	defer func() { _ = listener.Close() }() // nothing was accepted
	address, ok := listener.Addr().(*net.TCPAddr)
	if !ok {
		return 0, fmt.Errorf("find a free port: %v is no TCP address", listener.Addr())
	}
	return uint32(address.Port), nil
}
