// Package node has the rules of a node that outlive how it is stored or sent: its id, its status,
// its roster, and why it may be refused.
package node

import (
	"fmt"
	"strings"
)

// ID names one node; it is unique in a database.
type ID string

// MaxIDBytes is the length of the longest host name (RFC 1123, section 2.1).
const MaxIDBytes = 253

// ParseID returns s as an ID: labels of 1 to 63 bytes of a-z, A-Z, 0-9 and inner hyphens or
// underscores, joined by dots, 253 bytes in all; a host name passes. Any other text gives an error
// that is ErrBadID. Blank is ErrIDRequired.
func ParseID(s string) (ID, error) {
	if strings.TrimSpace(s) == "" {
		return "", ErrIDRequired
	}
	if len(s) > MaxIDBytes {
		return "", fmt.Errorf("%w: %d bytes, at most %d", ErrBadID, len(s), MaxIDBytes)
	}
	for label := range strings.SplitSeq(s, ".") {
		if err := checkLabel(label); err != nil {
			return "", err
		}
	}
	return ID(s), nil
}

func checkLabel(label string) error {
	switch {
	case label == "":
		return fmt.Errorf("%w: an empty label", ErrBadID)
	case len(label) > 63:
		return fmt.Errorf("%w: a label of %d bytes, at most 63", ErrBadID, len(label))
	case strings.ContainsRune("-_", rune(label[0])) || strings.ContainsRune("-_", rune(label[len(label)-1])):
		return fmt.Errorf("%w: a hyphen or underscore at a label's edge", ErrBadID)
	}
	for i := range len(label) {
		c := label[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_'
		if !letter && (c < '0' || c > '9') && c != '-' {
			return fmt.Errorf("%w: byte %q", ErrBadID, c)
		}
	}
	return nil
}

// MaxTagBytes bounds a cluster id, an instance id and a P2P backend.
const MaxTagBytes = 128

// CheckTag returns an error that is ErrBadTag unless s has at most MaxTagBytes bytes and no
// control characters. field names it in the error.
func CheckTag(field, s string) error {
	if len(s) > MaxTagBytes {
		return fmt.Errorf("%w: %s has %d bytes, at most %d", ErrBadTag, field, len(s), MaxTagBytes)
	}
	return CheckText(field, s)
}

// CheckText returns an error that is ErrBadTag if s has control characters or is no UTF-8.
func CheckText(field, s string) error {
	for _, r := range s {
		if r < 0x20 || r == 0x7f || r == '�' {
			return fmt.Errorf("%w: %s has a control character or is not UTF-8", ErrBadTag, field)
		}
	}
	return nil
}
