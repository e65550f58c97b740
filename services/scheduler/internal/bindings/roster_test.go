package bindings

import (
	"slices"
	"testing"
	"time"

	"berth/services/internal/sandbox"
)

func TestJudge(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	v := view{Node: "here", AsOf: now, Grace: 15 * time.Second, TombstoneGrace: 30 * time.Second}
	ago := func(d time.Duration) *time.Time { return new(now.Add(-d)) }
	bound := func(on string, age time.Duration, live bool) *Held {
		h := &Held{State: sandbox.Bound, BoundAt: *ago(age), HolderLive: live}
		h.NodeID = "there"
		if on == "here" {
			h.NodeID = "here"
		}
		return h
	}
	parked := func(on string) *Held {
		h := bound(on, time.Hour, false)
		h.State, h.EndedAt, h.EndedBy = sandbox.Parked, ago(time.Minute), new(sandbox.EndedByUnregister)
		return h
	}
	gone := func(by sandbox.Ending, age time.Duration) *Held {
		h := bound("here", time.Hour, true)
		h.State, h.EndedAt, h.EndedBy = sandbox.Gone, ago(age), new(by)
		return h
	}
	tests := map[string]struct {
		listed bool
		held   *Held
		want   change
	}{
		"listed and bound here is counted":                      {true, bound("here", time.Hour, true), counted},
		"listed and unknown is adopted":                         {true, nil, adopted},
		"listed, but a live node has it: it stays there":        {true, bound("there", time.Hour, true), orphanHeld},
		"a live holder keeps even what it got a moment ago":     {true, bound("there", 0, true), orphanHeld},
		"listed, and its node has no live lease: it moves":      {true, bound("there", time.Hour, false), moved},
		"listed and parked here comes back":                     {true, parked("here"), moved},
		"listed and parked there comes here":                    {true, parked("there"), moved},
		"listed, but deleted: an orphan":                        {true, gone(sandbox.EndedByDelete, time.Second), orphanDeleted},
		"deleted long ago is an orphan still":                   {true, gone(sandbox.EndedByDelete, time.Hour), orphanDeleted},
		"listed, but suspended: an orphan":                      {true, gone(sandbox.EndedBySuspend, time.Hour), orphanDeleted},
		"gone by a roster a moment ago: this one is late":       {true, gone(sandbox.EndedByRoster, 29*time.Second), late},
		"gone by an event a moment ago: this roster is late":    {true, gone(sandbox.EndedByEvent, time.Second), late},
		"gone by a roster long ago comes back":                  {true, gone(sandbox.EndedByRoster, 30*time.Second), revived},
		"gone with its node long ago comes back":                {true, gone(sandbox.EndedByNodeGone, time.Hour), revived},
		"not listed, bound here within the grace: spared":       {false, bound("here", 14*time.Second, true), spared},
		"not listed, bound here by a clock ahead: spared":       {false, bound("here", -time.Second, true), spared},
		"not listed, bound here longer: ended":                  {false, bound("here", 15*time.Second, true), ended},
		"not listed, bound elsewhere: none of this node's":      {false, bound("there", time.Hour, false), leave},
		"not listed and parked: the next roster may bring it":   {false, parked("here"), leave},
		"not listed and gone: as it should be":                  {false, gone(sandbox.EndedByRoster, time.Second), leave},
		"not listed and unknown: as it should be":               {false, nil, leave},
		"listed, in a state of a newer version: left alone":     {true, &Held{State: "resting", NodeID: "here"}, leave},
		"not listed, in a state of a newer version: left alone": {false, &Held{State: "resting", NodeID: "here"}, leave},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := v.judge(tt.listed, tt.held); got != tt.want {
				t.Errorf("judge(%t, %+v) = %d, want %d", tt.listed, tt.held, got, tt.want)
			}
		})
	}
}

