package placement

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// drawnNodes are nodes with anything that a filter may ask about.
func drawnNodes(t *rapid.T) []*Node {
	of := func(label string, values ...string) string { return rapid.SampledFrom(values).Draw(t, label) }
	rarely := func(label string) bool { return rapid.IntRange(0, 5).Draw(t, label) == 0 }
	nodes := make([]*Node, rapid.IntRange(0, 12).Draw(t, "nodes"))
	for i := range nodes {
		nodes[i] = ready(node.ID(fmt.Sprint("n", i)), func(n *Node) {
			n.Present, n.Ended, n.Lingering, n.Cordoned, n.Draining = !rarely("absent"), rarely("ended"), rarely("lingering"), rarely("cordoned"), rarely("draining")
			n.Heard, n.LeaseHeld = !rarely("unheard"), !rarely("expired")
			n.Reported = rapid.SampledFrom([]node.Status{node.Ready, node.Ready, node.Ready, node.Connecting, node.Unhealthy, node.Lingering}).Draw(t, "reported")
			n.Cluster, n.CPUArchitecture = of("cluster", "a", "b"), of("architecture", "x86_64", "arm64")
			n.Labels = map[string]string{"zone": of("zone", "a", "b")}
			if rapid.Bool().Draw(t, "managed") {
				n.Capabilities = []string{"node.v1"}
			}
			n.Holds = map[Artifact]bool{{"b", "k"}: rapid.Bool().Draw(t, "holds")}
			n.Spread = map[string]int64{"app": rapid.Int64Range(0, 3).Draw(t, "spread")}
			n.Declared.Sandboxes = rapid.Int64Range(0, 6).Draw(t, "declared")
			n.Held = Held{Sandboxes: rapid.Int64Range(0, 6).Draw(t, "held")}
			n.Report.CPUPercent = rapid.Int64Range(0, 100).Draw(t, "cpu percent")
		})
	}
	return nodes
}

func drawnRequest(t *rapid.T) Request {
	maybe := func(label string) bool { return rapid.IntRange(0, 3).Draw(t, label) == 0 }
	r := request()
	r.Count = rapid.IntRange(1, 3).Draw(t, "count")
	if maybe("wants a cluster") {
		r.Cluster = "a"
	}
	if maybe("wants a zone") {
		r.Constraints.Labels = map[string]string{"zone": "b"}
	}
	if maybe("wants an architecture") {
		r.Constraints.CPUArchitecture = "arm64"
	}
	if maybe("wants the artifact") {
		r.Constraints.Artifact, r.Constraints.ArtifactRequired = Artifact{"b", "k"}, rapid.Bool().Draw(t, "required")
	}
	if maybe("spreads") {
		r.Constraints.SpreadKey, r.Constraints.MaxPerNode = "app", rapid.Int64Range(0, 4).Draw(t, "max per node")
	}
	if maybe("is managed") {
		r.Managed = true
	}
	if maybe("excludes") {
		r.Exclude = []node.ID{"n0", "n1"}
	}
	if maybe("prefers") {
		r.Constraints.Prefer = "n2"
	}
	return r
}

func drawnChooser(t *rapid.T) Chooser {
	c := Chooser{
		Strategy: rapid.SampledFrom([]Strategy{BestOfK, RoundRobin, Random}).Draw(t, "strategy"),
		Draws:    rapid.IntRange(1, 5).Draw(t, "draws"), Weights: DefaultWeights(),
	}
	if rapid.Bool().Draw(t, "limited") {
		c.Limits = Limits{SandboxCount: new(rapid.Uint64Range(0, 8).Draw(t, "max sandboxes")), CPUUsedPercent: new(uint64(90))}
	}
	return c
}

func drawnLuck(t *rapid.T) Draw {
	return Draw{Rand: rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0)), Turn: rapid.Uint64().Draw(t, "turn")}
}

func TestNoRefusedNodeIsEverChosenAndNoneIsDrawnTwice(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		nodes, r, c := drawnNodes(t), drawnRequest(t), drawnChooser(t)
		got := c.Choose(&r, nodes, drawnLuck(t))

		passing := map[node.ID]bool{}
		for _, n := range nodes {
			if check(&r, n, &c.Limits, got.Unheard) == (refusal{}) {
				passing[n.ID] = true
			}
		}
		if (got.Node != nil) != (len(passing) > 0) {
			t.Fatalf("Choose = %+v, and %v pass", got, passing)
		}
		if got.Node == nil {
			return
		}
		if !passing[got.Node.ID] {
			t.Fatalf("%s is chosen and does not pass", got.Node.ID)
		}
		seen := map[node.ID]bool{}
		drawn, chosen := 0, 0
		for _, candidate := range got.Candidates {
			if seen[candidate.Node] {
				t.Fatalf("%s is there twice: %+v", candidate.Node, got.Candidates)
			}
			seen[candidate.Node] = true
			if refusedOne := candidate.Verdict == VerdictRefused; refusedOne == passing[candidate.Node] {
				t.Fatalf("%s is %s, and passes: %t", candidate.Node, candidate.Verdict, passing[candidate.Node])
			}
			if candidate.Verdict != VerdictRefused {
				drawn++
			}
			if candidate.Verdict == VerdictChosen {
				chosen++
			}
		}
		want := 1
		if c.Strategy == BestOfK {
			want = min(c.Draws, len(passing)) // a node that does not pass uses up no draw
		}
		if drawn != want || chosen != 1 {
			t.Fatalf("%d drawn and %d chosen, want %d and 1: %+v", drawn, chosen, want, got.Candidates)
		}
	})
}

