package isolation

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// hierarchy is one place in a cgroup tree where groups of sandboxes are made: <base>/<sandbox>.
type hierarchy struct {
	version int    // 2 or 1
	base    string // a folder of ours
}

// String names the hierarchy for the log.
func (h hierarchy) String() string {
	if h.base == "" {
		return "none"
	}
	return "cgroup v" + strconv.Itoa(h.version)
}

func (h hierarchy) group(id string) string { return filepath.Join(h.base, id) }

// cgroupMount is one cgroup file system of this machine, and where this process is in it.
type cgroupMount struct {
	version     int
	controllers []string // v1 only
	own         string   // folder of our own group
}

// cgroupMounts finds the cgroup file systems in the texts of /proc/self/mountinfo and /proc/self/cgroup, v2 first. A mount that
// does not show our own group is left out.
func cgroupMounts(mountinfo, self []byte) []cgroupMount {
	v2Path, v1Paths := ownGroups(self)
	var mounts []cgroupMount
	for line := range strings.Lines(string(mountinfo)) {
		before, after, found := strings.Cut(strings.TrimSpace(line), " - ")
		if !found {
			continue
		}
		place, kind := strings.Fields(before), strings.Fields(after)
		if len(place) < 5 || len(kind) < 3 {
			continue
		}
		root, point := place[3], place[4]
		switch kind[0] {
		case "cgroup2":
			if rel, ok := below(root, v2Path); ok {
				mounts = append(mounts, cgroupMount{version: 2, own: filepath.Join(point, rel)})
			}
		case "cgroup":
			controllers := strings.Split(kind[2], ",")
			for _, c := range []string{"pids", "freezer"} {
				path, known := v1Paths[c]
				if !known || !slices.Contains(controllers, c) {
					continue
				}
				if rel, ok := below(root, path); ok {
					mounts = append(mounts, cgroupMount{version: 1, controllers: []string{c}, own: filepath.Join(point, rel)})
				}
			}
		}
	}
	slices.SortStableFunc(mounts, func(a, b cgroupMount) int { return b.version - a.version })
	return mounts
}

// ownGroups reads the lines of /proc/self/cgroup: "0::/path" for v2, "5:pids,cpu:/path" for v1.
func ownGroups(self []byte) (v2 string, v1 map[string]string) {
	v1 = make(map[string]string)
	lines := bufio.NewScanner(bytes.NewReader(self))
	for lines.Scan() {
		parts := strings.SplitN(lines.Text(), ":", 3)
		if len(parts) != 3 {
			continue
		}
		if parts[0] == "0" && parts[1] == "" {
			v2 = parts[2]
			continue
		}
		for c := range strings.SplitSeq(parts[1], ",") {
			v1[c] = parts[2]
		}
	}
	return v2, v1
}

// below returns path relative to root, and false if it is not below it.
func below(root, path string) (string, bool) {
	if path == "" {
		return "", false
	}
	rel, err := filepath.Rel(root, path)
	if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
		return "", false
	}
	return rel, true
}

// readCgroupMounts is cgroupMounts of this process.
func readCgroupMounts() []cgroupMount {
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	self, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil
	}
	return cgroupMounts(mountinfo, self)
}

// candidates returns where groups with the controller might be made, v2 first, each base already made. Whether a process may
// really be moved there only a try can tell.
func candidates(controller, name string, mounts []cgroupMount) []hierarchy {
	var found []hierarchy
	for _, m := range mounts {
		if m.version == 1 && !slices.Contains(m.controllers, controller) {
			continue
		}
		base := filepath.Join(m.own, name)
		if err := os.Mkdir(base, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			continue
		}
		if m.version == 2 && controller == "pids" && !delegatePids(m.own, base) {
			continue
		}
		found = append(found, hierarchy{version: m.version, base: base})
	}
	return found
}

// delegatePids makes the pids controller available below base. It works where our own group has no processes of its own (the
// root of the machine's tree), or where whoever started us delegated the controller.
func delegatePids(own, base string) bool {
	for _, dir := range []string{own, base} {
		enabled, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
		if err != nil {
			return false
		}
		if slices.Contains(strings.Fields(string(enabled)), "pids") {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+pids"), 0); err != nil {
			return false
		}
	}
	return true
}

// add makes the group of id, if it is not there, and moves the process into it. Threads and later children follow.
func (h hierarchy) add(id string, pid int) error {
	dir := h.group(id)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make cgroup: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
		return fmt.Errorf("enter cgroup: %w", err)
	}
	return nil
}

// limitPids limits the processes and threads of the group.
func (h hierarchy) limitPids(id string, most uint64) error {
	if err := os.WriteFile(filepath.Join(h.group(id), "pids.max"), []byte(strconv.FormatUint(most, 10)), 0); err != nil {
		return fmt.Errorf("limit processes: %w", err)
	}
	return nil
}

// freeze stops or wakes all processes of the group and waits until that is so.
func (h hierarchy) freeze(ctx context.Context, id string, frozen bool) error {
	dir := h.group(id)
	order, file := "0", filepath.Join(dir, "cgroup.freeze")
	if frozen {
		order = "1"
	}
	done := func() (bool, error) {
		text, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
		return strings.Contains(string(text), "frozen "+order), err
	}
	if h.version == 1 {
		order, file = "THAWED", filepath.Join(dir, "freezer.state")
		if frozen {
			order = "FROZEN"
		}
		done = func() (bool, error) {
			text, err := os.ReadFile(file)
			return strings.TrimSpace(string(text)) == order, err
		}
	}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		// A v1 freezer may stay FREEZING until it is told again.
		if err := os.WriteFile(file, []byte(order), 0); err != nil {
			return fmt.Errorf("write %s: %w", filepath.Base(file), err)
		}
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("processes did not freeze: %w", ctx.Err())
		}
	}
}

// remove takes the empty group away. A group that was never made is no error.
func (h hierarchy) remove(ctx context.Context, id string) error {
	if h.base == "" {
		return nil
	}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		err := syscall.Rmdir(h.group(id))
		if err == nil || err == syscall.ENOENT {
			return nil
		}
		if err != syscall.EBUSY {
			return fmt.Errorf("remove cgroup: %w", err)
		}
		select {
		case <-tick.C: // dying processes leave in a moment
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup: %w", err)
		}
	}
}

// clear kills whatever a former agent left in groups below base, frozen or not, and removes them.
func (h hierarchy) clear(ctx context.Context) error {
	entries, err := os.ReadDir(h.base)
	if err != nil {
		return fmt.Errorf("look for left sandboxes: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		if h.version == 1 {
			_ = os.WriteFile(filepath.Join(h.group(e.Name()), "freezer.state"), []byte("THAWED"), 0)
		}
		text, err := os.ReadFile(filepath.Join(h.group(e.Name()), "cgroup.procs"))
		if err != nil {
			continue
		}
		for field := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		errs = append(errs, h.remove(ctx, e.Name()))
	}
	return errors.Join(errs...)
}
