package cputemplate

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func parsed(t rapid.TB, text string) *Config {
	t.Helper()
	c, err := Parse(text)
	if err != nil {
		t.Fatalf("Parse(%s) = %v", text, err)
	}
	return c
}

// of returns the template of configurations of the nodes n0, n1 …
func of(t rapid.TB, texts ...string) string {
	t.Helper()
	inputs := make([]Input, len(texts))
	for i, text := range texts {
		inputs[i] = Input{Node: fmt.Sprintf("n%d", i), Config: parsed(t, text)}
	}
	return Intersect(inputs)
}

func leaf(leaf, subleaf string, flags int, registers ...string) string {
	return fmt.Sprintf(`{"leaf":%q,"subleaf":%q,"flags":%d,"modifiers":[%s]}`, leaf, subleaf, flags, strings.Join(registers, ","))
}

func register(name, bitmap string) string {
	return fmt.Sprintf(`{"register":%q,"bitmap":%q}`, name, bitmap)
}

func cpuid(leaves ...string) string { return `{"cpuid_modifiers":[` + strings.Join(leaves, ",") + `]}` }

func msrs(pairs ...string) string {
	var list []string
	for i := 0; i < len(pairs); i += 2 {
		list = append(list, fmt.Sprintf(`{"addr":%q,"bitmap":%q}`, pairs[i], pairs[i+1]))
	}
	return `{"msr_modifiers":[` + strings.Join(list, ",") + `]}`
}

func bits(n int, ones string) string { return "0b" + strings.Repeat("0", n-len(ones)) + ones }

