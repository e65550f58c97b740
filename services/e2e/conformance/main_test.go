package conformance

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"berth/pkg/pglocal"
)

// program is the berth program under test, built once.
var program string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	if _, err := pglocal.Find(os.Getenv("BERTH_TEST_POSTGRES_BIN")); errors.Is(err, pglocal.ErrNoBinaries) {
		if ci, ok := os.LookupEnv("CI"); ok && ci != "" {
			fmt.Fprintln(os.Stderr, "conformance:", err)
			return 1
		}
		fmt.Fprintln(os.Stderr, "conformance: skipped: no PostgreSQL of its own can be started and stopped here:", err)
		return 0
	}
	dir, err := os.MkdirTemp("", "berth-conformance-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	program = filepath.Join(dir, "berth")
	build := exec.Command("go", "build", "-o", program, "berth/services/berth")
	build.Stdout, build.Stderr = os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "conformance: build berth:", err)
		return 1
	}
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		return 1
	}
	return code
}
