package heartbeat

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	schedulerv1 "berth/rpc/scheduler/v1"
)

// Machine measures this machine. It is safe for concurrent use.
type Machine struct {
	dataDir string

	mu   sync.Mutex
	last cpuTimes
}

// NewMachine returns a Machine whose disk is the one dataDir is on.
func NewMachine(dataDir string) *Machine {
	m := &Machine{dataDir: dataDir}
	m.last, _ = readCPUTimes()
	return m
}

// Info returns what does not change while the machine runs. What cannot be read stays empty.
func (m *Machine) Info() *schedulerv1.MachineInfo {
	info := &schedulerv1.MachineInfo{CpuArchitecture: runtime.GOARCH}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		info.CpuArchitecture = unix.ByteSliceToString(name.Machine[:])
	}
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return info
	}
	facts := parseCPUInfo(text)
	info.CpuFamily, info.CpuModel, info.CpuModelName = facts["cpu family"], facts["model"], facts["model name"]
	return info
}

// parseCPUInfo returns the facts of the first processor.
func parseCPUInfo(text []byte) map[string]string {
	first, _, _ := bytes.Cut(text, []byte("\n\n"))
	facts := make(map[string]string)
	for line := range strings.Lines(string(first)) {
		if key, value, found := strings.Cut(line, ":"); found {
			facts[strings.TrimSpace(key)] = strings.TrimSpace(value)
		}
	}
	return facts
}

// Measure fills in what the machine's own counters say. CPU use is since the last Measure.
func (m *Machine) Measure(s *schedulerv1.NodeSnapshot) {
	s.CpuCount = uint32(runtime.NumCPU())
	if now, ok := readCPUTimes(); ok {
		m.mu.Lock()
		s.CpuPercent = now.percentSince(m.last)
		m.last = now
		m.mu.Unlock()
	}
	if text, err := os.ReadFile("/proc/meminfo"); err == nil {
		s.MemoryTotalBytes, s.MemoryUsedBytes = parseMemory(text)
	}
	if disk := diskOf(m.dataDir); disk != nil {
		s.Disks = []*schedulerv1.DiskMetric{disk}
	}
}

// cpuTimes are ticks of all processors since the machine started.
type cpuTimes struct{ busy, total uint64 }

func readCPUTimes() (cpuTimes, bool) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return cpuTimes{}, false
	}
	return parseCPUTimes(text)
}

// parseCPUTimes reads the first line of /proc/stat: user nice system idle iowait irq softirq steal; guest times are in user
// already.
func parseCPUTimes(text []byte) (cpuTimes, bool) {
	line, _, _ := bytes.Cut(text, []byte("\n"))
	fields := strings.Fields(string(line))
	if len(fields) < 6 || fields[0] != "cpu" {
		return cpuTimes{}, false
	}
	var t cpuTimes
	for i, field := range fields[1:min(len(fields), 9)] {
		n, err := strconv.ParseUint(field, 10, 64)
		if err != nil {
			return cpuTimes{}, false
		}
		t.total += n
		if i != 3 && i != 4 {
			t.busy += n
		}
	}
	return t, true
}

func (t cpuTimes) percentSince(before cpuTimes) uint32 {
	if t.total <= before.total || t.busy < before.busy {
		return 0
	}
	return uint32(min((t.busy-before.busy)*100/(t.total-before.total), 100))
}

// parseMemory reads /proc/meminfo. Used is what a new process could not get.
func parseMemory(text []byte) (total, used uint64) {
	kib := make(map[string]uint64)
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) >= 2 {
			kib[strings.TrimSuffix(fields[0], ":")], _ = strconv.ParseUint(fields[1], 10, 64)
		}
	}
	total = kib["MemTotal"] << 10
	return total, total - min(kib["MemAvailable"]<<10, total)
}

func diskOf(dir string) *schedulerv1.DiskMetric {
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) != nil {
		return nil
	}
	block := uint64(st.Bsize)
	disk := &schedulerv1.DiskMetric{TotalBytes: st.Blocks * block, UsedBytes: (st.Blocks - st.Bfree) * block}
	if text, err := os.ReadFile("/proc/self/mountinfo"); err == nil {
		if real, err := filepath.EvalSymlinks(dir); err == nil {
			dir = real
		}
		disk.MountPoint, disk.Device, disk.FilesystemType = mountOf(dir, string(text))
	}
	return disk
}

// mountOf returns the mount that holds dir: the one with the longest path, of equal ones the last, which covers the others.
func mountOf(dir, mountinfo string) (point, device, kind string) {
	for line := range strings.Lines(mountinfo) {
		before, after, found := strings.Cut(line, " - ")
		place, source := strings.Fields(before), strings.Fields(after)
		if !found || len(place) < 5 || len(source) < 2 {
			continue
		}
		p := place[4]
		if (p == "/" || dir == p || strings.HasPrefix(dir, p+"/")) && len(p) >= len(point) {
			point, kind, device = p, source[0], source[1]
		}
	}
	return point, device, kind
}