func TestIntersect(t *testing.T) {
	t.Parallel()
	const empty = `{"kvm_capabilities":[],"cpuid_modifiers":[],"msr_modifiers":[]}`
	full := func(capabilities, leaves, msrs string) string {
		return `{"kvm_capabilities":[` + capabilities + `],"cpuid_modifiers":[` + leaves + `],"msr_modifiers":[` + msrs + `]}`
	}
	tests := map[string]struct {
		configs []string
		want    string
	}{
		"lists that are missing are empty": {[]string{`{}`}, empty},
		"lists that are null are empty":    {[]string{`{"kvm_capabilities":null,"cpuid_modifiers":[{"leaf":"1","subleaf":"0","modifiers":null}]}`}, full("", leaf("1", "0", 0), "")},
		"one is itself, as it is spelled, without what is not in the form": {
			[]string{`{"other":1,"msr_modifiers":[{"addr":"0X8b","bitmap":"1"}],"kvm_capabilities":["b","a","a"],
			          "cpuid_modifiers":[{"modifiers":[{"bitmap":"10","register":"eax"}],"subleaf":"0x0","leaf":"7","flags":1}]}`},
			full(`"b","a","a"`, leaf("7", "0x0", 1, register("eax", "10")), `{"addr":"0X8b","bitmap":"1"}`),
		},
		"one has no topology either": {
			[]string{cpuid(leaf("0xb", "0", 1), leaf("0x1F", "2", 0), leaf("0xb0", "0", 0))},
			full("", leaf("0xb0", "0", 0), ""),
		},
		"capabilities are those of all, sorted": {
			[]string{`{"kvm_capabilities":["z","a","m","a"]}`, `{"kvm_capabilities":["a","z","q"]}`}, full(`"a","z"`, "", ""),
		},
		"an entry goes by its numbers, not by their spelling": {
			[]string{cpuid(leaf("0x00000007", "0X0", 1, register("ebx", "0b111"))), cpuid(leaf("7", "0", 1, register("ebx", "101")))},
			full("", leaf("0x00000007", "0X0", 1, register("ebx", bits(32, "101"))), ""),
		},
		"an entry of another subleaf or other flags is another one": {
			[]string{cpuid(leaf("7", "0", 1), leaf("7", "1", 0), leaf("8", "0", 0)), cpuid(leaf("7", "0", 0), leaf("7", "0", 1))},
			full("", leaf("7", "0", 1), ""),
		},
		"a register that one lacks is dropped, its entry stays": {
			[]string{cpuid(leaf("1", "0", 0, register("eax", "1"), register("ebx", "1"))), cpuid(leaf("1", "0", 0, register("ebx", "0"))), cpuid(leaf("1", "0", 0, register("ebx", "1"), register("eax", "1")))},
			full("", leaf("1", "0", 0, register("ebx", bits(32, "0"))), ""),
		},
		"an entry without a register in common is empty": {
			[]string{cpuid(leaf("1", "0", 0, register("eax", "1"))), cpuid(leaf("1", "0", 0, register("ebx", "0")))},
			full("", leaf("1", "0", 0), ""),
		},
		"the first of two counts, in each": {
			[]string{
				cpuid(leaf("1", "0", 0, register("eax", "11"), register("eax", "00")), leaf("0x1", "0", 0, register("eax", "00"))),
				cpuid(leaf("1", "0", 0, register("eax", "10"), register("eax", "11")), leaf("1", "0", 0, register("eax", "11"))),
			},
			full("", leaf("1", "0", 0, register("eax", bits(32, "10"))), ""),
		},
		"no topology of several": {[]string{cpuid(leaf("b", "0", 0)), cpuid(leaf("0xB", "0", 0))}, empty},
		"MSRs go by address and have 64 digits": {
			[]string{msrs("0x10", "0b"+strings.Repeat("1", 64), "0x11", "1", "0x10", "0"), msrs("10", "1"+strings.Repeat("0", 63), "12", "1")},
			full("", "", `{"addr":"0x10","bitmap":"0b1`+strings.Repeat("0", 63)+`"}`),
		},
		"texts are written as they were sent": {
			[]string{`{"kvm_capabilities":["<&> ü"]}`, `{"kvm_capabilities":["<&> ü"]}`}, full(`"<&> ü"`, "", ""),
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tt.want, of(t, tt.configs...)); diff != "" {
				t.Errorf("Intersect (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ text, want string }{
		"nothing":                   {"", "no JSON at byte 0"},
		"no JSON":                   {`{"kvm`, "no JSON at byte 5"},
		"something after it":        {`{} {}`, "no JSON at byte 4"},
		"a list":                    {`[]`, "all: unexpected array, at byte 1"},
		"a number for a capability": {`{"kvm_capabilities":[1]}`, "kvm_capabilities: unexpected number, at byte 22"},
		"flags that are a text":     {`{"cpuid_modifiers":[{"leaf":"1","subleaf":"0","flags":"1"}]}`, "cpuid_modifiers.flags: unexpected string, at byte 57"},
		"flags below 0":             {`{"cpuid_modifiers":[{"leaf":"1","subleaf":"0","flags":-1}]}`, "cpuid_modifiers.flags: unexpected number -1, at byte 56"},
		"no leaf":                   {`{"cpuid_modifiers":[{"subleaf":"0"}]}`, "cpuid_modifiers[0].leaf: not a hexadecimal number of 32 bits"},
		"a leaf of 33 bits":         {cpuid(leaf("0x100000000", "0", 0)), "cpuid_modifiers[0].leaf: not a hexadecimal number of 32 bits"},
		"a leaf with a sign":        {cpuid(leaf("1", "0", 0), leaf("+1", "0", 0)), "cpuid_modifiers[1].leaf: not a hexadecimal number of 32 bits"},
		"a subleaf that is a word":  {cpuid(leaf("1", "zero", 0)), "cpuid_modifiers[0].subleaf: not a hexadecimal number of 32 bits"},
		"a prefix alone":            {cpuid(leaf("0x", "0", 0)), "cpuid_modifiers[0].leaf: not a hexadecimal number of 32 bits"},
		"two prefixes":              {cpuid(leaf("0x0x1", "0", 0)), "cpuid_modifiers[0].leaf: not a hexadecimal number of 32 bits"},
		"a bitmap of 33 digits":     {cpuid(leaf("1", "0", 0, register("eax", "0b"+strings.Repeat("0", 33)))), "cpuid_modifiers[0].modifiers[0].bitmap: not a binary number of that many digits"},
		"a bitmap with an x":        {cpuid(leaf("1", "0", 0, register("eax", "0bx1"))), "cpuid_modifiers[0].modifiers[0].bitmap: not a binary number of that many digits"},
		"no bitmap":                 {cpuid(leaf("1", "0", 0, `{"register":"eax"}`)), "cpuid_modifiers[0].modifiers[0].bitmap: not a binary number of that many digits"},
		"an MSR of 65 digits":       {msrs("1", strings.Repeat("0", 65)), "msr_modifiers[0].bitmap: not a binary number of that many digits"},
		"an MSR at no address":      {msrs("1", "0", "0b", "0", "g", "1"), "msr_modifiers[2].addr: not a hexadecimal number of 32 bits"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := Parse(tt.text)
			if !errors.Is(err, ErrBadConfig) {
				t.Fatalf("Parse(%s) = %v, want ErrBadConfig", tt.text, err)
			}
			if got := strings.TrimPrefix(err.Error(), ErrBadConfig.Error()+": "); got != tt.want {
				t.Errorf("Parse(%s) says %q, want %q", tt.text, got, tt.want)
			}
		})
	}
}

// drawConfig draws small configurations, so that they have much in common.
func drawConfig(t *rapid.T, label string) string {
	number := func(of []string) *rapid.Generator[string] { return rapid.SampledFrom(of) }
	bitmap := rapid.StringMatching(`(0b)?[01]{1,32}`)
	registers := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) string {
		return register(number([]string{"eax", "ebx", "ecx"}).Draw(t, "name"), bitmap.Draw(t, "bitmap"))
	}), 0, 3)
	leaves := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) string {
		return leaf(number([]string{"0x1", "1", "0xb", "0X1F", "0x7", "07"}).Draw(t, "leaf"), number([]string{"0x0", "0", "1"}).Draw(t, "subleaf"),
			rapid.IntRange(0, 1).Draw(t, "flags"), registers.Draw(t, "registers")...)
	}), 0, 5).Draw(t, label+" leaves")
	var addresses []string
	for _, address := range rapid.SliceOfN(number([]string{"0x10", "10", "0x11", "12"}), 0, 4).Draw(t, label+" addresses") {
		addresses = append(addresses, address, bitmap.Draw(t, "bitmap"))
	}
	capabilities := rapid.SliceOfN(number([]string{`"a"`, `"b"`, `"c"`}), 0, 4).Draw(t, label+" capabilities")
	return `{"kvm_capabilities":[` + strings.Join(capabilities, ",") + `],` + cpuid(leaves...)[1:len(cpuid(leaves...))-1] + `,` + msrs(addresses...)[1:]
}

