package nodes

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

func TestDifferenceIsWhatOnlyOneListsOrBothOtherwise(t *testing.T) {
	t.Parallel()
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		draw := func() (node.Roster, map[sandbox.ID]sandbox.Incarnation) {
			var entries []node.Entry
			all := map[sandbox.ID]sandbox.Incarnation{}
			for i := range 12 {
				if rnd.IntN(2) == 0 {
					id := sandbox.ID(fmt.Sprintf("s%d", i))
					all[id] = sandbox.Incarnation(rnd.IntN(2))
					entries = append(entries, node.Entry{Sandbox: id, Incarnation: all[id]})
				}
			}
			r, _ := node.NewRoster(nil, entries)
			return r, all
		}
		before, was := draw()
		now, is := draw()
		var want []sandbox.ID
		for i := range 12 {
			id := sandbox.ID(fmt.Sprintf("s%d", i))
			a, inA := was[id]
			b, inB := is[id]
			if inA != inB || a != b {
				want = append(want, id)
			}
		}
		slices.Sort(want)
		if diff := cmp.Diff(want, difference(before, now)); diff != "" {
			t.Fatalf("seed %d: difference(%v, %v) (-want +got):\n%s", seed, before, now, diff)
		}
	}
}

func TestADeltaIsOnlyOfTheRosterThatTheRowHas(t *testing.T) {
	t.Parallel()
	k := newKeptRosters(5)
	was, is := roster("s1", "s2"), roster("s2", "s3")
	if _, ok := k.delta("a", was.Digest(), is); ok {
		t.Error("delta of a roster that was never kept")
	}
	k.keep("a", was.Digest(), was)
	got, ok := k.delta("a", was.Digest(), is)
	if diff := cmp.Diff([]sandbox.ID{"s1", "s3"}, got); !ok || diff != "" {
		t.Errorf("delta, %t (-want +got):\n%s", ok, diff)
	}
	if _, ok := k.delta("a", is.Digest(), is); ok {
		t.Error("delta although another replica stored another roster")
	}
	k.forget("a")
	if _, ok := k.delta("a", was.Digest(), is); ok {
		t.Error("delta of a roster that was forgotten")
	}
}

func TestKeptRostersHaveABound(t *testing.T) {
	t.Parallel()
	k := newKeptRosters(5)
	for i := range 20 {
		r := roster("s1", "s2")
		k.keep(node.ID(fmt.Sprintf("n%d", i)), r.Digest(), r)
		k.keep("again", r.Digest(), r)
		kept := 0
		for _, one := range k.byNode {
			kept += len(one.roster)
		}
		if kept != k.entries || kept > 5 {
			t.Fatalf("%d entries kept and %d counted, want at most 5", kept, k.entries)
		}
	}
	big := roster("a", "b", "c", "d", "e", "f")
	k.keep("big", big.Digest(), big)
	if _, ok := k.delta("big", big.Digest(), big); ok || k.entries > 5 {
		t.Errorf("a roster above the bound was kept: %d entries", k.entries)
	}
}
