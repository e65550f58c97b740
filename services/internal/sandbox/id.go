// Package sandbox has the rules of a sandbox that outlive how it is stored or sent: its id, the
// numbers that only grow, and the errors callers branch on.
package sandbox

import (
	"fmt"

	"github.com/google/uuid"
)

// ID names one sandbox for its whole life.
type ID string

// MaxIDBytes leaves room for the widest port in front: the label of a host is "65535-<id>", and a
// label has at most 63 bytes (RFC 1035, section 2.3.4).
const MaxIDBytes = 63 - len("65535-")

// ParseID returns s as an ID: 1 to 57 bytes of a-z, 0-9 and inner hyphens (RFC 1123, section 2.1,
// in lower case). Any other text gives an error that is ErrBadID.
func ParseID(s string) (ID, error) {
	switch {
	case s == "":
		return "", fmt.Errorf("%w: it is empty", ErrBadID)
	case len(s) > MaxIDBytes:
		return "", fmt.Errorf("%w: %d bytes, at most %d", ErrBadID, len(s), MaxIDBytes)
	case s[0] == '-' || s[len(s)-1] == '-':
		return "", fmt.Errorf("%w: a hyphen at its edge", ErrBadID)
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return "", fmt.Errorf("%w: byte %q at %d; only a-z, 0-9 and inner hyphens", ErrBadID, c, i)
		}
	}
	return ID(s), nil
}

// NewID draws an id nobody has: a UUIDv7 (RFC 9562) in its text form, so that ids sort by age.
func NewID() (ID, error) {
	u, err := uuid.NewV7()
	if err != nil {
		return "", fmt.Errorf("draw a sandbox id: %w", err)
	}
	return ID(u.String()), nil
}
