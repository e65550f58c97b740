package node

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/sandbox"
)

// A roster with a detail takes the general way, one without a shorter one: they agree.
func TestARosterIsTheSameWithAndWithoutDetails(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 200 {
		var ids []string
		for range random.IntN(40) {
			ids = append(ids, []string{"", " ", "-", "no id", "s1", " s1 "}[random.IntN(6)], fmt.Sprintf("s%d", random.IntN(30)))
		}
		short, skipped := NewRoster(ids, nil)
		general, alsoSkipped := NewRoster(ids, []Entry{{Sandbox: "zz"}})
		if len(general) == 0 || general[len(general)-1].Sandbox != "zz" {
			t.Fatalf("round %d: the roster of %q lacks the detail: %v", round, ids, general)
		}
		general = general[:len(general)-1]
		if diff := cmp.Diff([]Entry(general), []Entry(short)); diff != "" {
			t.Errorf("round %d: NewRoster(%q) (-general +short):\n%s", round, ids, diff)
		}
		if diff := cmp.Diff(alsoSkipped, skipped); diff != "" {
			t.Errorf("round %d: skipped of %q (-general +short):\n%s", round, ids, diff)
		}
	}
}

func BenchmarkNewRoster(b *testing.B) {
	sorted := make([]string, 500)
	for i := range sorted {
		id, err := sandbox.NewID()
		if err != nil {
			b.Fatal(err)
		}
		sorted[i] = string(id)
	}
	shuffled := slices.Clone(sorted)
	rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	for name, ids := range map[string][]string{"sorted": sorted, "shuffled": shuffled} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				NewRoster(ids, nil)
			}
		})
		b.Run(name+" with a detail", func(b *testing.B) {
			for b.Loop() {
				NewRoster(ids, []Entry{{Sandbox: "zz"}})
			}
		})
	}
}
