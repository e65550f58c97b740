package discovery

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
)

func TestPorts(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"1", "80", "65535", "http", "h2", "8a", strings.Repeat("a", 63)} {
		if p, err := ParsePort(text); err != nil || p.String() != text {
			t.Errorf("ParsePort(%q) = %v, %v, want it", text, p, err)
		}
	}
	for _, text := range []string{"", "0", "65536", "99999999999999999999", "080", "-1", "+1", "8 0", "HTTP", "a_b", "-a", "a-", "1-2", "http ", strings.Repeat("a", 64)} {
		if p, err := ParsePort(text); err == nil {
			t.Errorf("ParsePort(%q) = %v, want a mistake", text, p)
		}
	}
}

func TestEachMistakeOfSettingsIsNamed(t *testing.T) {
	t.Parallel()
	good := Settings{Namespace: "n", ServiceName: "s", Port: "8000", Scheme: "http"}
	tests := map[string]struct {
		change func(*Settings)
		want   string
	}{
		"no namespace":               {func(s *Settings) { s.Namespace = "" }, "namespace"},
		"a namespace that is none":   {func(s *Settings) { s.Namespace = "a/b" }, "namespace"},
		"a service that is none":     {func(s *Settings) { s.ServiceName = "a.b" }, "service_name"},
		"no port":                    {func(s *Settings) { s.Port = "" }, "port"},
		"a scheme that is none":      {func(s *Settings) { s.Scheme = "HTTP" }, "scheme"},
		"a selector that is none":    {func(s *Settings) { s.IgnorePodSelector = "a in" }, "ignore_pod_selector"},
		"a selector that is blank":   {func(s *Settings) { s.IgnorePodSelector = " " }, "ignore_pod_selector"},
		"another that is none":       {func(s *Settings) { s.NoSchedulePodSelector = "a==,b=c d" }, "no_schedule_pod_selector"},
		"another that selects, well": {func(s *Settings) { s.NoSchedulePodSelector = "a in (b, c), !d, e notin (f)" }, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := good
			tt.change(&s)
			_, mistakes := Parse(s)
			switch {
			case tt.want == "" && len(mistakes) > 0:
				t.Errorf("Parse = %v, want none", mistakes[0])
			case tt.want != "" && (len(mistakes) != 1 || mistakes[0].Setting != tt.want):
				t.Errorf("Parse = %v, want one of %s", mistakes, tt.want)
			}
		})
	}
}

func FuzzParsePort(f *testing.F) {
	for _, text := range []string{"", "80", "http", "080", "65536", "1-1"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParsePort(text)
		if err != nil {
			if p != (Port{}) {
				t.Errorf("ParsePort(%q) = %v beside a mistake", text, p)
			}
			return
		}
		again, err := ParsePort(p.String())
		if p.String() != text || err != nil || again != p {
			t.Errorf("ParsePort(%q) = %v, read again %v, %v", text, p, again, err)
		}
		if p.name == "" && (p.number < 1 || p.number > 65535) || p.name != "" && len(validation.IsDNS1123Label(p.name)) > 0 {
			t.Errorf("ParsePort(%q) = %v, which is no port", text, p)
		}
	})
}

func FuzzSelector(f *testing.F) {
	for _, text := range []string{"", " ", "a=b", "a in (b,c),!d", "a==b", "!", "a>1", "a in ()", ","} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		selector, err := parseSelector(text)
		if err != nil {
			return
		}
		if selector.Empty() || selector.String() == "" {
			t.Errorf("parseSelector(%q) selects every Pod", text)
		}
		// What is sent to the API server means what was read.
		sent, err := labels.Parse(selector.String())
		if err != nil || sent.String() != selector.String() {
			t.Errorf("parseSelector(%q) is sent as %q, which reads %v, %v", text, selector, sent, err)
		}
	})
}
