package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAgentENVsFlagsMayHaveOneDash(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ args, want []string }{
		"a file":                      {[]string{"scheduler", "serve", "-config", "x"}, []string{"scheduler", "serve", "--config", "x"}},
		"a file with a sign":          {[]string{"gateway", "serve", "-config=x", "--debug"}, []string{"gateway", "serve", "--config=x", "--debug"}},
		"lookups only":                {[]string{"scheduler", "serve", "-query-only=true"}, []string{"scheduler", "serve", "--query-only=true"}},
		"two dashes stay":             {[]string{"scheduler", "serve", "--config", "x"}, []string{"scheduler", "serve", "--config", "x"}},
		"other flags stay":            {[]string{"scheduler", "serve", "-h", "-configs"}, []string{"scheduler", "serve", "-h", "-configs"}},
		"other commands stay":         {[]string{"sandbox", "list", "-config"}, []string{"sandbox", "list", "-config"}},
		"what follows two dashes":     {[]string{"scheduler", "serve", "--", "-config"}, []string{"scheduler", "serve", "--", "-config"}},
		"nothing":                     {nil, nil},
		"a word that is no flag":      {[]string{"scheduler", "serve", "config"}, []string{"scheduler", "serve", "config"}},
		"a group without its command": {[]string{"scheduler"}, []string{"scheduler"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tt.want, doubleDashes(tt.args)); diff != "" {
				t.Errorf("doubleDashes(%q) (-want +got):\n%s", tt.args, diff)
			}
		})
	}
}

func TestAFileNamedWithOneDashIsRead(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(path, []byte(`{"scheduler": {"report_ttl": "eternity"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	code := Main([]string{"scheduler", "serve", "-config", path}, &stdout, &stderr)
	if code != 1 || !strings.Contains(stderr.String(), "scheduler.report_ttl") {
		t.Errorf("berth scheduler serve -config = %d, %q; want 1 and the key that is wrong", code, &stderr)
	}
}
