package sandbox_test

import (
	"errors"
	"strings"
	"testing"

	"berth/services/internal/sandbox"
)

func TestParseID(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		in string
		ok bool
	}{
		"a uuid passes":                      {"0198c5f0-1b2c-7d3e-8f40-112233445566", true},
		"one byte passes":                    {"a", true},
		"57 bytes pass, for 65535- fits":     {strings.Repeat("a", 57), true},
		"58 bytes do not":                    {strings.Repeat("a", 58), false},
		"63 bytes do not":                    {strings.Repeat("a", 63), false},
		"a mebibyte does not":                {strings.Repeat("a", 1<<20), false},
		"nothing is no id":                   {"", false},
		"capitals are refused":               {"Abc", false},
		"underscores are refused":            {"a_b", false},
		"a hyphen in front is refused":       {"-a", false},
		"a hyphen at the end is refused":     {"a-", false},
		"a dot would make two labels":        {"a.b", false},
		"a blank is refused":                 {"a b", false},
		"a slash is refused":                 {"a/b", false},
		"a NUL is refused":                   {"a\x00", false},
		"letters beyond ASCII are refused":   {"ä", false},
		"blanks around it are not trimmed":   {" a", false},
		"an inner double hyphen is a label ": {"a--b", true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := sandbox.ParseID(tt.in)
			if tt.ok != (err == nil) || (tt.ok && string(got) != tt.in) {
				t.Errorf("ParseID(%.80q) = %q, %v; want ok %v", tt.in, got, err, tt.ok)
			}
			if err != nil && !errors.Is(err, sandbox.ErrBadID) {
				t.Errorf("ParseID(%.80q) gave %v, which is not ErrBadID", tt.in, err)
			}
		})
	}
}

func TestNewIDIsValidAndSortsByAge(t *testing.T) {
	t.Parallel()
	var last sandbox.ID
	for range 1000 {
		id, err := sandbox.NewID()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := sandbox.ParseID(string(id)); err != nil {
			t.Fatalf("NewID drew %q: %v", id, err)
		}
		if id <= last {
			t.Fatalf("NewID drew %q after %q", id, last)
		}
		last = id
	}
}
