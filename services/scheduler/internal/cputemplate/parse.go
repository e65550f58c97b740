package cputemplate

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// ErrBadConfig says that a text is no CPU configuration; its text says where.
var ErrBadConfig = errors.New("not a CPU configuration")

// Config is a CPU configuration that was parsed, or a template that is to be written.
type Config struct {
	Capabilities []string `json:"kvm_capabilities"`
	CPUID        []Leaf   `json:"cpuid_modifiers"`
	MSRs         []MSR    `json:"msr_modifiers"`
}

// Leaf is one CPUID entry.
type Leaf struct {
	Leaf      string     `json:"leaf"`
	Subleaf   string     `json:"subleaf"`
	Flags     uint32     `json:"flags"`
	Modifiers []Register `json:"modifiers"`

	key leafKey
}

type leafKey struct{ leaf, subleaf, flags uint32 }

// Register is one register of a CPUID entry.
type Register struct {
	Name   string `json:"register"`
	Bitmap string `json:"bitmap"`

	bits uint32
}

// MSR is one model-specific register.
type MSR struct {
	Address string `json:"addr"`
	Bitmap  string `json:"bitmap"`

	address uint32
	bits    uint64
}

// Parse returns the configuration in text. Lists may be missing, unknown fields are left out. Numbers are
// hexadecimal of 32 bits, with or without 0x; bitmaps binary of 32 digits at most for registers and 64 for
// MSRs, with or without 0b. Anything else gives an error that is ErrBadConfig.
func Parse(text string) (*Config, error) {
	c := &Config{}
	if err := json.Unmarshal([]byte(text), c); err != nil {
		return nil, fmt.Errorf("%w: %s", ErrBadConfig, explain(err))
	}
	for i := range c.CPUID {
		if err := c.CPUID[i].parse(); err != nil {
			return nil, fmt.Errorf("%w: cpuid_modifiers[%d]%w", ErrBadConfig, i, err)
		}
	}
	for i := range c.MSRs {
		m := &c.MSRs[i]
		var err error
		if m.address, err = hex(m.Address); err != nil {
			return nil, fmt.Errorf("%w: msr_modifiers[%d].addr%w", ErrBadConfig, i, err)
		}
		if m.bits, err = binary(m.Bitmap, 64); err != nil {
			return nil, fmt.Errorf("%w: msr_modifiers[%d].bitmap%w", ErrBadConfig, i, err)
		}
	}
	return c, nil
}

func (l *Leaf) parse() error {
	var err error
	if l.key.leaf, err = hex(l.Leaf); err != nil {
		return fmt.Errorf(".leaf%w", err)
	}
	if l.key.subleaf, err = hex(l.Subleaf); err != nil {
		return fmt.Errorf(".subleaf%w", err)
	}
	l.key.flags = l.Flags
	for i := range l.Modifiers {
		r := &l.Modifiers[i]
		bits, err := binary(r.Bitmap, 32)
		if err != nil {
			return fmt.Errorf(".modifiers[%d].bitmap%w", i, err)
		}
		r.bits = uint32(bits)
	}
	return nil
}

// explain says what is wrong in the words of the form, and never more than a line of it.
func explain(err error) string {
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Sprintf("%.100s: unexpected %.20s, at byte %d", cmp.Or(wrong.Field, "all"), wrong.Value, wrong.Offset)
	}
	if wrong, ok := errors.AsType[*json.SyntaxError](err); ok {
		return fmt.Sprintf("no JSON at byte %d", wrong.Offset)
	}
	return "no JSON"
}

var (
	errNotHex    = errors.New(": not a hexadecimal number of 32 bits")
	errNotBinary = errors.New(": not a binary number of that many digits")
)

func hex(s string) (uint32, error) {
	if digits, found := strings.CutPrefix(strings.ToLower(s), "0x"); found {
		s = digits
	}
	n, err := strconv.ParseUint(s, 16, 32)
	if err != nil {
		return 0, errNotHex
	}
	return uint32(n), nil
}

func binary(s string, most int) (uint64, error) {
	if digits, found := strings.CutPrefix(strings.ToLower(s), "0b"); found {
		s = digits
	}
	if len(s) > most {
		return 0, errNotBinary
	}
	n, err := strconv.ParseUint(s, 2, 64)
	if err != nil {
		return 0, errNotBinary
	}
	return n, nil
}
