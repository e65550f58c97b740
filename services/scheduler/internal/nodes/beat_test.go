package nodes

import (
	"errors"
	"math"
	"strings"
	"testing"

	"berth/services/internal/node"
	"berth/services/internal/route"
)

func TestLoadSaturates(t *testing.T) {
	t.Parallel()
	got := loadOf(&Snapshot{
		Status: 99, AllocatedCPU: math.MaxUint32, AllocatedMemoryBytes: math.MaxUint64, CPUPercent: math.MaxUint32,
		CPUCount: math.MaxUint32, MemoryUsedBytes: math.MaxUint64, MemoryTotalBytes: math.MaxUint64,
		SandboxCount: math.MaxUint32, SandboxStartingCount: math.MaxUint32, CreateSuccesses: math.MaxUint64,
		CreateFails: math.MaxUint64, ReportedAtUnixMS: math.MinInt64, PausedSandboxCount: math.MaxUint32,
		PausedAllocatedCPU: math.MaxUint32, PausedAllocatedMemoryBytes: math.MaxUint64,
	})
	const n32, n64 = math.MaxInt32, math.MaxInt64
	want := load{
		reportedAt: math.MinInt64, createSuccesses: n64, createFails: n64, memoryUsed: n64, memoryTotal: n64, allocatedMemory: n64,
		pausedMemory: n64, cpuPercent: n32, cpuCount: n32, allocatedCPU: n32, sandboxes: n32, starting: n32, paused: n32,
		pausedCPU: n32, given: true,
	}
	if got != want {
		t.Errorf("loadOf = %+v, want %+v", got, want)
	}
	if got := loadOf(nil); got != (load{}) {
		t.Errorf("loadOf(nil) = %+v, want nothing given", got)
	}
}

func TestTheFactsDigestTellsEveryFactApart(t *testing.T) {
	t.Parallel()
	beats := map[string]Beat{
		"nothing":                {},
		"cluster":                {Cluster: "x"},
		"version":                {Version: "x"},
		"commit":                 {Commit: "x"},
		"endpoint":               {Endpoint: "x"},
		"a label":                {Labels: map[string]string{"a": "b"}},
		"a label, split before":  {Labels: map[string]string{"": "ab"}},
		"a label, split after":   {Labels: map[string]string{"ab": ""}},
		"two labels":             {Labels: map[string]string{"a": "b", "c": "d"}},
		"a capability":           {Capabilities: []string{"a"}},
		"two capabilities":       {Capabilities: []string{"a", "b"}},
		"capacity for sandboxes": {Capacity: Capacity{Sandboxes: 1}},
		"capacity of cpu":        {Capacity: Capacity{CPUMillis: 1}},
		"capacity of memory":     {Capacity: Capacity{MemoryBytes: 1}},
		"an empty machine":       {Machine: &Machine{}},
		"a cpu family":           {Machine: &Machine{CPUFamily: "x"}},
		"a cpu model":            {Machine: &Machine{CPUModel: "x"}},
		"a cpu model's name":     {Machine: &Machine{CPUModelName: "x"}},
		"a cpu architecture":     {Machine: &Machine{CPUArchitecture: "x"}},
		"a cpu configuration":    {Machine: &Machine{CPUConfig: "x"}},
		"a peer":                 {Peer: &Peer{Backend: "a", Address: "b"}},
		"a peer, split before":   {Peer: &Peer{Backend: "", Address: "ab"}},
	}
	seen := map[string]string{}
	for name, b := range beats {
		digest := string(b.factsDigest())
		if other, twice := seen[digest]; twice {
			t.Errorf("%q and %q have one digest", name, other)
		}
		seen[digest] = name
	}
	forth := Beat{Capabilities: []string{"a", "b", "a"}, Labels: map[string]string{"x": "1", "y": "2"}}
	back := Beat{Capabilities: []string{"b", "a"}, Labels: map[string]string{"y": "2", "x": "1"}}
	if string(forth.factsDigest()) != string(back.factsDigest()) {
		t.Error("the order in which facts came changed the digest")
	}
}

func TestABeatThatIsNotFitToStoreIsRefusedBeforeAnythingIsAsked(t *testing.T) {
	t.Parallel()
	n := &Nodes{guard: mustGuard(t)}
	many := map[string]string{}
	for i := range maxLabels + 1 {
		many[strings.Repeat("k", i+1)] = "v"
	}
	tests := map[string]struct {
		change func(*Beat)
		want   error
	}{
		"an instance that is too long":        {func(b *Beat) { b.Instance = strings.Repeat("i", 129) }, node.ErrBadTag},
		"a cluster with a control character":  {func(b *Beat) { b.Cluster = "c\x00" }, node.ErrBadTag},
		"a version with a control character":  {func(b *Beat) { b.Version = "v\n1" }, node.ErrBadTag},
		"a commit that is too long":           {func(b *Beat) { b.Commit = strings.Repeat("c", 1025) }, node.ErrBadTag},
		"too many labels":                     {func(b *Beat) { b.Labels = many }, node.ErrBadTag},
		"a label that is too long":            {func(b *Beat) { b.Labels = map[string]string{"k": strings.Repeat("v", 64)} }, node.ErrBadTag},
		"a label that is no text":             {func(b *Beat) { b.Labels = map[string]string{"k": "\xff"} }, node.ErrBadTag},
		"a negative capacity":                 {func(b *Beat) { b.Capacity.CPUMillis = -1 }, node.ErrBadTag},
		"a capability with control character": {func(b *Beat) { b.Capabilities = []string{"a\t"} }, node.ErrBadTag},
		"a digest that is none":               {func(b *Beat) { b.RosterUnchanged, b.RosterDigest = true, []byte("short") }, node.ErrBadRoster},
		"a roster that is too long":           {func(b *Beat) { b.Roster = make(node.Roster, node.MaxRoster+1) }, node.ErrBadRoster},
		"an endpoint with a path":             {func(b *Beat) { b.Endpoint = "http://10.0.0.1:1/x" }, route.ErrNotAllowed},
		"an endpoint of another scheme":       {func(b *Beat) { b.Endpoint = "ftp://10.0.0.1:1" }, route.ErrNotAllowed},
		"a peer's address without end":        {func(b *Beat) { b.Peer = &Peer{Backend: "b", Address: strings.Repeat("a", 1025)} }, node.ErrBadTag},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := beatOf("a", "i1", endpointA, "s1")
			tt.change(&b)
			if _, err := n.prepare(b); !errors.Is(err, tt.want) {
				t.Errorf("prepare = %v, want %v", err, tt.want)
			}
		})
	}
	if p, err := n.prepare(beatOf("a", "i1", endpointA+"/", "s1")); err != nil || p.Endpoint != endpointA {
		t.Errorf("prepare = %v, %v, want the trailing slash cut", p, err)
	}
}

func mustGuard(t testing.TB) *route.Guard {
	t.Helper()
	guard, err := route.NewGuard(route.GuardConfig{CIDRs: route.DefaultCIDRs, Schemes: route.DefaultSchemes, Loopback: true})
	if err != nil {
		t.Fatalf("NewGuard: %v", err)
	}
	return guard
}
