package placement

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// ready is a node that may take a create: 8 vCPUs, 16 GiB, nothing on it.
func ready(id node.ID, change ...func(*Node)) *Node {
	n := &Node{
		ID: id, Endpoint: "http://10.0.0.1:8000", Present: true, Heard: true, LeaseHeld: true, Reported: node.Ready,
		Report: Report{Given: true, CPUCount: 8, MemoryTotalBytes: 16 * gib},
	}
	for _, f := range change {
		f(n)
	}
	return n
}

func luck() Draw { return Draw{Rand: rand.New(rand.NewPCG(1, 2))} }

func TestEveryReasonRefusesWithItsName(t *testing.T) {
	t.Parallel()
	few := func(n uint64) *uint64 { return &n }
	tests := map[string]struct {
		node    func(*Node)
		request func(*Request)
		limits  Limits
		want    refusal // the zero one passes
	}{
		"a ready node passes":                        {},
		"a node that no source lists is absent":      {node: func(n *Node) { n.Present = false }, want: refusal{stage: byStanding, reason: Absent}},
		"absent beats unregistered":                  {node: func(n *Node) { n.Present, n.Ended = false, true }, want: refusal{stage: byStanding, reason: Absent}},
		"one that has left is unregistered":          {node: func(n *Node) { n.Ended, n.LeaseHeld = true, false }, want: refusal{stage: byStanding, reason: Unregistered}},
		"one whose lease expired is unhealthy":       {node: func(n *Node) { n.LeaseHeld = false }, want: refusal{stage: byStanding, reason: Unhealthy}},
		"one that says so is unhealthy":              {node: func(n *Node) { n.Reported = node.Unhealthy }, want: refusal{stage: byStanding, reason: Unhealthy}},
		"one that was never heard is connecting":     {node: func(n *Node) { n.Heard, n.LeaseHeld = false, false }, want: refusal{stage: byStanding, reason: Connecting}},
		"one that says nothing is connecting":        {node: func(n *Node) { n.Reported = node.Unspecified }, want: refusal{stage: byStanding, reason: Connecting}},
		"one that discovery says lingers":            {node: func(n *Node) { n.Lingering = true }, want: refusal{stage: byStanding, reason: Lingering}},
		"one that says it lingers":                   {node: func(n *Node) { n.Reported = node.Lingering }, want: refusal{stage: byStanding, reason: Lingering}},
		"a cordoned one":                             {node: func(n *Node) { n.Cordoned = true }, want: refusal{stage: byStanding, reason: Cordoned}},
		"a draining one":                             {node: func(n *Node) { n.Draining = true }, want: refusal{stage: byStanding, reason: Draining}},
		"one the caller excludes":                    {request: func(r *Request) { r.Exclude = []node.ID{"x", "n"} }, want: refusal{stage: byConstraint, reason: Excluded}},
		"one of another cluster":                     {request: func(r *Request) { r.Cluster = "c" }, want: refusal{stage: byConstraint, reason: OtherCluster}},
		"one that is not the pinned one":             {request: func(r *Request) { r.Constraints.Node = "m" }, want: refusal{stage: byConstraint, reason: Pinned}},
		"one without the runtime API":                {request: func(r *Request) { r.Managed = true }, want: refusal{stage: byConstraint, reason: NoRuntime}},
		"one with the runtime API passes":            {node: func(n *Node) { n.Capabilities = []string{"node.v1"} }, request: func(r *Request) { r.Managed = true }},
		"one with another label":                     {node: func(n *Node) { n.Labels = map[string]string{"zone": "a"} }, request: func(r *Request) { r.Constraints.Labels = map[string]string{"zone": "b"} }, want: refusal{stage: byConstraint, reason: OtherLabel}},
		"one without a label that is asked empty":    {request: func(r *Request) { r.Constraints.Labels = map[string]string{"zone": ""} }, want: refusal{stage: byConstraint, reason: OtherLabel}},
		"one with all labels passes":                 {node: func(n *Node) { n.Labels = map[string]string{"zone": "a", "x": "y"} }, request: func(r *Request) { r.Constraints.Labels = map[string]string{"zone": "a"} }},
		"one of another architecture":                {node: func(n *Node) { n.CPUArchitecture = "arm64" }, request: func(r *Request) { r.Constraints.CPUArchitecture = "x86_64" }, want: refusal{stage: byConstraint, reason: CPUArchitecture}},
		"one of a cluster without a template":        {request: func(r *Request) { r.Constraints.CPUTemplate = []byte{1} }, want: refusal{stage: byConstraint, reason: CPUTemplate}},
		"one of a cluster with another template":     {node: func(n *Node) { n.CPUTemplate = []byte{1, 2} }, request: func(r *Request) { r.Constraints.CPUTemplate = []byte{1} }, want: refusal{stage: byConstraint, reason: CPUTemplate}},
		"one of a cluster with that template passes": {node: func(n *Node) { n.CPUTemplate = []byte{1} }, request: func(r *Request) { r.Constraints.CPUTemplate = []byte{1} }},
		"one that holds no artifact":                 {request: requireArtifact, want: refusal{stage: byConstraint, reason: NoArtifact}},
		"one that holds another":                     {node: func(n *Node) { n.Holds = map[Artifact]bool{{"b", "l"}: true, {"c", "k"}: true} }, request: requireArtifact, want: refusal{stage: byConstraint, reason: NoArtifact}},
		"one that holds it passes":                   {node: func(n *Node) { n.Holds = map[Artifact]bool{{"b", "k"}: true} }, request: requireArtifact},
		"one that holds none, where it is a wish":    {request: func(r *Request) { r.Constraints.Artifact = Artifact{"b", "k"} }},
		"one with as many of the spread key":         {node: func(n *Node) { n.Spread = map[string]int64{"k": 2} }, request: func(r *Request) { r.Constraints.SpreadKey, r.Constraints.MaxPerNode = "k", 2 }, want: refusal{byConstraint, TooManyOfSpread, 3, 2}},
		"one with fewer passes":                      {node: func(n *Node) { n.Spread = map[string]int64{"k": 1} }, request: func(r *Request) { r.Constraints.SpreadKey, r.Constraints.MaxPerNode = "k", 2 }},
		"sandboxes, starting and held count":         {node: func(n *Node) { n.Report.Sandboxes, n.Report.Starting, n.Held.Sandboxes = 3, 1, 1 }, limits: Limits{SandboxCount: few(5)}, want: refusal{byLimit, MaxSandboxCount, 6, 5}},
		"one below the limit takes the last":         {node: func(n *Node) { n.Report.Sandboxes, n.Report.Starting, n.Held.Sandboxes = 3, 1, 0 }, limits: Limits{SandboxCount: few(5)}},
		"only starting and open ones count there":    {node: func(n *Node) { n.Report.Sandboxes, n.Report.Starting, n.Held = 90, 2, Held{Sandboxes: 9, Open: 1} }, limits: Limits{SandboxStartingCount: few(3)}, want: refusal{byLimit, MaxSandboxStartingCount, 4, 3}},
		"a measured CPU at its limit passes":         {node: func(n *Node) { n.Report.CPUPercent = 80 }, limits: Limits{CPUUsedPercent: few(80)}},
		"a measured CPU above does not":              {node: func(n *Node) { n.Report.CPUPercent = 81 }, limits: Limits{CPUUsedPercent: few(80)}, want: refusal{byLimit, MaxCPUUsedPercent, 81, 80}},
		"measured memory above does not":             {node: func(n *Node) { n.Report.MemoryUsedBytes = 15 * gib }, limits: Limits{MemoryUsedPercent: few(90)}, want: refusal{byLimit, MaxMemoryUsedPercent, 93.75, 90}},
		"memory of unknown size is skipped":          {node: func(n *Node) { n.Report.MemoryTotalBytes, n.Report.MemoryUsedBytes = 0, 5 }, limits: Limits{MemoryUsedPercent: few(1), MemoryAllocatedPercent: few(1)}},
		"promised CPU counts holds and this one":     {node: func(n *Node) { n.Report.AllocatedCPU, n.Held.CPUMillis = 6, 1000 }, limits: Limits{CPUAllocatedPercent: few(90)}, want: refusal{byLimit, MaxCPUAllocatedPercent, 100, 90}},
		"promised CPU at the limit passes":           {node: func(n *Node) { n.Report.AllocatedCPU, n.Held.CPUMillis = 6, 1000 }, limits: Limits{CPUAllocatedPercent: few(100)}},
		"promised memory above":                      {node: func(n *Node) { n.Report.AllocatedMemoryBytes = 16 * gib }, limits: Limits{MemoryAllocatedPercent: few(100)}, want: refusal{byLimit, MaxMemoryAllocatedPercent, 106.25, 100}},
		"paused ones count where the name says so":   {node: func(n *Node) { n.Report.Sandboxes, n.Report.Paused = 1, 2 }, limits: Limits{SandboxCountIncludingPaused: few(3)}, want: refusal{byLimit, MaxSandboxCountIncludingPaused, 4, 3}},
		"whole vCPUs, paused ones too":               {node: func(n *Node) { n.Report.AllocatedCPU, n.Report.PausedCPU = 2, 2 }, limits: Limits{AllocatedCPUIncludingPaused: few(4)}, want: refusal{byLimit, MaxAllocatedCPU, 5, 4}},
		"bytes, paused ones too":                     {node: func(n *Node) { n.Report.AllocatedMemoryBytes, n.Report.PausedMemoryBytes = gib, gib }, limits: Limits{AllocatedBytesIncludingPaused: few(uint64(2 * gib))}, want: refusal{byLimit, MaxAllocatedMemory, float64(3 * gib), float64(2 * gib)}},
		"declared sandboxes":                         {node: func(n *Node) { n.Report.Sandboxes, n.Declared.Sandboxes = 2, 2 }, want: refusal{byLimit, DeclaredSandboxes, 3, 2}},
		"declared CPU":                               {node: func(n *Node) { n.Held.CPUMillis, n.Declared.CPUMillis = 500, 1000 }, want: refusal{byLimit, DeclaredCPU, 1500, 1000}},
		"declared memory":                            {node: func(n *Node) { n.Declared.MemoryBytes = gib - 1 }, want: refusal{byLimit, DeclaredMemory, float64(gib), float64(gib - 1)}},
		"all of a group must fit":                    {node: func(n *Node) { n.Declared.Sandboxes = 2 }, request: func(r *Request) { r.Count = 3 }, want: refusal{byLimit, DeclaredSandboxes, 3, 2}},
		"a limit of zero takes nothing":              {limits: Limits{SandboxCount: few(0)}, want: refusal{byLimit, MaxSandboxCount, 1, 0}},
		"a product that does not fit is refused":     {request: func(r *Request) { r.Size.MemoryBytes, r.Count = math.MaxInt64, 100 }, limits: Limits{AllocatedBytesIncludingPaused: few(math.MaxUint64)}, want: refusal{byLimit, MaxAllocatedMemory, math.MaxUint64, math.MaxUint64}},
		"a sum that does not fit is refused":         {node: func(n *Node) { n.Report.AllocatedMemoryBytes, n.Held.MemoryBytes = math.MaxInt64, math.MaxInt64 }, limits: Limits{AllocatedBytesIncludingPaused: few(math.MaxUint64)}, request: func(r *Request) { r.Size.MemoryBytes = 2 }, want: refusal{byLimit, MaxAllocatedMemory, math.MaxUint64, math.MaxUint64}},
		"a limit whose product does not fit is huge": {node: func(n *Node) { n.Report.CPUCount = math.MaxInt64 }, limits: Limits{CPUAllocatedPercent: few(math.MaxUint64)}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, r := ready("n"), request()
			if tt.node != nil {
				tt.node(n)
			}
			if tt.request != nil {
				tt.request(&r)
			}
			if got := check(&r, n, &tt.limits, false); got != tt.want {
				t.Errorf("check(%+v, %+v) = %+v, want %+v", r, *n, got, tt.want)
			}
		})
	}
}

