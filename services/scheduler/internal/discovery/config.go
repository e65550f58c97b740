package discovery

import (
	"fmt"
	"strconv"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Settings are the texts of a configuration.
type Settings struct {
	Namespace             string
	ServiceName           string
	Port                  string // a number, or the name of a port of the Service
	Scheme                string
	IgnorePodSelector     string // "": none
	NoSchedulePodSelector string // "": none
	PreferIPv6            bool
	Kubeconfig            string // "": the cluster this process runs in
}

// Mistake is a setting that cannot be used.
type Mistake struct {
	Setting string // as its key in the file, such as service_name
	Value   string
	Want    string
}

func (m *Mistake) Error() string { return fmt.Sprintf("%s is %q: %s", m.Setting, m.Value, m.Want) }

// Config says which Service has the nodes, and how they are reached.
type Config struct {
	namespace, service string
	port               Port
	scheme             string
	ignore, noSchedule labels.Selector // nil: none
	preferIPv6         bool
	kubeconfig         string
}

// Parse checks s. It returns all mistakes at once.
func Parse(s Settings) (Config, []*Mistake) {
	c := Config{namespace: s.Namespace, service: s.ServiceName, scheme: s.Scheme, preferIPv6: s.PreferIPv6, kubeconfig: s.Kubeconfig}
	var mistakes []*Mistake
	wrong := func(setting, value, want string) {
		mistakes = append(mistakes, &Mistake{Setting: setting, Value: value, Want: want})
	}
	if len(validation.IsDNS1123Label(s.Namespace)) > 0 {
		wrong("namespace", s.Namespace, "want the namespace of the Service that has the nodes")
	}
	if len(validation.IsDNS1123Label(s.ServiceName)) > 0 {
		wrong("service_name", s.ServiceName, "want the name of the Service that has the nodes")
	}
	var err error
	if c.port, err = ParsePort(s.Port); err != nil {
		wrong("port", s.Port, err.Error())
	}
	if s.Scheme != "http" && s.Scheme != "https" {
		wrong("scheme", s.Scheme, "want http or https")
	}
	for _, selector := range []struct {
		setting, text string
		to            *labels.Selector
	}{
		{"ignore_pod_selector", s.IgnorePodSelector, &c.ignore},
		{"no_schedule_pod_selector", s.NoSchedulePodSelector, &c.noSchedule},
	} {
		if selector.text == "" {
			continue
		}
		if *selector.to, err = parseSelector(selector.text); err != nil {
			wrong(selector.setting, selector.text, err.Error())
		}
	}
	return c, mistakes
}

// parseSelector reads a label selector, and refuses one that selects every Pod, for a blank setting would
// take all nodes away.
func parseSelector(s string) (labels.Selector, error) {
	selector, err := labels.Parse(s)
	if err != nil {
		return nil, fmt.Errorf("want a label selector such as app=node,tier in (a,b): %w", err)
	}
	if selector.Empty() {
		return nil, fmt.Errorf("want a label selector such as app=node; leave it out to select no Pod")
	}
	return selector, nil
}

// Port is a port of EndpointSlices, by number or by name.
type Port struct {
	number int32 // 0: by name
	name   string
}

// ParsePort reads a number from 1 to 65535 in its shortest form, or the name of a port: a DNS label that
// is no number.
func ParsePort(s string) (Port, error) {
	const want = "want a port from 1 to 65535, or the name of a port of the Service"
	if strings.Trim(s, "0123456789") == "" {
		n, err := strconv.ParseUint(s, 10, 16)
		if err != nil || n == 0 || s != strconv.FormatUint(n, 10) {
			return Port{}, fmt.Errorf("%s", want)
		}
		return Port{number: int32(n)}, nil
	}
	if len(validation.IsDNS1123Label(s)) > 0 || strings.Trim(s, "0123456789-") == "" {
		return Port{}, fmt.Errorf("%s", want)
	}
	return Port{name: s}, nil
}

// String returns what ParsePort reads.
func (p Port) String() string {
	if p.name != "" {
		return p.name
	}
	return strconv.Itoa(int(p.number))
}

// of returns the number of the port among those of a slice, 0 where it is not among them. A port without a
// number means every port, so it is none.
func (p Port) of(ports []discoveryv1.EndpointPort) uint16 {
	for _, port := range ports {
		if port.Port == nil || *port.Port < 1 || *port.Port > 65535 || port.Protocol != nil && *port.Protocol != "TCP" {
			continue
		}
		if p.name == "" && *port.Port == p.number || p.name != "" && port.Name != nil && *port.Name == p.name {
			return uint16(*port.Port)
		}
	}
	return 0
}
