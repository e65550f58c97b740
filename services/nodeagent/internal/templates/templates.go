// Package templates knows what sandboxes may be made of: programs built into the binary, and what the
// operator's YAML file adds.
//
//	templates:
//	  web:                       # the templateID clients ask for
//	    command: [python3, -m, http.server, "8000"]
//	    env: {PYTHONUNBUFFERED: "1"}
//	    ports: [8000]            # where it listens: a request right after the start waits for it; all ports can be reached
//	    cpu: 0.5                 # cores, for placement
//	    memory: 256              # MiB, for placement
//	  notebook:
//	    builtin: files           # instead of command: echo, files or shell
//	    aliases: [code-interpreter-v1]
package templates

import (
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"

	"berth/services/nodeagent/internal/builtin"
)

// ErrUnknown says that no template has that name.
var ErrUnknown = errors.New("template not found")

// Template is what a sandbox is made of. It is stored with each sandbox, so that a changed file
// does not change what exists.
type Template struct {
	Name        string            `json:"name"`
	Command     []string          `json:"command,omitempty"`
	Builtin     string            `json:"builtin,omitempty"`
	Env         map[string]string `json:"env,omitempty"`
	Ports       []int             `json:"ports,omitempty"`
	CPUMillis   int64             `json:"cpuMillis"`
	MemoryBytes int64             `json:"memoryBytes"`
}

// Sizes where a template names none.
const (
	defaultCPU       = 0.25
	defaultMemoryMiB = 128
)

// DefaultName is the template the SDKs ask for when their caller names none. It is echo under another name: a new sandbox
// that answers on port 3000 shows at once that everything works. A file may define another one of this name.
const DefaultName = "base"

// Set is the templates of a node, by name and by alias.
type Set struct {
	byName map[string]Template
	names  []string
}

// builtins are there without a file.
func builtins() map[string]definition {
	return map[string]definition{
		builtin.Echo:  {Builtin: builtin.Echo, Ports: []int{builtin.DefaultPort}, Aliases: []string{DefaultName}},
		builtin.Files: {Builtin: builtin.Files, Ports: []int{builtin.DefaultPort}},
		builtin.Shell: {Builtin: builtin.Shell},
	}
}

type file struct {
	Templates map[string]definition `yaml:"templates"`
}

type definition struct {
	Command []string          `yaml:"command"`
	Builtin string            `yaml:"builtin"`
	Env     map[string]string `yaml:"env"`
	Ports   []int             `yaml:"ports"`
	CPU     float64           `yaml:"cpu"`
	Memory  int64             `yaml:"memory"`
	Aliases []string          `yaml:"aliases"`
}

// Load returns the built-in templates with those of the file at path, which may be empty. A definition in the
// file replaces a built-in template or alias of the same name. All mistakes are told at once; unknown fields
// are mistakes, and name their line.
func Load(path string) (*Set, error) {
	if path == "" {
		return Parse(nil)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read templates: %w", err)
	}
	set, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("templates in %s: %w", path, err)
	}
	return set, nil
}

// Parse is Load of a text.
func Parse(text []byte) (*Set, error) {
	var f file
	decoder := yaml.NewDecoder(strings.NewReader(string(text)))
	decoder.KnownFields(true)
	if err := decoder.Decode(&f); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	set := &Set{byName: make(map[string]Template)}
	for name, d := range builtins() {
		set.add(name, d)
	}
	var errs []error
	aliases := make(map[string]string)
	for _, name := range sortedKeys(f.Templates) {
		d := f.Templates[name]
		if err := d.check(name); err != nil {
			errs = append(errs, err)
			continue
		}
		for _, alias := range d.Aliases {
			if other, taken := aliases[alias]; taken {
				errs = append(errs, fmt.Errorf("template %s: alias %q is also %s's", name, alias, other))
			}
			if _, taken := f.Templates[alias]; taken {
				errs = append(errs, fmt.Errorf("template %s: alias %q is the name of a template", name, alias))
			}
			aliases[alias] = name
		}
		set.add(name, d)
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	set.names = sortedKeys(set.byName)
	return set, nil
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func (s *Set) add(name string, d definition) {
	if d.CPU == 0 {
		d.CPU = defaultCPU
	}
	if d.Memory == 0 {
		d.Memory = defaultMemoryMiB
	}
	t := Template{
		Name: name, Command: d.Command, Builtin: d.Builtin, Env: d.Env, Ports: d.Ports,
		CPUMillis: int64(d.CPU * 1000), MemoryBytes: d.Memory << 20,
	}
	s.byName[name] = t
	for _, alias := range d.Aliases {
		s.byName[alias] = t
	}
}

var (
	namePattern = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._:/-]{0,126}[A-Za-z0-9])?$`)
	envPattern  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// Limits of what a template may ask for: far above any machine, so that a slip of the unit is told.
const (
	maxCPU       = 1024
	maxMemoryMiB = 16 << 20
)

func (d definition) check(name string) error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("template %s: "+format, append([]any{name}, args...)...))
	}
	for _, n := range append([]string{name}, d.Aliases...) {
		if !namePattern.MatchString(n) {
			bad("name %q: want 1 to 128 letters, digits and inner . _ : / -", n)
		}
	}
	switch {
	case len(d.Command) > 0 && d.Builtin != "":
		bad("it has a command and builtin %q: give one", d.Builtin)
	case len(d.Command) == 0 && d.Builtin == "":
		bad("it has neither command nor builtin: give one, such as command: [sh, -c, …]")
	case d.Builtin != "" && !builtin.Known(d.Builtin):
		bad("no built-in program %q: there are %s, %s and %s", d.Builtin, builtin.Echo, builtin.Files, builtin.Shell)
	case len(d.Command) > 0 && d.Command[0] == "":
		bad("the command's first word is empty")
	}
	for key, value := range d.Env {
		if !ValidEnv(key, value) {
			bad("env %q: want %s", key, WantEnv)
		}
	}
	for _, port := range d.Ports {
		if port < 1 || port > 65535 {
			bad("port %d: want 1 to 65535", port)
		}
	}
	if d.CPU < 0 || d.CPU > maxCPU {
		bad("cpu %v: want cores, more than 0 and at most %d", d.CPU, maxCPU)
	}
	if d.Memory < 0 || d.Memory > maxMemoryMiB {
		bad("memory %d: want MiB, more than 0 and at most %d", d.Memory, maxMemoryMiB)
	}
	return errors.Join(errs...)
}

// maxEnvBytes is the kernel's limit for NAME=value: MAX_ARG_STRLEN less the closing zero.
const maxEnvBytes = 128<<10 - 1

// WantEnv says what ValidEnv asks for.
const WantEnv = "a name of letters, digits and _, a value without zero bytes, and less than 128 KiB in both"

// ValidEnv reports whether a process can get the variable.
func ValidEnv(name, value string) bool {
	return envPattern.MatchString(name) && !strings.ContainsRune(value, 0) && len(name)+len("=")+len(value) <= maxEnvBytes
}

// Find returns the template of that name or alias, or an error that is ErrUnknown and lists what there is.
func (s *Set) Find(name string) (Template, error) {
	if t, found := s.byName[name]; found {
		return t, nil
	}
	return Template{}, fmt.Errorf("%w: this node has %s", ErrUnknown, strings.Join(s.names, ", "))
}

// Names returns every name and alias, sorted.
func (s *Set) Names() []string { return slices.Clone(s.names) }
