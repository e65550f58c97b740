package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// ticksPerSecond is what Linux counts the CPU of a process in, on all of Go's platforms.
const ticksPerSecond = 100

// usage is what /proc/<pid>/stat says of a process.
type usage struct {
	parent        int
	own, children float64 // seconds of CPU: its own, and its children's that have ended
}

// treeCPU returns the seconds of CPU that a process and its children have used, ended ones included. A child's
// own children are not counted; PostgreSQL has none.
func treeCPU(b *testing.B, pid int) float64 {
	b.Helper()
	parent, err := readUsage(pid)
	if err != nil {
		b.Fatal(err)
	}
	total := parent.own + parent.children
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		b.Fatal(err)
	}
	for _, name := range stats {
		id, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if err != nil {
			continue
		}
		if child, err := readUsage(id); err == nil && child.parent == pid { // who has ended meanwhile counts with the parent next time
			total += child.own
		}
	}
	return total
}

// schedulersCPU returns the seconds of CPU that all schedulers have used.
func (s *stack) schedulersCPU(b *testing.B) (seconds float64) {
	b.Helper()
	for _, scheduler := range s.Schedulers {
		seconds += treeCPU(b, scheduler.PID)
	}
	return seconds
}

func readUsage(pid int) (usage, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return usage{}, err
	}
	// The name in parentheses may have spaces; what follows has not.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 15 {
		return usage{}, fmt.Errorf("process %d: %d fields in its stat", pid, len(fields))
	}
	var n [5]int // ppid, utime, stime, cutime, cstime: fields 4 and 14 to 17 of proc(5)
	for i, at := range [5]int{1, 11, 12, 13, 14} {
		if n[i], err = strconv.Atoi(fields[at]); err != nil {
			return usage{}, fmt.Errorf("process %d: %w", pid, err)
		}
	}
	return usage{parent: n[0], own: float64(n[1]+n[2]) / ticksPerSecond, children: float64(n[3]+n[4]) / ticksPerSecond}, nil
}

// selfCPU returns the seconds of CPU that this process has used.
func selfCPU(b *testing.B) float64 {
	b.Helper()
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return (time.Duration(used.Utime.Nano()) + time.Duration(used.Stime.Nano())).Seconds()
}
