package heartbeat

import "testing"

func TestCPUPercent(t *testing.T) {
	t.Parallel()
	before, ok := parseCPUTimes([]byte("cpu  100 0 50 800 50 0 0 0 30 0\ncpu0 1 1 1 1\n"))
	if !ok || before.busy != 150 || before.total != 1000 {
		t.Fatalf("parseCPUTimes = %+v, %v", before, ok)
	}
	cases := map[string]struct {
		after cpuTimes
		want  uint32
	}{
		"half busy":             {cpuTimes{busy: 200, total: 1100}, 50},
		"idle":                  {cpuTimes{busy: 150, total: 1100}, 0},
		"no time passed":        {before, 0},
		"counters that went by": {cpuTimes{busy: 10, total: 20}, 0},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := tt.after.percentSince(before); got != tt.want {
				t.Errorf("percentSince = %d, want %d", got, tt.want)
			}
		})
	}
	for _, broken := range []string{"", "cpu", "cpu a b c d e", "intr 1 2 3 4 5 6"} {
		if _, ok := parseCPUTimes([]byte(broken)); ok {
			t.Errorf("parseCPUTimes(%q) is ok", broken)
		}
	}
}

func TestMemoryAndProcessor(t *testing.T) {
	t.Parallel()
	total, used := parseMemory([]byte("MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    400 kB\n"))
	if total != 1000<<10 || used != 600<<10 {
		t.Errorf("parseMemory = %d, %d", total, used)
	}
	facts := parseCPUInfo([]byte("processor\t: 0\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: A: B\n\nprocessor\t: 1\nmodel\t: 9\n"))
	if facts["cpu family"] != "6" || facts["model"] != "85" || facts["model name"] != "A: B" {
		t.Errorf("parseCPUInfo = %v", facts)
	}
}

func TestMountOf(t *testing.T) {
	t.Parallel()
	const info = "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / /data rw - xfs /dev/b rw\n3 1 8:3 / /data rw - ext4 /dev/c rw\n4 1 8:4 / /database rw - ext4 /dev/d rw\n"
	for dir, want := range map[string]string{"/data/x": "/dev/c", "/data": "/dev/c", "/dat": "/dev/a", "/database/1": "/dev/d"} {
		if _, device, _ := mountOf(dir, info); device != want {
			t.Errorf("mountOf(%s) is on %s, want %s", dir, device, want)
		}
	}
}
