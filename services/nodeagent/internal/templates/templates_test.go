package templates_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/services/nodeagent/internal/templates"
)

func TestBuiltInTemplatesAreThere(t *testing.T) {
	t.Parallel()
	set, err := templates.Load("")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"base", "echo", "files", "shell"}, set.Names()); diff != "" {
		t.Errorf("Names() (-want +got):\n%s", diff)
	}
	base, err := set.Find("base")
	if err != nil {
		t.Fatal(err)
	}
	if base.Builtin != "echo" || base.Name != "echo" {
		t.Errorf("base is %+v, want echo", base)
	}
	if _, err := set.Find("nothing"); !errors.Is(err, templates.ErrUnknown) {
		t.Errorf("Find(nothing) = %v, want ErrUnknown", err)
	}
}

func TestAFileAddsAndReplaces(t *testing.T) {
	t.Parallel()
	set, err := templates.Parse([]byte(`
templates:
  web: {command: [python3, -m, http.server], env: {A: b}, ports: [8000], cpu: 0.5, memory: 256, aliases: [base]}
`))
	if err != nil {
		t.Fatal(err)
	}
	got, err := set.Find("base")
	if err != nil {
		t.Fatal(err)
	}
	want := templates.Template{
		Name: "web", Command: []string{"python3", "-m", "http.server"}, Env: map[string]string{"A": "b"},
		Ports: []int{8000}, CPUMillis: 500, MemoryBytes: 256 << 20,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("base (-want +got):\n%s", diff)
	}
}

func TestMistakesAreNamed(t *testing.T) {
	t.Parallel()
	cases := map[string]struct{ text, want string }{
		"an unknown field, with its line":     {"templates:\n  a:\n    comand: [x]\n", "line 3: field comand not found"},
		"an unknown section":                  {"template: {}\n", "field template not found"},
		"no YAML":                             {"\t", "found character that cannot start any token"},
		"neither command nor builtin":         {"templates: {a: {cpu: 1}}", "template a: it has neither command nor builtin"},
		"both":                                {"templates: {a: {command: [x], builtin: echo}}", "give one"},
		"an unknown program":                  {"templates: {a: {builtin: ehco}}", `no built-in program "ehco": there are echo, files and shell`},
		"a port that is none":                 {"templates: {a: {builtin: echo, ports: [70000]}}", "port 70000: want 1 to 65535"},
		"a variable that is none":             {"templates: {a: {builtin: echo, env: {'A B': x}}}", `env "A B"`},
		"a size below nothing":                {"templates: {a: {builtin: echo, cpu: -1}}", "cpu -1"},
		"memory in bytes":                     {"templates: {a: {builtin: echo, memory: 536870912}}", "memory 536870912: want MiB"},
		"an alias of two":                     {"templates: {a: {builtin: echo, aliases: [x]}, b: {builtin: echo, aliases: [x]}}", `alias "x" is also a's`},
		"an alias that is a name":             {"templates: {a: {builtin: echo, aliases: [b]}, b: {builtin: echo}}", `alias "b" is the name of a template`},
		"a name that is none":                 {"templates: {'a b': {builtin: echo}}", `name "a b"`},
		"the second of two mistakes is named": {"templates: {a: {}, b: {}}", "template b:"},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := templates.Parse([]byte(tt.text))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Parse(%q) = %v, want an error with %q", tt.text, err, tt.want)
			}
		})
	}
}

func TestAMissingFileIsAnErrorThatNamesIt(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "none.yaml")
	if _, err := templates.Load(path); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), path) {
		t.Errorf("Load(%s) = %v, want ErrNotExist with the path", path, err)
	}
}
