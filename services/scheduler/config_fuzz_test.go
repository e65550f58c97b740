package scheduler

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// ofType lists the flags of some types, sorted.
func ofType(types ...string) []string {
	var names []string
	_, fs := flagsOf()
	fs.VisitAll(func(f *pflag.Flag) {
		if slices.Contains(types, f.Value.Type()) {
			names = append(names, f.Name)
		}
	})
	slices.Sort(names)
	return names
}

// takenOrNamed reads text as the value of a flag from its variable. What is taken is in the bounds that
// inBounds knows; what is refused is named.
func takenOrNamed(t *testing.T, flag, text string, inBounds func(*Config, *pflag.FlagSet) bool) {
	t.Helper()
	variable := settings()[flag].variables[0]
	args := []string{"--database-url=postgres://u@h/d"}
	if text == "" {
		return // is unset
	}
	cfg, err := parse(args, map[string]string{variable: text})
	if err == nil {
		err = cfg.Validate()
	}
	if err == nil {
		if !inBounds(cfg, cfg.fs) {
			t.Errorf("%s=%q is taken as %s", variable, text, cfg.fs.Lookup(flag).Value)
		}
		return
	}
	if !strings.Contains(err.Error(), flag) && !strings.Contains(err.Error(), variable) {
		t.Errorf("%s=%q: %q does not name it", variable, text, err)
	}
}

// FuzzDurationSettings reads any text as any duration.
func FuzzDurationSettings(f *testing.F) {
	flags := ofType("duration")
	for i, text := range []string{"30s", "0", "0s", "-1s", "1h30m", "30", "∞", "9223372036854775807ns", "9999999h", "1e9s", ".5s", "5d", "1µs"} {
		f.Add(uint8(i), text)
		f.Add(uint8(i+len(flags)/2), text)
	}
	f.Fuzz(func(t *testing.T, n uint8, text string) {
		flag := flags[int(n)%len(flags)]
		takenOrNamed(t, flag, text, func(_ *Config, fs *pflag.FlagSet) bool {
			d, err := time.ParseDuration(fs.Lookup(flag).Value.String())
			return err == nil && d >= 0 && d <= 10*365*24*time.Hour
		})
	})
}

// FuzzSizeSettings reads any text as any number: counts, limits, sizes, weights.
func FuzzSizeSettings(f *testing.F) {
	flags := ofType("int", "int64", "uint64", "float64")
	for i, text := range []string{"0", "1", "-1", "0x10", "1_000", "18446744073709551616", "1e3", "NaN", "Inf", "1.5", " 7", "٣", "9223372036854775807"} {
		f.Add(uint8(i), text)
		f.Add(uint8(i+len(flags)/2), text)
	}
	f.Fuzz(func(t *testing.T, n uint8, text string) {
		flag := flags[int(n)%len(flags)]
		takenOrNamed(t, flag, text, func(c *Config, fs *pflag.FlagSet) bool {
			for _, w := range weights(&c.Weights) {
				if fits := *w.to >= 0 && *w.to <= mostWeight; !fits { // nor does NaN
					return false
				}
			}
			size := c.defaultSize()
			return c.Pool > 0 && c.SampleSize > 0 && c.PlaceBatch > 0 && c.HeartbeatBatch > 0 && c.ArtifactStoreCapacity > 0 &&
				size.CPUMillis > 0 && size.MemoryBytes > 0
		})
	})
}

// FuzzAgentENVsFile reads any text as the value of any key of AgentENV's file, and any text as the file.
func FuzzAgentENVsFile(f *testing.F) {
	cfg, _ := flagsOf()
	keys := slices.Sorted(maps.Keys(cfg.fileKeys()))
	for i, text := range []string{`"30s"`, `30`, `null`, `-1`, `[]`, `{}`, `"x"`, `1e400`, `18446744073709551616`, `[{"id":"a","endpoint":"http://10.0.0.1:1"}]`, `{"a":1}}`, `true`, ``} {
		f.Add(uint8(i), text)
		f.Add(uint8(i+len(keys)/2), text)
	}
	f.Fuzz(func(t *testing.T, n uint8, text string) {
		key := keys[int(n)%len(keys)]
		parts := strings.Split(key, ".")
		whole := text
		for _, part := range slices.Backward(parts) {
			whole = `{"` + part + `":` + whole + `}`
		}
		for _, content := range []string{whole, text} {
			name := filepath.Join(t.TempDir(), "config.json")
			if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			err := refuses(t, nil, nil, name)
			if err != nil && err.Error() == "" {
				t.Errorf("%s is refused without a word", content)
			}
		}
	})
}
