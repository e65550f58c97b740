package cli

import (
	"testing"
	"time"

	adminv1 "berth/rpc/admin/v1"
)

func TestABarSaysHowMuchIsGoneHowFastAndUntilWhen(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		given *adminv1.Drain
		want  string
	}{
		"nothing has left": {
			&adminv1.Drain{NodeId: "n1", State: "closing", Total: 4, Left: 3, HoldsLeft: 1, TookMs: 500},
			"n1  closing  [░░░░░░░░░░░░░░░░░░░░░░░░] 0/4 gone, 1 promised",
		},
		"half has left": {
			&adminv1.Drain{NodeId: "n1", State: "draining", Total: 4, Left: 2, TookMs: 10_000, DeadlineUnixMs: 1, DeadlineLeftMs: 3_600_000},
			"n1  draining [████████████░░░░░░░░░░░░] 2/4 gone  0.2/s  ETA 10s  deadline in 1h00m",
		},
		"slowly": {
			&adminv1.Drain{NodeId: "n1", State: "draining", Total: 100, Left: 99, TookMs: 600_000},
			"n1  draining [░░░░░░░░░░░░░░░░░░░░░░░░] 1/100 gone  0.1/min  ETA 16h30m",
		},
		"past its deadline": {
			&adminv1.Drain{NodeId: "n1", State: "draining", Total: 1, Left: 1, DeadlineUnixMs: 1, DeadlineLeftMs: -5_000},
			"n1  draining [░░░░░░░░░░░░░░░░░░░░░░░░] 0/1 gone  deadline in no time",
		},
		"more came than there was": {
			&adminv1.Drain{NodeId: "n1", State: "draining", Total: 1, Left: 3},
			"n1  draining [░░░░░░░░░░░░░░░░░░░░░░░░] 0/3 gone",
		},
		"a node that had nothing": {
			&adminv1.Drain{NodeId: "n1", State: "done", EndedUnixMs: 1},
			"n1  done     [████████████████████████] 0/0 gone",
		},
		"words of a stranger": {
			&adminv1.Drain{NodeId: "n\x1b1", State: "\nx"},
			"n�1  �x       [████████████████████████] 0/0 gone",
		},
	}
	for name, tt := range tests {
		if got := barOf(tt.given); got != tt.want {
			t.Errorf("%s:\n got %q\nwant %q", name, got, tt.want)
		}
	}
}

func TestPaceIsNotKnownForTimesThatDoNotFit(t *testing.T) {
	t.Parallel()
	if rate, eta, known := pace(1, 4_000_000_000, 300*24*time.Hour); known {
		t.Errorf("pace = %s, %v, want it unknown", rate, eta)
	}
}
