package gateway

import (
	"runtime/debug"
	"testing"
)

// It changes the whole process, so it does not run beside others.
func TestTheCollectorIsRelaxedUnlessTheOperatorHasDecided(t *testing.T) { //nolint:paralleltest // see above
	const before = 150
	original := debug.SetGCPercent(before)
	defer debug.SetGCPercent(original)
	for name, tt := range map[string]struct {
		value string
		set   bool
		want  int
	}{
		"unset":          {"", false, 400},
		"empty is unset": {"", true, 400},
		"a percentage":   {"50", true, before}, // the runtime has read it already
		"off":            {"off", true, before},
	} {
		debug.SetGCPercent(before)
		relaxCollector(func(string) (string, bool) { return tt.value, tt.set })
		if got := debug.SetGCPercent(before); got != tt.want {
			t.Errorf("%s: %d %%, want %d", name, got, tt.want)
		}
	}
}
