package scheduler

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"

	"berth/pkg/flagenv"
	"berth/pkg/lifecycle"
	"berth/pkg/telemetry"
	"berth/services/internal/node"
	"berth/services/scheduler/internal/discovery"
	"berth/services/scheduler/internal/nodes"
)

// The modes: where nodes come from beside the static list.
const (
	discoveryStatic     = "static"
	discoveryKubernetes = "kubernetes"
	discoveryRegister   = "register" // --register by another name
)

const (
	keyNodes      = "scheduler.nodes"
	keyKubernetes = "scheduler.discovery.kubernetes."

	flagNodes      = "nodes"
	flagKubernetes = "discovery-kubernetes-"
)

// defaultStatic is AgentENV's own default.
const defaultStatic = `[{"id": "local-node", "endpoint": "http://127.0.0.1:8000"}]`

// sourceFlags registers the settings of discovery.
func (c *Config) sourceFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.DiscoveryMode, "discovery-mode", c.DiscoveryMode, "where nodes come from: static, kubernetes or register")
	fs.BoolVar(&c.Register, "register", c.Register, "let a heartbeat with a node token make its node known, in any mode")
	fs.StringVar(&c.Nodes, flagNodes, c.Nodes, `static nodes, as JSON: [{"id": "a", "endpoint": "http://10.0.0.1:8000"}]`)
	for _, k := range kubernetesTexts(&c.Kubernetes) {
		fs.StringVar(k.to, k.flag(), *k.to, k.what)
	}
	fs.BoolVar(&c.Kubernetes.PreferIPv6, flagKubernetes+"prefer-ipv6", c.Kubernetes.PreferIPv6, "reach a node of two families by IPv6")
	fs.StringVar(&c.Kubernetes.Kubeconfig, flagKubernetes+"kubeconfig", c.Kubernetes.Kubeconfig, "file that says how to reach the API server from outside the cluster, for development")
	flagenv.Variables(fs, flagKubernetes+"kubeconfig", flagenv.Name("scheduler", flagKubernetes+"kubeconfig"), "KUBECONFIG")
}

// kubernetesText is one text of discovery in Kubernetes: its name in AgentENV's file and where it goes.
type kubernetesText struct {
	name string
	to   *string
	what string
}

func (k kubernetesText) flag() string { return kubernetesFlag(k.name) }

func kubernetesFlag(name string) string { return flagKubernetes + strings.ReplaceAll(name, "_", "-") }

func kubernetesTexts(s *discovery.Settings) []kubernetesText {
	return []kubernetesText{
		{"namespace", &s.Namespace, "namespace of the Service that has the nodes"},
		{"service_name", &s.ServiceName, "Service whose EndpointSlices are the nodes"},
		{"port", &s.Port, "port of the nodes: its number, or its name in the Service"},
		{"scheme", &s.Scheme, "scheme of the nodes' endpoints: http or https"},
		{"ignore_pod_selector", &s.IgnorePodSelector, "label selector of Pods that are no nodes"},
		{"no_schedule_pod_selector", &s.NoSchedulePodSelector, "label selector of Pods that take no creates"},
	}
}

// sourceKeys adds the keys of discovery in AgentENV's file.
func (c *Config) sourceKeys(keys map[string]string) {
	keys[keyNodes] = flagNodes
	keys["scheduler.discovery.mode"] = "discovery-mode"
	for _, k := range kubernetesTexts(&c.Kubernetes) {
		keys[keyKubernetes+k.name] = k.flag()
	}
	keys[keyKubernetes+"prefer_ipv6"] = flagKubernetes + "prefer-ipv6"
}

