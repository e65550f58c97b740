package node_test

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"berth/services/internal/node"
)

func TestParseID(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		in   string
		want error
	}{
		"a host name passes":             {"node-1.rack.example", nil},
		"capitals pass, host names may":  {"Node1", nil},
		"underscores pass, pods may":     {"node_1", nil},
		"63 bytes a label pass":          {strings.Repeat("a", 63), nil},
		"64 do not":                      {strings.Repeat("a", 64), node.ErrBadID},
		"254 bytes do not":               {strings.Repeat("a.", 126) + "aa", node.ErrBadID},
		"nothing is asked for":           {"", node.ErrIDRequired},
		"blanks are nothing":             {" \t", node.ErrIDRequired},
		"an empty label is refused":      {"a..b", node.ErrBadID},
		"a hyphen in front is refused":   {"a.-b", node.ErrBadID},
		"a slash is refused":             {"a/b", node.ErrBadID},
		"a control character is refused": {"a\nb", node.ErrBadID},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := node.ParseID(tt.in); !errors.Is(err, tt.want) {
				t.Errorf("ParseID(%.40q) = %v, want %v", tt.in, err, tt.want)
			}
		})
	}
}

func TestEffectiveIsTheFirstThatApplies(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		in   node.Standing
		want node.Status
	}{
		"an expired lease beats all":        {node.Standing{Present: true, Leaving: true, Reported: node.Ready}, node.Unhealthy},
		"absent beats leaving":              {node.Standing{LeaseHeld: true, Leaving: true, Reported: node.Ready}, node.Connecting},
		"leaving beats what it said":        {node.Standing{LeaseHeld: true, Present: true, Leaving: true, Reported: node.Ready}, node.Lingering},
		"what it said":                      {node.Standing{LeaseHeld: true, Present: true, Reported: node.Ready}, node.Ready},
		"said unhealthy is unhealthy":       {node.Standing{LeaseHeld: true, Present: true, Reported: node.Unhealthy}, node.Unhealthy},
		"said nothing is not yet connected": {node.Standing{LeaseHeld: true, Present: true}, node.Connecting},
	}
	for name, tt := range tests {
		if got := tt.in.Effective(); got != tt.want {
			t.Errorf("%s: Effective(%+v) = %v, want %v", name, tt.in, got, tt.want)
		}
	}
}

func TestRosterIsSortedOnceEachWithoutWhatIsNoID(t *testing.T) {
	t.Parallel()
	roster, skipped := node.NewRoster([]string{" b ", "a", "", "b", "Not An Id", "a"},
		[]node.Entry{{Sandbox: "b", Reservation: "r"}, {Sandbox: "c", Incarnation: 2}, {Sandbox: "_"}})
	want := node.Roster{{Sandbox: "a"}, {Sandbox: "b", Reservation: "r"}, {Sandbox: "c", Incarnation: 2}}
	if !slices.Equal(roster, want) {
		t.Errorf("NewRoster = %v, want %v", roster, want)
	}
	if !slices.Equal(skipped, []string{"Not An Id", "_"}) {
		t.Errorf("skipped = %q", skipped)
	}
}

func TestDigestTellsRostersApart(t *testing.T) {
	t.Parallel()
	roster := func(entries ...node.Entry) node.Roster {
		r, _ := node.NewRoster(nil, entries)
		return r
	}
	rosters := map[string]node.Roster{
		"empty": {}, "a": roster(node.Entry{Sandbox: "a"}), "ab": roster(node.Entry{Sandbox: "ab"}),
		"a and b": roster(node.Entry{Sandbox: "a"}, node.Entry{Sandbox: "b"}),
		"a once":  roster(node.Entry{Sandbox: "a", Incarnation: 1}), "a twice": roster(node.Entry{Sandbox: "a", Incarnation: 2}),
	}
	seen := map[string]string{}
	for name, r := range rosters {
		digest := string(r.Digest())
		if len(digest) != node.DigestBytes {
			t.Errorf("%s: digest of %d bytes", name, len(digest))
		}
		if other, ok := seen[digest]; ok {
			t.Errorf("%s and %s have one digest", name, other)
		}
		seen[digest] = name
	}
	forward, _ := node.NewRoster([]string{"a", "b"}, nil)
	backward, _ := node.NewRoster([]string{"b", "a"}, nil)
	if !bytes.Equal(forward.Digest(), backward.Digest()) {
		t.Error("the order in which ids came changed the digest")
	}
}
