package placement

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"

	"berth/services/internal/node"
)

// Strategy orders the nodes that pass every filter.
type Strategy string

// The strategies.
const (
	BestOfK    Strategy = "best_of_k"   // the emptiest of a few drawn at random
	RoundRobin Strategy = "round_robin" // by id, one after another
	Random     Strategy = "random"
)

// ParseStrategy returns s as a Strategy. A misspelled one is an error that lists all.
func ParseStrategy(s string) (Strategy, error) {
	switch known := Strategy(strings.TrimSpace(s)); known {
	case BestOfK, RoundRobin, Random:
		return known, nil
	}
	return "", fmt.Errorf("strategy %q is not known: use %s, %s or %s", s, BestOfK, RoundRobin, Random)
}

// Weights says what makes one node better than another; see score.
type Weights struct {
	ResourceCPU    float64 // vCPUs promised for each vCPU there is, at which a node counts as full
	ResourceMemory float64
	CPUUsed        float64
	MemoryUsed     float64
	Starting       float64
	Spread         float64
	Artifact       float64
	Prefer         float64
}

// DefaultWeights let a node promise four vCPUs for each it has before it counts as full, and weigh
// what is measured half as much as what is promised.
func DefaultWeights() Weights {
	return Weights{
		ResourceCPU: 4, ResourceMemory: 1.5, CPUUsed: 0.5, MemoryUsed: 0.5,
		Starting: 0.05, Spread: 0.5, Artifact: 0.2, Prefer: 0.5,
	}
}

// Chooser decides which node takes a create. It has no state.
type Chooser struct {
	Strategy Strategy
	Draws    int // candidates that are compared, from 1
	Weights  Weights
	Limits   Limits
}

const (
	// lookAtAll is up to how many nodes all are judged, so that the reasons are complete. Among more,
	// judging stops once enough have passed.
	lookAtAll = 100

	// keptRefusals bounds the refused candidates kept with a placement.
	keptRefusals = 20

	// unknownScore puts a node that never sent a snapshot behind all that did.
	unknownScore = 1e6
)

// The verdicts on a candidate.
const (
	VerdictChosen  = "chosen"
	VerdictPassed  = "passed"
	VerdictRefused = "refused"
)

// Candidate is one node that was looked at, as it is kept with the placement.
type Candidate struct {
	Node    node.ID `json:"node"`
	Verdict string  `json:"verdict"`
	Reason  Reason  `json:"reason,omitempty"` // where refused, and then by a limit:
	Value   float64 `json:"value,omitempty"`  // what the rule saw, this create included
	Limit   float64 `json:"limit,omitempty"`  // what it allows
	Score   float64 `json:"score,omitempty"`  // where not refused; lower is better
}

// Choice is what Choose found. Node is nil when none passes; Cause then says why.
type Choice struct {
	Node       *Node
	Unheard    bool // Node never sent a heartbeat, and may be used because nobody who did can be
	Cause      error
	Reasons    map[Reason]int // refused nodes by reason
	Candidates []Candidate    // those drawn, then up to 20 refused
}

// score is that of the chosen node, or zero where the strategy compares nothing.
func (c *Choice) score() float64 {
	for i := range c.Candidates {
		if c.Candidates[i].Verdict == VerdictChosen {
			return c.Candidates[i].Score
		}
	}
	return 0
}

// Draw is where Choose gets its luck from.
type Draw struct {
	Rand  *rand.Rand
	Turn  uint64                // of round_robin
	Avoid func(id node.ID) bool // nil: none. An avoided node is chosen only if no other passes
}

// Choose returns the node for r: by best_of_k the one with the lowest score among c.Draws that are drawn
// without repetition from those that pass every filter, ties by lot; a node that does not pass uses up
// no draw. nodes is one snapshot, sorted by id, and is not changed.
//
// Two or three draws come close to comparing all: Mitzenmacher, "The Power of Two Choices in Randomized
// Load Balancing", IEEE TPDS 12(10), 2001.
func (c *Chooser) Choose(r *Request, nodes []*Node, d Draw) Choice {
	choice := c.choose(r, nodes, d, false)
	if choice.Node == nil && c.Limits.none() {
		// AgentENV's nodes may run without a reporter: listed, and never heard of.
		if again := c.choose(r, nodes, d, true); again.Node != nil {
			return again
		}
	}
	return choice
}