// checkSources checks the settings of discovery. The guard is made already.
func (c *Config) checkSources() error {
	var errs []error
	switch c.DiscoveryMode {
	case discoveryStatic:
	case discoveryRegister:
		c.Register = true
	case discoveryKubernetes:
		var mistakes []*discovery.Mistake
		c.checked.kubernetes, mistakes = discovery.Parse(c.Kubernetes)
		for _, m := range mistakes {
			errs = append(errs, fmt.Errorf("--%s (%s%s) is %q: %s", kubernetesFlag(m.Setting), keyKubernetes, m.Setting, m.Value, m.Want))
		}
	default:
		errs = append(errs, fmt.Errorf("--discovery-mode is %q: choose static, kubernetes or register", c.DiscoveryMode))
	}
	var err error
	if c.checked.static, err = c.staticNodes(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// staticNodes returns the static list: what is given; else none where nodes come from elsewhere and no
// file says otherwise; else AgentENV's default.
func (c *Config) staticNodes() ([]nodes.StaticNode, error) {
	list, from := c.Nodes, "--"+flagNodes
	if c.nodesFromFile() {
		from = c.ConfigFile + ": " + keyNodes
	}
	if list == "" {
		if c.DiscoveryMode != discoveryStatic || c.Register && c.ConfigFile == "" {
			return nil, nil
		}
		list = defaultStatic
	}
	var given []struct {
		ID       string `json:"id"`
		Endpoint string `json:"endpoint"`
	}
	decoder := json.NewDecoder(strings.NewReader(list))
	decoder.DisallowUnknownFields()
	const want = `want a JSON list like [{"id": "a", "endpoint": "http://10.0.0.1:8000"}]`
	if err := decoder.Decode(&given); err != nil {
		return nil, fmt.Errorf("%s is %q: %s: %w", from, list, want, err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s is %q: %s, and something follows it", from, list, want)
	}
	if len(given) == 0 {
		return nil, fmt.Errorf("%s is empty: %s, or leave it out and choose another --discovery-mode", from, want)
	}
	var errs []error
	seen := map[node.ID]bool{}
	static := make([]nodes.StaticNode, 0, len(given))
	for i, g := range given {
		id, err := node.ParseID(g.ID)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s, entry %d: id %q: %w", from, i+1, g.ID, err))
			continue
		}
		endpoint, _, err := c.checked.guard.Form(g.Endpoint)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s, entry %d: endpoint %q: want http://host:port: %w", from, i+1, g.Endpoint, err))
			continue
		}
		if seen[id] {
			errs = append(errs, fmt.Errorf("%s names %q twice: keep one", from, id))
		}
		seen[id] = true
		static = append(static, nodes.StaticNode{ID: id, Endpoint: endpoint})
	}
	return static, errors.Join(errs...)
}

// nodesFromFile reports whether the static list is the file's.
func (c *Config) nodesFromFile() bool {
	return c.ConfigFile != "" && c.fs != nil && flagenv.FromFile(c.fs, flagNodes)
}

// reloads reports whether a changed file can change the static list: neither flag nor variable does.
func (c *Config) reloads() bool {
	return c.ConfigFile != "" && c.fs != nil && (c.Nodes == "" || c.nodesFromFile())
}

// errNoNodes is a file that had static nodes and names none any more: more likely a slip than the wish
// to have none.
var errNoNodes = errors.New(keyNodes + " is missing: name the static nodes, or start again without them")

// reload reads the file again and returns its static list. All of the file is checked, as at a start.
func (c *Config) reload() ([]nodes.StaticNode, error) {
	again := *c
	fs := pflag.NewFlagSet("again", pflag.ContinueOnError)
	again.Flags(fs)
	c.fs.VisitAll(func(f *pflag.Flag) {
		if own := fs.Lookup(f.Name); own != nil {
			own.Changed = f.Changed && !flagenv.FromFile(c.fs, f.Name)
		}
	})
	again.Nodes = ""
	if err := again.Validate(); err != nil {
		return nil, err
	}
	if again.Nodes == "" && c.nodesFromFile() {
		return nil, fmt.Errorf("%s: %w", c.ConfigFile, errNoNodes)
	}
	return again.checked.static, nil
}

// sources returns the parts that follow sources of nodes which may change.
func sources(cfg Config, known *nodes.Nodes, tel *telemetry.Telemetry) []lifecycle.Part {
	metrics := discovery.NewMetrics(tel.Registry, len(cfg.checked.static))
	var parts []lifecycle.Part
	if cfg.reloads() {
		file := discovery.NewFile(cfg.ConfigFile, discovery.Reloading{
			Applied: cfg.checked.static, Load: cfg.reload, Apply: known.ApplyStatic,
		}, tel.Log, metrics)
		parts = append(parts, lifecycle.Loop("follow the configuration file", file.Run))
	}
	if cfg.DiscoveryMode == discoveryKubernetes {
		kubernetes := discovery.NewKubernetes(cfg.checked.kubernetes, known, tel.Log, metrics)
		parts = append(parts, lifecycle.Loop("follow Kubernetes", kubernetes.Run))
	}
	return parts
}