func TestAnyOrderOfInputsGivesTheSameBytes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		inputs := make([]Input, rapid.IntRange(1, 5).Draw(t, "nodes"))
		for i := range inputs {
			inputs[i] = Input{Node: fmt.Sprintf("n%d", i), Config: parsed(t, drawConfig(t, fmt.Sprintf("n%d", i)))}
		}
		shuffled := rapid.Permutation(inputs).Draw(t, "order")
		before := slices.Clone(shuffled)
		want := Intersect(inputs)
		if got := Intersect(shuffled); got != want {
			t.Fatalf("Intersect = %s, in another order %s", want, got)
		}
		if !slices.Equal(before, shuffled) {
			t.Fatal("Intersect changed the order of its inputs")
		}
	})
}

func TestWhatIsInATemplateIsInAllInputs(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		texts := make([]string, rapid.IntRange(2, 4).Draw(t, "nodes"))
		for i := range texts {
			texts[i] = drawConfig(t, fmt.Sprintf("n%d", i))
		}
		template := of(t, texts...)
		// The template has nothing that an input lacks, so meeting that input changes nothing; nor does a
		// node that was counted twice.
		for _, text := range append(slices.Clone(texts), template) {
			if got := of(t, template, text); got != template {
				t.Fatalf("with %s it is\n%s, want\n%s", text, got, template)
			}
		}
		if got := of(t, append(slices.Clone(texts), texts[0])...); got != template {
			t.Fatalf("with an input twice it is\n%s, want\n%s", got, template)
		}
		for _, topology := range []uint32{0xb, 0x1f} {
			if slices.ContainsFunc(parsed(t, template).CPUID, func(l Leaf) bool { return l.key.leaf == topology }) {
				t.Fatalf("leaf %x is in %s", topology, template)
			}
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add(`{}`)
	f.Add(`{"kvm_capabilities":["171","!56"],"cpuid_modifiers":[{"leaf":"0x1","subleaf":"0x0","flags":0,"modifiers":[{"register":"eax","bitmap":"0b01"}]}],"msr_modifiers":[{"addr":"0x10a","bitmap":"0b1"}]}`)
	f.Add(cpuid(leaf("0xb", "0", 1, register("eax", "1"))))
	f.Add(msrs("ffffffff", strings.Repeat("1", 64)))
	f.Add(`{"cpuid_modifiers":[{"leaf":"1","subleaf":"0","flags":4294967296}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		c, err := Parse(text)
		if err != nil {
			if !errors.Is(err, ErrBadConfig) || len(err.Error()) > 250 || strings.ContainsAny(err.Error(), "\x00\n") {
				t.Errorf("Parse(%q) = %q, want a short ErrBadConfig in one line", text, err)
			}
			return
		}
		template := Intersect([]Input{{"a", c}, {"b", c}})
		again, err := Parse(template)
		if err != nil {
			t.Fatalf("Parse(%s), a template, = %v", template, err)
		}
		if got := Intersect([]Input{{"b", c}, {"a", again}}); got != template {
			t.Errorf("the template with its input is\n%s, want\n%s", got, template)
		}
		if _, err := Parse(Intersect([]Input{{"a", c}})); err != nil {
			t.Errorf("what is itself is not read again: %v", err)
		}
	})
}