func wishArtifact(r *Request) { r.Constraints.Artifact = Artifact{"b", "k"} }

func requireArtifact(r *Request) {
	wishArtifact(r)
	r.Constraints.ArtifactRequired = true
}

func holder(n *Node) { n.Holds = map[Artifact]bool{{"b", "k"}: true} }

func TestChoose(t *testing.T) {
	t.Parallel()
	full := func(n *Node) { n.Report.Sandboxes, n.Declared.Sandboxes = 5, 5 }
	loaded := func(n *Node) { n.Report.AllocatedCPU = 16 }
	tests := map[string]struct {
		chooser Chooser
		request func(*Request)
		nodes   []*Node
		draw    func(*Draw)
		want    node.ID
		cause   error
		reasons map[Reason]int
	}{
		"the emptier of two":                         {nodes: []*Node{ready("a", loaded), ready("b")}, want: "b"},
		"a node that does not pass uses up no draw":  {nodes: []*Node{ready("a", full), ready("b", full), ready("c")}, chooser: Chooser{Draws: 1}, want: "c", reasons: map[Reason]int{DeclaredSandboxes: 2}},
		"a preferred node wins when scores are near": {nodes: []*Node{ready("a"), ready("b", func(n *Node) { n.Report.AllocatedCPU = 4 })}, request: func(r *Request) { r.Constraints.Prefer = "b" }, want: "b"},
		"a holder wins when scores are near":         {nodes: []*Node{ready("a"), ready("b", holder, func(n *Node) { n.Report.AllocatedCPU = 4 })}, request: wishArtifact, want: "b"},
		"and not when those are far":                 {nodes: []*Node{ready("a"), ready("b", holder, func(n *Node) { n.Report.AllocatedCPU = 16 })}, request: wishArtifact, want: "a"},
		"nor when nobody asks":                       {nodes: []*Node{ready("a"), ready("b", holder, func(n *Node) { n.Report.AllocatedCPU = 4 })}, want: "a"},
		"only a holder, where it is required":        {nodes: []*Node{ready("a"), ready("b", holder, loaded)}, request: requireArtifact, want: "b", reasons: map[Reason]int{NoArtifact: 1}},
		"and not when they are far":                  {nodes: []*Node{ready("a"), ready("b", func(n *Node) { n.Report.AllocatedCPU = 30 })}, request: func(r *Request) { r.Constraints.Prefer = "b" }, want: "a"},
		"equal ones are spread":                      {nodes: []*Node{ready("a", func(n *Node) { n.Spread = map[string]int64{"k": 1} }), ready("b")}, request: func(r *Request) { r.Constraints.SpreadKey = "k" }, want: "b"},
		"a node without a snapshot comes last":       {nodes: []*Node{ready("a", func(n *Node) { n.Report = Report{} }), ready("b", loaded)}, want: "b"},
		"an avoided node waits":                      {nodes: []*Node{ready("a"), ready("b", loaded)}, draw: func(d *Draw) { d.Avoid = func(id node.ID) bool { return id == "a" } }, want: "b"},
		"unless nobody else passes":                  {nodes: []*Node{ready("a"), ready("b", full)}, draw: func(d *Draw) { d.Avoid = func(id node.ID) bool { return id == "a" } }, want: "a", reasons: map[Reason]int{DeclaredSandboxes: 1}},
		"a silent node serves where no limit is set": {nodes: []*Node{ready("a", func(n *Node) { n.Heard, n.LeaseHeld = false, false })}, want: "a"},
		"not one that registered":                    {nodes: []*Node{ready("a", func(n *Node) { n.Heard, n.LeaseHeld, n.Registered = false, false, true })}, cause: node.ErrNoneReady, reasons: map[Reason]int{Connecting: 1}},
		"not where a limit is set":                   {chooser: Chooser{Limits: Limits{SandboxCount: new(uint64(9))}}, nodes: []*Node{ready("a", func(n *Node) { n.Heard, n.LeaseHeld = false, false })}, cause: node.ErrNoneReady, reasons: map[Reason]int{Connecting: 1}},
		"not beside a ready one":                     {nodes: []*Node{ready("a", func(n *Node) { n.Heard, n.LeaseHeld = false, false }), ready("b", loaded)}, want: "b", reasons: map[Reason]int{Connecting: 1}},
		"nobody is there":                            {cause: node.ErrNoneReady},
		"nobody is ready":                            {nodes: []*Node{ready("a", func(n *Node) { n.Cordoned = true })}, cause: node.ErrNoneReady, reasons: map[Reason]int{Cordoned: 1}},
		"nobody has room":                            {nodes: []*Node{ready("a", full), ready("b", func(n *Node) { n.Cordoned = true })}, cause: node.ErrNoRoom, reasons: map[Reason]int{DeclaredSandboxes: 1, Cordoned: 1}},
		"nobody is what was asked for":               {nodes: []*Node{ready("a"), ready("b", func(n *Node) { n.Cordoned = true })}, request: func(r *Request) { r.Cluster = "x" }, cause: node.ErrConstraints, reasons: map[Reason]int{OtherCluster: 1, Cordoned: 1}},
		"round robin goes by id":                     {chooser: Chooser{Strategy: RoundRobin}, nodes: []*Node{ready("a"), ready("b", full), ready("c")}, draw: func(d *Draw) { d.Turn = 3 }, want: "c", reasons: map[Reason]int{DeclaredSandboxes: 1}},
		"random takes one that passes":               {chooser: Chooser{Strategy: Random}, nodes: []*Node{ready("a", full), ready("b", loaded)}, want: "b", reasons: map[Reason]int{DeclaredSandboxes: 1}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, r, d := tt.chooser, request(), luck()
			if c.Strategy == "" {
				c.Strategy = BestOfK
			}
			if c.Draws == 0 {
				c.Draws = 3
			}
			c.Weights = DefaultWeights()
			if tt.request != nil {
				tt.request(&r)
			}
			if tt.draw != nil {
				tt.draw(&d)
			}
			got := c.Choose(&r, tt.nodes, d)
			var id node.ID
			if got.Node != nil {
				id = got.Node.ID
			}
			if id != tt.want || !errors.Is(got.Cause, tt.cause) {
				t.Errorf("Choose = %q, %v, want %q, %v", id, got.Cause, tt.want, tt.cause)
			}
			if tt.reasons == nil {
				tt.reasons = map[Reason]int{}
			}
			if diff := cmp.Diff(tt.reasons, got.Reasons); diff != "" {
				t.Errorf("reasons (-want +got):\n%s", diff)
			}
		})
	}
}

