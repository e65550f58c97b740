package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"berth/pkg/pglocal"
)

// binary is the berth program under test, built once.
var binary string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	if err := missing(); err != nil {
		if ci, ok := os.LookupEnv("CI"); ok && ci != "" {
			fmt.Fprintln(os.Stderr, "e2e:", err)
			return 1
		}
		fmt.Fprintln(os.Stderr, "e2e: skipped:", err)
		return 0
	}
	dir, err := os.MkdirTemp("", "berth-e2e-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	// Applications in sandboxes may run as another user, and run this file.
	if err := os.Chmod(dir, 0o755); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		return 1
	}
	binary = filepath.Join(dir, "berth")
	build := exec.Command("go", "build", "-o", binary, "berth/services/berth")
	build.Stdout, build.Stderr = os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "e2e: build berth:", err)
		return 1
	}
	return m.Run()
}

// missing says which program these tests cannot do without.
func missing() error {
	_, postgres := pglocal.Find()
	_, psql := exec.LookPath("psql")
	_, bubblewrap := exec.LookPath("bwrap")
	return errors.Join(postgres, psql, bubblewrap)
}
