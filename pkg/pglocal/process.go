//go:build unix

package pglocal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// alive tells whether a process exists and has not ended: a zombie has.
func alive(pid int) bool {
	if err := syscall.Kill(pid, 0); err != nil && !errors.Is(err, syscall.EPERM) {
		return false
	}
	if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil {
		state, _ := stateAndParent(stat)
		return state != 'Z' && state != 'X'
	}
	return true
}

// serves tells whether a process is a live server on data. Where the system does not tell, any live
// process is taken for one: better a refusal than two servers.
func serves(pid int, data string) bool {
	if pid == os.Getpid() || !alive(pid) {
		return false
	}
	cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
	if err != nil {
		return true
	}
	return cwd == resolve(data) // a server's working folder is its data folder
}

// stateAndParent reads /proc/<pid>/stat. The name in brackets may hold anything, brackets too.
func stateAndParent(stat []byte) (state byte, parent int) {
	end := bytes.LastIndexByte(stat, ')')
	fields := strings.Fields(string(stat[end+1:]))
	if len(fields) < 2 || len(fields[0]) != 1 {
		return 0, 0
	}
	parent, err := strconv.Atoi(fields[1])
	if err != nil {
		return 0, 0
	}
	return fields[0][0], parent
}

// family returns a process and its children. Backends leave their parent's group, so the group does
// not tell.
func family(pid int) ([]int, error) {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	if len(stats) == 0 {
		return nil, errors.New("this system has no /proc to list processes by")
	}
	members := []int{pid}
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // it ended meanwhile
		}
		child, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			continue
		}
		if _, parent := stateAndParent(stat); parent == pid {
			members = append(members, child)
		}
	}
	return members, nil
}

// signalFamily sends a signal to a process and then to its children, or the other way round.
func signalFamily(pid int, signal syscall.Signal, childrenFirst bool) error {
	members, err := family(pid)
	if err != nil {
		return err
	}
	if childrenFirst {
		slices.Reverse(members)
	}
	for _, member := range members {
		if err := syscall.Kill(member, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("signal process %d: %w", member, err)
		}
	}
	return nil
}

// waitFor waits for a started command; when ctx ends first, it kills it.
func waitFor(ctx context.Context, cmd *exec.Cmd) error {
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		_ = cmd.Process.Kill() // it may have ended by itself
		return errors.Join(ctx.Err(), <-ended)
	}
}

func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