func TestChooseNeverExceedsALimit(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		count := func(label string, most int64) int64 { return rapid.Int64Range(0, most).Draw(t, label) }
		optional := func(label string, most uint64) *uint64 {
			if !rapid.Bool().Draw(t, label+" is set") {
				return nil
			}
			return new(rapid.Uint64Range(0, most).Draw(t, label))
		}
		limits := Limits{
			SandboxCount: optional("max_sandbox_count", 12), CPUAllocatedPercent: optional("max_cpu_allocated_percent", 500),
			MemoryAllocatedPercent: optional("max_memory_allocated_percent", 300), SandboxCountIncludingPaused: optional("including paused", 15),
		}
		nodes := make([]*Node, rapid.IntRange(0, 8).Draw(t, "nodes"))
		for i := range nodes {
			nodes[i] = ready(node.ID(fmt.Sprint("n", i)), func(n *Node) {
				n.Report.Sandboxes, n.Report.Starting, n.Report.Paused = count("running", 10), count("starting", 3), count("paused", 5)
				n.Report.AllocatedCPU, n.Report.AllocatedMemoryBytes = count("vcpus", 40), count("memory", 40*gib)
				n.Held = Held{count("held", 4), 0, count("held cpu", 9000), count("held memory", 9*gib)}
				n.Declared.Sandboxes = count("declared", 14)
			})
		}
		c := Chooser{
			Strategy: rapid.SampledFrom([]Strategy{BestOfK, RoundRobin, Random}).Draw(t, "strategy"),
			Draws:    rapid.IntRange(1, 4).Draw(t, "draws"), Weights: DefaultWeights(), Limits: limits,
		}
		r := request()
		r.Count = rapid.IntRange(1, 5).Draw(t, "count")
		r.Size = sandbox.Size{CPUMillis: count("cpu", 5000), MemoryBytes: count("bytes", 5*gib)}
		got := c.Choose(&r, nodes, Draw{Rand: rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0)), Turn: rapid.Uint64().Draw(t, "turn")})
		if got.Node == nil {
			for _, n := range nodes {
				if fits(n, &limits, &r) {
					t.Fatalf("%s has room, and nobody was chosen", n.ID)
				}
			}
			return
		}
		if !fits(got.Node, &limits, &r) {
			t.Fatalf("%+v exceeds %+v with %+v", got.Node, limits, r)
		}
	})
}

