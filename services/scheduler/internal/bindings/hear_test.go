package bindings

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/sandbox"
)

// A batch is cut so that one sandbox is in a round once, and its events keep their order.
func TestRounds(t *testing.T) {
	t.Parallel()
	tell := func(ids ...sandbox.ID) Hearing {
		var h Hearing
		for _, id := range ids {
			h.Told = append(h.Told, Told{Kind: KindPause, Sandbox: id})
		}
		return h
	}
	refused := tell("a", "b", "a")
	refused.Told[0].Refused = EffectRepeated
	tests := map[string]struct {
		in   Hearing
		want [][]int
	}{
		"nothing":                       {tell(), nil},
		"each once":                     {tell("a", "b", "c"), [][]int{{0, 1, 2}}},
		"one thrice":                    {tell("a", "b", "a", "a"), [][]int{{0, 1}, {2}, {3}}},
		"two twice, mixed":              {tell("a", "b", "b", "a"), [][]int{{0, 1}, {2, 3}}},
		"what is refused has no round":  {refused, [][]int{{1, 2}}},
		"a later one in an early round": {tell("a", "a", "b"), [][]int{{0, 2}, {1}}},
	}
	for name, tt := range tests {
		if diff := cmp.Diff(tt.want, tt.in.rounds()); diff != "" {
			t.Errorf("%s: rounds (-want +got):\n%s", name, diff)
		}
	}
}

func TestHearLeavesANewerVersionsStateAlone(t *testing.T) {
	t.Parallel()
	v := view{Node: "a"}
	for _, kind := range []Kind{KindCreate, KindFork, KindResume, KindPause, KindDelete} {
		means, effect := v.hear(Told{Kind: kind, Sandbox: "s"}, &Held{SandboxID: "s", State: "moving", NodeID: "a"})
		if means != nothing || effect != EffectIgnored {
			t.Errorf("%s of a row in a state of a newer version: %v, %q; want nothing, ignored", kind, means, effect)
		}
	}
}
