package sandbox_test

import (
	"regexp"
	"testing"

	"berth/services/internal/sandbox"
)

// The rule once more, as the column's CHECK spells it.
var label = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,55}[a-z0-9])?$`)

func FuzzParseID(f *testing.F) {
	for _, s := range []string{"a", "-", "a-b", "a\n", "65535-a", "A"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		_, err := sandbox.ParseID(s)
		if want := label.MatchString(s) && s[len(s)-1] != '\n'; (err == nil) != want {
			t.Errorf("ParseID(%q): %v, want ok %v", s, err, want)
		}
	})
}
