//go:build kubernetes

package kubernetes

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// program is the berth program under test, built once; servers is the folder of etcd and kube-apiserver.
var program, servers string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	var found bool
	if servers, found = os.LookupEnv("BERTH_TEST_KUBEAPI"); !found || servers == "" {
		fmt.Fprintln(os.Stderr, "kubernetes: BERTH_TEST_KUBEAPI names no folder with etcd and kube-apiserver: run make test/kubernetes")
		return 1
	}
	dir, err := os.MkdirTemp("", "berth-kubernetes-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "kubernetes:", err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	program = filepath.Join(dir, "berth")
	build := exec.Command("go", "build", "-o", program, "berth/services/berth")
	build.Stdout, build.Stderr = os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "kubernetes: build berth:", err)
		return 1
	}
	return m.Run()
}