// fits says it again in floating point, another way than the code under test.
func fits(n *Node, l *Limits, r *Request) bool {
	count := float64(r.Count)
	running := float64(n.Report.Sandboxes+n.Report.Starting+n.Held.Sandboxes) + count
	cpu := float64(n.Report.AllocatedCPU) + (float64(n.Held.CPUMillis)+float64(r.Size.CPUMillis)*count)/1000
	memory := float64(n.Report.AllocatedMemoryBytes+n.Held.MemoryBytes) + float64(r.Size.MemoryBytes)*count
	within := func(value float64, limit *uint64) bool { return limit == nil || value <= float64(*limit)+1e-9 }
	return within(running, l.SandboxCount) && within(running+float64(n.Report.Paused), l.SandboxCountIncludingPaused) &&
		within(cpu*100/float64(n.Report.CPUCount), l.CPUAllocatedPercent) &&
		within(memory*100/float64(n.Report.MemoryTotalBytes), l.MemoryAllocatedPercent) &&
		(n.Declared.Sandboxes == 0 || running <= float64(n.Declared.Sandboxes))
}

func TestAMisspelledStrategyIsRefused(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Strategy{
		"best_of_k": BestOfK, " random ": Random, "round_robin": RoundRobin, "bestofk": "", "": "", "BEST_OF_K": "",
	} {
		got, err := ParseStrategy(text)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("ParseStrategy(%q) = %q, %v, want %q", text, got, err, want)
		}
	}
}

func TestEqualNodesFillEvenlyWithoutHeartbeats(t *testing.T) {
	t.Parallel()
	v := view{byID: map[node.ID]*Node{}}
	for i := range 4 {
		n := ready(node.ID(fmt.Sprint("n", i)))
		v.nodes, v.byID[n.ID] = append(v.nodes, n), n
	}
	c := Chooser{Strategy: BestOfK, Draws: 4, Weights: DefaultWeights()}
	for range 40 {
		r := request()
		v.raise(c.Choose(&r, v.nodes, luck()).Node, &r)
	}
	for _, n := range v.nodes {
		if n.Held.Sandboxes != 10 {
			t.Errorf("%s got %d of 40, want 10", n.ID, n.Held.Sandboxes)
		}
	}
	v.settle(nil)
	for _, n := range v.nodes {
		if n.Held != (Held{}) {
			t.Errorf("%s holds %+v after its plans were taken back", n.ID, n.Held)
		}
	}
}
