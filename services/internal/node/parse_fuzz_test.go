package node_test

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// The rule once more, as the column's CHECK spells it.
var name = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*$`)

func FuzzParseID(f *testing.F) {
	for _, s := range []string{"a", "node-1.rack_2.example", "_a", "a_", "-", "a..b", "A.", "a\n", strings.Repeat("a", 63) + ".b", strings.Repeat("a.", 127) + "a"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, err := node.ParseID(s)
		if want := name.MatchString(s) && len(s) <= node.MaxIDBytes && !strings.HasSuffix(s, "\n"); (err == nil) != want {
			t.Errorf("ParseID(%q): %v, want ok %v", s, err, want)
		}
		switch {
		case err == nil && string(id) != s:
			t.Errorf("ParseID(%q) = %q, want it as it is", s, id)
		case err != nil && !errors.Is(err, node.ErrBadID) && !errors.Is(err, node.ErrIDRequired):
			t.Errorf("ParseID(%q) = %v, want a typed refusal", s, err)
		}
	})
}

func FuzzNewRoster(f *testing.F) {
	f.Add("a b  c A a", "a", "r", int64(1))
	f.Add("", " s ", "", int64(-1))
	f.Add("S\x00 \xff", "\n", strings.Repeat("r", 300), int64(1)<<62)
	f.Fuzz(func(t *testing.T, listed, detail, reservation string, number int64) {
		ids := strings.Split(listed, " ")
		roster, skipped := node.NewRoster(ids, []node.Entry{{
			Sandbox: sandbox.ID(detail), Reservation: reservation, Incarnation: sandbox.Incarnation(number),
			Size: sandbox.Size{CPUMillis: number},
		}})
		if len(roster)+len(skipped) > len(ids)+1 {
			t.Errorf("%d entries and %d skipped of %d ids", len(roster), len(skipped), len(ids)+1)
		}
		for _, text := range skipped {
			if _, err := sandbox.ParseID(strings.TrimSpace(text)); err == nil {
				t.Errorf("%q was skipped", text)
			}
		}
		got := roster.IDs()
		if !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) != len(got) {
			t.Errorf("ids %q, want them sorted, each once", got)
		}
		texts := make([]string, len(got))
		for i, id := range got {
			if _, err := sandbox.ParseID(string(id)); err != nil {
				t.Errorf("%q is listed: %v", id, err)
			}
			texts[i] = " " + string(id) + "\n"
		}
		slices.Reverse(texts)
		again, none := node.NewRoster(texts, roster)
		if !slices.Equal(again, roster) || len(none) != 0 || string(again.Digest()) != string(roster.Digest()) {
			t.Errorf("the same roster in another order is %v, want %v", again, roster)
		}
	})
}