func (c *Chooser) choose(r *Request, nodes []*Node, d Draw, unheard bool) Choice {
	wanted := c.Draws
	if c.Strategy != BestOfK {
		wanted = 1
	}
	var (
		choice   = Choice{Unheard: unheard, Reasons: map[Reason]int{}}
		passing  []*Node // in the order looked at
		avoided  []*Node
		refused  []Candidate
		stages   [byLimit + 1]int
		order    = lookOrder(len(nodes), c.Strategy, d)
		complete = len(nodes) <= lookAtAll || c.Strategy == RoundRobin
	)
	for i := range nodes {
		if !complete && len(passing) >= wanted {
			break
		}
		n := nodes[order(i)]
		verdict := check(r, n, &c.Limits, unheard)
		stages[verdict.stage]++
		switch {
		case verdict.stage == passed && d.Avoid != nil && d.Avoid(n.ID):
			avoided = append(avoided, n)
		case verdict.stage == passed:
			passing = append(passing, n)
		default:
			choice.Reasons[verdict.reason]++
			if len(refused) < keptRefusals {
				refused = append(refused, Candidate{
					Node: n.ID, Verdict: VerdictRefused, Reason: verdict.reason, Value: verdict.value, Limit: verdict.limit,
				})
			}
		}
	}
	if len(passing) == 0 {
		passing = avoided
	}
	switch {
	case len(passing) == 0:
		choice.Cause = cause(stages)
	case c.Strategy == RoundRobin:
		choice.Node = passing[d.Turn%uint64(len(passing))]
		choice.Candidates = []Candidate{{Node: choice.Node.ID, Verdict: VerdictChosen}}
	default:
		c.best(r, nodes, passing[:min(wanted, len(passing))], &choice)
	}
	choice.Candidates = append(choice.Candidates, refused...)
	return choice
}

// lookOrder returns the order in which n nodes are looked at: by id in turn, else at random, drawn as
// far as it is asked for (Fisher-Yates).
func lookOrder(n int, s Strategy, d Draw) func(i int) int {
	if s == RoundRobin {
		return func(i int) int { return i }
	}
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	return func(i int) int {
		j := i + d.Rand.IntN(n-i)
		order[i], order[j] = order[j], order[i]
		return order[i]
	}
}

func cause(stages [byLimit + 1]int) error {
	switch {
	case stages[byLimit] > 0:
		return node.ErrNoRoom
	case stages[byConstraint] > 0:
		return node.ErrConstraints
	}
	return node.ErrNoneReady
}

// best takes the drawn node with the lowest score; the first of equal ones, for the draw was by lot.
func (c *Chooser) best(r *Request, nodes, drawn []*Node, choice *Choice) {
	var everywhere int64
	if key := r.Constraints.SpreadKey; key != "" {
		for _, n := range nodes {
			everywhere += n.Spread[key]
		}
	}
	lowest := math.Inf(1)
	chosen := 0
	for i, n := range drawn {
		score := c.score(r, n, everywhere)
		choice.Candidates = append(choice.Candidates, Candidate{Node: n.ID, Verdict: VerdictPassed, Score: score})
		if score < lowest {
			lowest, chosen = score, i
		}
	}
	choice.Node = drawn[chosen]
	choice.Candidates[chosen].Verdict = VerdictChosen
}

// score says how full n would be with r, and what else speaks for or against it; lower is better. A term
// without divisor is zero. Where no limit of sandboxes is configured, the node's declared one stands in.
func (c *Chooser) score(r *Request, n *Node, everywhere int64) float64 {
	w, rep, h := &c.Weights, &n.Report, &n.Held
	if !rep.Given {
		return unknownScore + float64(h.Sandboxes)
	}
	count := float64(r.Count)
	cpu := float64(rep.AllocatedCPU) + (float64(h.CPUMillis)+float64(r.Size.CPUMillis)*count)/1000
	memory := float64(rep.AllocatedMemoryBytes) + float64(h.MemoryBytes) + float64(r.Size.MemoryBytes)*count
	most := float64(n.Declared.Sandboxes)
	if c.Limits.SandboxCount != nil {
		most = float64(*c.Limits.SandboxCount)
	}
	load := max(
		share(cpu, w.ResourceCPU*float64(rep.CPUCount)),
		share(memory, w.ResourceMemory*float64(rep.MemoryTotalBytes)),
		share(float64(rep.Sandboxes+rep.Starting+h.Sandboxes)+count, most))
	score := load +
		w.CPUUsed*float64(rep.CPUPercent)/100 +
		w.MemoryUsed*share(float64(rep.MemoryUsedBytes), float64(rep.MemoryTotalBytes)) +
		w.Starting*share(float64(rep.Starting+h.Open), float64(rep.CPUCount))
	if key := r.Constraints.SpreadKey; key != "" {
		score += w.Spread * float64(n.Spread[key]) / float64(1+everywhere)
	}
	if n.Holds[r.Constraints.Artifact] {
		score -= w.Artifact
	}
	if r.Constraints.Prefer != "" && r.Constraints.Prefer == n.ID {
		score -= w.Prefer
	}
	return score
}

func share(part, whole float64) float64 {
	if whole <= 0 {
		return 0
	}
	return part / whole
}
