// Package cputemplate computes what the processors of a cluster have in common.
//
// A node says what its processor offers as a CPU configuration, in the form of Firecracker's custom CPU
// templates. A virtual machine that is to resume on any node of its cluster may use only what all of them
// offer: the intersection of their configurations, which is the cluster's template.
package cputemplate

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// DigestBytes is the length of Digest.
const DigestBytes = 16

// Digest returns what nodes echo and constraints name: 16 bytes of SHA-256 over the text of a template.
func Digest(template string) []byte {
	sum := sha256.Sum256([]byte(template))
	return sum[:DigestBytes]
}

// Input is the configuration of one node.
type Input struct {
	Node   string // orders the inputs, bytewise
	Config *Config
}

// topology leaves name a processor's place among others, which differs even between equal machines.
var topologyLeaves = []uint32{0xb, 0x1f} //nolint:gochecknoglobals // a constant list

// Intersect returns the template of inputs, at least one, as compact JSON: for one input that itself, for
// more what all have. CPUID entries go by their numbers (leaf, subleaf, flags), registers by name within an
// entry, MSRs by address; bits are kept where all have them. Topology leaves are never in it. The same
// inputs in any order give the same bytes: order and spelling are those of the lowest node's.
func Intersect(inputs []Input) string {
	sorted := slices.Clone(inputs)
	slices.SortFunc(sorted, func(a, b Input) int { return cmp.Compare(a.Node, b.Node) })
	first, others := sorted[0].Config, sorted[1:]
	out := Config{Capabilities: first.Capabilities}
	for _, leaf := range first.CPUID {
		if !slices.Contains(topologyLeaves, leaf.key.leaf) {
			out.CPUID = append(out.CPUID, leaf)
		}
	}
	out.MSRs = first.MSRs
	if len(others) > 0 {
		out = out.meet(others)
	}
	return out.text()
}

// meet returns what c and all others have, with the texts of c.
func (c *Config) meet(others []Input) Config {
	capabilities := slices.DeleteFunc(slices.Clone(c.Capabilities), func(name string) bool {
		return slices.ContainsFunc(others, func(o Input) bool { return !slices.Contains(o.Config.Capabilities, name) })
	})
	slices.Sort(capabilities)
	out := Config{Capabilities: slices.Compact(capabilities)}

	leaves := make([]map[leafKey]*Leaf, len(others))
	msrs := make([]map[uint32]uint64, len(others))
	for i, o := range others {
		leaves[i], msrs[i] = o.Config.byKey(), o.Config.byAddress()
	}
	seen := map[leafKey]bool{}
	for _, leaf := range c.CPUID {
		if !seen[leaf.key] {
			seen[leaf.key] = true
			if kept, ok := leaf.meet(leaves); ok {
				out.CPUID = append(out.CPUID, kept)
			}
		}
	}
	done := map[uint32]bool{}
	for _, msr := range c.MSRs {
		if done[msr.address] {
			continue
		}
		done[msr.address] = true
		bits, inAll := msr.bits, true
		for _, of := range msrs {
			other, found := of[msr.address]
			bits, inAll = bits&other, inAll && found
		}
		if inAll {
			out.MSRs = append(out.MSRs, MSR{Address: msr.Address, Bitmap: fmt.Sprintf("0b%064b", bits)})
		}
	}
	return out
}

// meet returns what l and its like in all others have, and whether all have it.
func (l *Leaf) meet(others []map[leafKey]*Leaf) (Leaf, bool) {
	like := make([]map[string]uint32, len(others))
	for i, of := range others {
		other, found := of[l.key]
		if !found {
			return Leaf{}, false
		}
		like[i] = other.byName()
	}
	kept := Leaf{Leaf: l.Leaf, Subleaf: l.Subleaf, Flags: l.Flags}
	seen := map[string]bool{}
	for _, register := range l.Modifiers {
		if seen[register.Name] {
			continue
		}
		seen[register.Name] = true
		bits, inAll := register.bits, true
		for _, of := range like {
			other, found := of[register.Name]
			bits, inAll = bits&other, inAll && found
		}
		if inAll {
			kept.Modifiers = append(kept.Modifiers, Register{Name: register.Name, Bitmap: fmt.Sprintf("0b%032b", bits)})
		}
	}
	return kept, true
}

// byKey returns the first entry of each key.
func (c *Config) byKey() map[leafKey]*Leaf {
	of := make(map[leafKey]*Leaf, len(c.CPUID))
	for i := range c.CPUID {
		if _, taken := of[c.CPUID[i].key]; !taken {
			of[c.CPUID[i].key] = &c.CPUID[i]
		}
	}
	return of
}

func (c *Config) byAddress() map[uint32]uint64 {
	of := make(map[uint32]uint64, len(c.MSRs))
	for _, msr := range c.MSRs {
		if _, taken := of[msr.address]; !taken {
			of[msr.address] = msr.bits
		}
	}
	return of
}

func (l *Leaf) byName() map[string]uint32 {
	of := make(map[string]uint32, len(l.Modifiers))
	for _, register := range l.Modifiers {
		if _, taken := of[register.Name]; !taken {
			of[register.Name] = register.bits
		}
	}
	return of
}

// text returns c as compact JSON, with [] for empty lists, and with the characters that Go would escape for
// web pages as they are.
func (c *Config) text() string {
	c.Capabilities = listed(c.Capabilities)
	c.CPUID = listed(slices.Clone(c.CPUID)) // its entries are the caller's
	for i := range c.CPUID {
		c.CPUID[i].Modifiers = listed(c.CPUID[i].Modifiers)
	}
	c.MSRs = listed(c.MSRs)
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(c); err != nil {
		panic(err) // strings and numbers can be written
	}
	return strings.TrimSuffix(out.String(), "\n")
}

func listed[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}