func TestWhatIsSparedIsJudgedAgainWhenItsGraceIsOver(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	v := view{Node: "here", AsOf: now, Grace: 15 * time.Second, TombstoneGrace: 30 * time.Second}
	young := &Held{State: sandbox.Bound, NodeID: "here", BoundAt: now.Add(-5 * time.Second)}
	if got := v.again(spared, young); got != 10*time.Second {
		t.Errorf("again(spared) = %v, want 10s", got)
	}
	tombstone := &Held{State: sandbox.Gone, NodeID: "here", EndedAt: new(now.Add(-10 * time.Second))}
	if got := v.again(late, tombstone); got != 20*time.Second {
		t.Errorf("again(late) = %v, want 20s", got)
	}
	elsewhere := &Held{State: sandbox.Bound, NodeID: "there", HolderLive: true}
	if got := v.again(orphanHeld, elsewhere); got <= 0 || got > 30*time.Second {
		t.Errorf("again(orphanHeld) = %v, want it within a lease's time, for the holder's may end", got)
	}
	if got := v.again(counted, young); got != 0 {
		t.Errorf("again(counted) = %v, want 0: nothing will change", got)
	}
}

func TestNodesAreJudgedOnlyWhileHeartbeatsFlow(t *testing.T) {
	t.Parallel()
	const ttl = 30 * time.Second
	start := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	var f flow
	passed := 0
	at := func(second, lastHeard int) bool {
		ask := func(second int) bool {
			heard := min(lastHeard, second)
			return f.judges(start.Add(time.Duration(second)*time.Second), start.Add(time.Duration(heard)*time.Second), ttl)
		}
		for passed += 5; passed < second; passed += 5 {
			ask(passed)
		}
		passed = second
		return ask(second)
	}
	steps := []struct {
		what          string
		second, heard int
		want          bool
	}{
		{"nobody is judged after the start", 0, 0, false},
		{"nor before all had a lease's time to speak", 29, 28, false},
		{"then they are", 30, 29, true},
		{"a few silent seconds change nothing", 40, 30, true},
		{"a longer silence is not the nodes'", 50, 39, false},
		{"the first beat after it is a new start", 55, 54, false},
		{"again all get a lease's time", 84, 83, false},
		{"and are judged after it", 85, 84, true},
	}
	for _, s := range steps {
		if got := at(s.second, s.heard); got != s.want {
			t.Errorf("%s: judges(%ds, heard at %ds) = %t, want %t", s.what, s.second, s.heard, got, s.want)
		}
	}
}

func TestAnOutageThatEndsBetweenTwoPassesIsOne(t *testing.T) {
	t.Parallel()
	const ttl = 30 * time.Second
	start := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	var f flow
	at := func(second int) bool {
		asOf := start.Add(time.Duration(second) * time.Second)
		return f.judges(asOf, asOf.Add(-time.Second), ttl)
	}
	for second := 0; second <= 30; second += 5 {
		if got, want := at(second), second == 30; got != want {
			t.Fatalf("after %d s of heartbeats judges = %t, want %t", second, got, want)
		}
	}
	// The passes of the next minutes fail; the first that works finds a heartbeat of just now.
	for second := 400; second <= 430; second += 5 {
		if got, want := at(second), second == 430; got != want {
			t.Errorf("%d s after an outage that no pass has seen judges = %t, want %t", second-400, got, want)
		}
	}
}

func TestTheFirstChangesAreMadeAndTheOthersPostponed(t *testing.T) {
	t.Parallel()
	of := []change{adopted, counted, ended, leave, moved, spared, revived, ended, orphanDeleted, late, adopted}
	for most, want := range map[int][]change{
		0:  {postponed, counted, postponed, leave, postponed, spared, postponed, postponed, orphanDeleted, late, postponed},
		3:  {adopted, counted, ended, leave, moved, spared, postponed, postponed, orphanDeleted, late, postponed},
		6:  of,
		99: of,
	} {
		all := make([]*judged, len(of))
		for i, c := range of {
			all[i] = &judged{change: c}
		}
		postpone(all, most)
		got := make([]change, len(all))
		for i, j := range all {
			got[i] = j.change
		}
		if !slices.Equal(got, want) {
			t.Errorf("postpone(%d) = %v, want %v", most, got, want)
		}
	}
	if in := (view{}).again(postponed, nil); in != time.Millisecond {
		t.Errorf("again(postponed) = %v, want at once", in)
	}
}