// TestSumsOverABatchNeverExceedALimit plans many creates of any size on one view, as a round does.
func TestSumsOverABatchNeverExceedALimit(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		v := view{byID: map[node.ID]*Node{}}
		limits := Limits{
			SandboxCount:           new(rapid.Uint64Range(0, 12).Draw(t, "max sandboxes")),
			CPUAllocatedPercent:    new(rapid.Uint64Range(0, 300).Draw(t, "max cpu")),
			MemoryAllocatedPercent: new(rapid.Uint64Range(0, 150).Draw(t, "max memory")),
		}
		for i := range rapid.IntRange(1, 5).Draw(t, "nodes") {
			n := ready(node.ID(fmt.Sprint("n", i)), func(n *Node) {
				n.Report.Sandboxes = rapid.Int64Range(0, 12).Draw(t, "running")
				n.Declared.CPUMillis = rapid.Int64Range(0, 20_000).Draw(t, "declared cpu")
			})
			v.nodes, v.byID[n.ID] = append(v.nodes, n), n
		}
		before := make([]Node, len(v.nodes))
		for i, n := range v.nodes {
			before[i] = *n
		}
		c := Chooser{Strategy: BestOfK, Draws: rapid.IntRange(1, 4).Draw(t, "draws"), Weights: DefaultWeights(), Limits: limits}
		requests := make([]Request, rapid.IntRange(1, 40).Draw(t, "batch"))
		for i := range requests {
			r := &requests[i]
			*r = request()
			r.Count = rapid.IntRange(1, 3).Draw(t, "count")
			r.Size = sandbox.Size{CPUMillis: rapid.Int64Range(0, 4000).Draw(t, "cpu"), MemoryBytes: rapid.Int64Range(0, 8*gib).Draw(t, "memory")}
			if choice := c.Choose(r, v.nodes, drawnLuck(t)); choice.Node != nil {
				v.raise(choice.Node, r)
			}
		}
		nothing := request()
		nothing.Count, nothing.Size = 0, sandbox.Size{}
		for i, n := range v.nodes {
			if n.Held.Sandboxes > 0 && !fits(n, &limits, &nothing) || n.Declared.CPUMillis > 0 && n.Held.CPUMillis > n.Declared.CPUMillis {
				t.Fatalf("%s was filled beyond %+v: %+v, from %+v", n.ID, limits, n, before[i])
			}
		}
		v.settle(nil)
		for i, n := range v.nodes {
			if n.Held != before[i].Held {
				t.Fatalf("%s holds %+v after its plans were taken back, before %+v", n.ID, n.Held, before[i].Held)
			}
		}
	})
}

// TestEqualNodesFillEvenly: whoever compares all nodes fills them level; whoever draws three of them stays
// near, and the more so the more sandboxes there are.
func TestEqualNodesFillEvenly(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		count := rapid.IntRange(1, 9).Draw(t, "nodes")
		v := view{byID: map[node.ID]*Node{}}
		for i := range count {
			n := ready(node.ID(fmt.Sprint("n", i)))
			v.nodes, v.byID[n.ID] = append(v.nodes, n), n
		}
		all := rapid.Bool().Draw(t, "compares all")
		c := Chooser{Strategy: BestOfK, Draws: count, Weights: DefaultWeights()}
		most := int64(1)
		if !all {
			c.Draws, most = min(3, count), 8 // the fullest is log log of the nodes above the mean; the emptiest may lag
		}
		for range rapid.IntRange(0, 200).Draw(t, "creates") {
			r := request()
			v.raise(c.Choose(&r, v.nodes, drawnLuck(t)).Node, &r)
		}
		least, largest := v.nodes[0].Held.Sandboxes, v.nodes[0].Held.Sandboxes
		for _, n := range v.nodes {
			least, largest = min(least, n.Held.Sandboxes), max(largest, n.Held.Sandboxes)
		}
		if largest-least > most {
			t.Fatalf("between %d and %d on equal nodes, want at most %d apart", least, largest, most)
		}
	})
}
