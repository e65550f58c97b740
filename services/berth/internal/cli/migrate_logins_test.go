package cli

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestParseLoginsNamesEveryMistakeAndNoPassword(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		list  string
		want  []login
		fails []string // parts of the error
	}{
		"two":                       {"a:berth_scheduler:x, b:berth_gateway:y:z", []login{{"a", "berth_scheduler", "x"}, {"b", "berth_gateway", "y:z"}}, nil},
		"none":                      {" ", nil, []string{"BERTH_MIGRATE_LOGINS"}},
		"no password":               {"a:berth_scheduler:", nil, []string{"entry 1"}},
		"an unknown group":          {"a:postgres:hidden", nil, []string{"entry 1", "login a", `"postgres"`}},
		"one login twice":           {"a:berth_gateway:x,a:berth_sessions:hidden", nil, []string{"entry 2", "twice"}},
		"two mistakes, both named":  {"hidden,b:nobody:hidden", nil, []string{"entry 1", "entry 2"}},
		"an empty entry at the end": {"a:berth_gateway:x,", nil, []string{"entry 2"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := parseLogins(tt.list)
			if len(tt.fails) == 0 {
				if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(login{}), cmpopts.EquateEmpty()); err != nil || diff != "" {
					t.Errorf("parseLogins(%q): %v (-want +got):\n%s", tt.list, err, diff)
				}
				return
			}
			if err == nil {
				t.Fatalf("parseLogins(%q) = %v, want an error", tt.list, got)
			}
			for _, part := range tt.fails {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("parseLogins(%q): %v, want it to name %s", tt.list, err, part)
				}
			}
			if strings.Contains(err.Error(), "hidden") {
				t.Errorf("parseLogins(%q): %v shows a password", tt.list, err)
			}
		})
	}
}
