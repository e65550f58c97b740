package isolation

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// process is one line of the process table.
type process struct {
	pid, parent int
	state       byte
}

// processes returns the process table as /proc shows it to us.
func processes() ([]process, error) {
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	list := make([]process, 0, len(paths))
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // ended meanwhile
		}
		if p, ok := parseStat(text); ok {
			list = append(list, p)
		}
	}
	return list, nil
}

// parseStat reads pid, state and parent of a /proc/<pid>/stat line. The command between the brackets may hold anything, brackets
// included, so the last one counts.
func parseStat(text []byte) (process, bool) {
	open, end := bytes.IndexByte(text, ' '), bytes.LastIndexByte(text, ')')
	if open < 0 || end < 0 {
		return process{}, false
	}
	fields := bytes.Fields(text[end+1:])
	if len(fields) < 2 || len(fields[0]) != 1 {
		return process{}, false
	}
	pid, err := strconv.Atoi(string(text[:open]))
	if err != nil {
		return process{}, false
	}
	parent, err := strconv.Atoi(string(fields[1]))
	if err != nil {
		return process{}, false
	}
	return process{pid: pid, parent: parent, state: fields[0][0]}, true
}

// family returns root and all its descendants, root first. Inside a pid namespace orphans become children of its pid 1,
// so the family of a sandbox's init is everything in the sandbox.
func family(root int, all []process) []process {
	children := make(map[int][]process)
	var found []process
	for _, p := range all {
		children[p.parent] = append(children[p.parent], p)
		if p.pid == root {
			found = append(found, p)
		}
	}
	for i := 0; i < len(found); i++ {
		found = append(found, children[found[i].pid]...)
	}
	return found
}

// stopAll sends SIGSTOP to the family of root until all of it has stopped: a process may have forked between the look and the
// signal, so it looks again.
func stopAll(ctx context.Context, root int) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		all, err := processes()
		if err != nil {
			return err
		}
		left := 0
		members := family(root, all)
		for _, p := range members {
			if standsStill(p, members) {
				continue
			}
			left++
			if err := syscall.Kill(p.pid, syscall.SIGSTOP); err != nil && err != syscall.ESRCH {
				return fmt.Errorf("stop process %d: %w", p.pid, err)
			}
		}
		if left == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%d processes did not stop: %w", left, ctx.Err())
		}
	}
}

// standsStill reports whether p cannot run. A parent in vfork waits in the kernel, deaf to SIGSTOP, until its child has
// executed another program: with that child stopped it stands still too, and stops for good when the child goes on.
func standsStill(p process, members []process) bool {
	switch p.state {
	case 'T', 't', 'Z', 'X':
		return true
	case 'D':
		for _, child := range members {
			if child.parent == p.pid && (child.state == 'T' || child.state == 't') {
				return true
			}
		}
	}
	return false
}

// continueAll wakes the family of root, parents last, so that a parent that polls its children finds them awake.
func continueAll(root int) error {
	all, err := processes()
	if err != nil {
		return err
	}
	members := family(root, all)
	for _, p := range slices.Backward(members) {
		if err := syscall.Kill(p.pid, syscall.SIGCONT); err != nil && err != syscall.ESRCH {
			return fmt.Errorf("continue process %d: %w", p.pid, err)
		}
	}
	return nil
}

// killDescendants kills everything below root, for a root that is not a pid 1.
func killDescendants(root int) {
	for range 100 { // each round kills at least one generation
		all, err := processes()
		if err != nil {
			return
		}
		members := family(root, all)
		alive := 0
		for _, p := range members {
			if p.pid != root && p.state != 'Z' {
				alive++
				_ = syscall.Kill(p.pid, syscall.SIGKILL)
			}
		}
		if alive == 0 {
			return
		}
	}
}
