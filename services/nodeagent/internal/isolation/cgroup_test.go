package isolation

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCgroupMounts(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		mountinfo, self string
		want            []cgroupMount
	}{
		"a modern host": {
			"30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "0::/system.slice/berth.service\n",
			[]cgroupMount{{version: 2, own: "/sys/fs/cgroup/system.slice/berth.service"}},
		},
		"both versions, the second first": {
			"31 1 0:1 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n32 1 0:2 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n33 1 0:3 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
			"9:pids:/\n6:freezer:/x\n0::/\n",
			[]cgroupMount{
				{version: 2, own: "/sys/fs/cgroup/unified"},
				{version: 1, controllers: []string{"pids"}, own: "/sys/fs/cgroup/pids"},
				{version: 1, controllers: []string{"freezer"}, own: "/sys/fs/cgroup/freezer/x"},
			},
		},
		"a container that sees its part only": {
			"40 1 0:1 /docker/abc /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n", "4:pids:/docker/abc\n",
			[]cgroupMount{{version: 1, controllers: []string{"pids"}, own: "/sys/fs/cgroup/pids"}},
		},
		"our group is outside of what is mounted": {
			"40 1 0:1 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "0::/other\n", nil,
		},
		"no cgroups":   {"1 0 8:1 / / rw - ext4 /dev/sda rw\n", "", nil},
		"broken lines": {"x\n - \n1 2 3 - cgroup2\n", "0\n::\n", nil},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := cgroupMounts([]byte(tt.mountinfo), []byte(tt.self))
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(cgroupMount{})); diff != "" {
				t.Errorf("cgroupMounts (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseStat(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		text string
		want process
		ok   bool
	}{
		"a plain line":                {"42 (sh) S 7 42 42 0\n", process{42, 7, 'S'}, true},
		"a command like a stat line":  {"42 (a) R 1 (b) T 9 1\n", process{42, 9, 'T'}, true},
		"a command with blanks":       {"42 (my app) Z 1 0\n", process{42, 1, 'Z'}, true},
		"nothing":                     {"", process{}, false},
		"a line that ends too early":  {"42 (sh)", process{}, false},
		"a parent that is no number":  {"42 (sh) S x 1", process{}, false},
		"a process that is no number": {"x (sh) S 1 1", process{}, false},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, ok := parseStat([]byte(tt.text))
			if got != tt.want || ok != tt.ok {
				t.Errorf("parseStat(%q) = %v, %v, want %v, %v", tt.text, got, ok, tt.want, tt.ok)
			}
		})
	}
}

func TestFamilyIsRootAndAllBelow(t *testing.T) {
	t.Parallel()
	all := []process{{pid: 1}, {pid: 5, parent: 1}, {pid: 9, parent: 7}, {pid: 7, parent: 5}, {pid: 6, parent: 1}, {pid: 8, parent: 5}}
	var got []int
	for _, p := range family(5, all) {
		got = append(got, p.pid)
	}
	if diff := cmp.Diff([]int{5, 7, 8, 9}, got); diff != "" {
		t.Errorf("family (-want +got):\n%s", diff)
	}
	if got := family(77, all); len(got) != 0 {
		t.Errorf("family of nobody is %v", got)
	}
}

func TestAParentThatWaitsForItsStoppedChildStandsStill(t *testing.T) {
	t.Parallel()
	parent := process{pid: 5, parent: 1, state: 'D'}
	cases := map[string]struct {
		child byte
		want  bool
	}{
		"vfork with a stopped child": {'T', true},
		"vfork with a running child": {'R', false},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			members := []process{parent, {pid: 6, parent: 5, state: tt.child}}
			if got := standsStill(parent, members); got != tt.want {
				t.Errorf("standsStill = %v, want %v", got, tt.want)
			}
		})
	}
}
