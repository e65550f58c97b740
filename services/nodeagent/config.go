package nodeagent

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"berth/pkg/flagenv"
	"berth/services/internal/node"
)

// Config is how a node agent runs. DefaultConfig, Flags and Validate belong together.
type Config struct {
	NodeID    string
	ClusterID string
	Listen    string
	Endpoint  string
	Data      string

	OpsListen   string
	AdminListen string

	Transport      string
	SchedulerGRPC  []string
	SchedulerURLs  []string
	SchedulerToken string
	NodeKeys       []string

	Templates    string
	Domain       string
	Labels       map[string]string
	P2PBackend   string
	P2PAddress   string
	ReadOnly     []string
	KeyRetention time.Duration

	Isolation    string
	Bubblewrap   string
	SandboxUID   int
	SandboxGID   int
	MaxOpenFiles uint64
	MaxProcesses uint64

	MaxSandboxes      int
	CapacityCPUMillis int64
	CapacityMemoryMiB int64

	DrainDelay  time.Duration
	StopTimeout time.Duration

	LogLevel  string
	LogFormat string
}

// The values of Config.Transport and Config.Isolation.
const (
	TransportGRPC       = "grpc"
	TransportTwirp      = "twirp"
	IsolationBubblewrap = "bubblewrap"
	IsolationNone       = "none"
)

// nobody is the user without rights on every Linux. Applications in sandboxes of an agent that runs as root are this user.
const nobody = 65534

// DefaultConfig returns the configuration of a node agent that was told nothing. The node's id is the host name.
func DefaultConfig() Config {
	host, _ := os.Hostname() // Validate finds a missing id
	return Config{
		NodeID: strings.ToLower(host), Listen: ":8000", Data: "/var/lib/berth/nodeagent", OpsListen: ":9103", AdminListen: "127.0.0.1:9113",
		Transport: TransportGRPC, KeyRetention: 24 * time.Hour,
		Isolation: IsolationBubblewrap, SandboxUID: nobody, SandboxGID: nobody, MaxOpenFiles: 4096, MaxProcesses: 1024, MaxSandboxes: 100,
		DrainDelay: 0, StopTimeout: 30 * time.Second, LogLevel: "info", LogFormat: "auto",
	}
}

// Flags registers the flags, with what c holds as defaults.
func (c *Config) Flags(fs *pflag.FlagSet) {
	fs.StringVar(&c.NodeID, "node-id", c.NodeID, "id of this node, unique among all nodes of the database")
	fs.StringVar(&c.ClusterID, "cluster-id", c.ClusterID, "name of the cluster this node is in")
	fs.StringVar(&c.Listen, "listen", c.Listen, "address of the node's HTTP API, for gateways")
	fs.StringVar(&c.Endpoint, "endpoint", c.Endpoint, "URL under which gateways reach that API, such as http://10.0.0.7:8000")
	fs.StringVar(&c.Data, "data", c.Data, "folder of sandboxes and of what is remembered of them; one agent at a time")
	fs.StringVar(&c.OpsListen, "ops-listen", c.OpsListen, "address of /metrics, /healthz and /readyz")
	fs.StringVar(&c.AdminListen, "admin-listen", c.AdminListen, "address of pprof and the log level")
	fs.StringVar(&c.Transport, "transport", c.Transport, "how to speak to schedulers: grpc or twirp")
	fs.StringSliceVar(&c.SchedulerGRPC, "scheduler-grpc", c.SchedulerGRPC, "host:port of each scheduler's gRPC")
	fs.StringSliceVar(&c.SchedulerURLs, "scheduler-url", c.SchedulerURLs, "URL of each scheduler's Twirp")
	fs.StringVar(&c.SchedulerToken, "scheduler-token", c.SchedulerToken, "node token, as the schedulers know it")
	fs.StringSliceVar(&c.NodeKeys, "node-key", c.NodeKeys, "key gateways show; two while it is changed")
	fs.StringVar(&c.Templates, "templates", c.Templates, "YAML file of templates beside the built-in echo (also called base), files and shell")
	fs.StringVar(&c.Domain, "domain", c.Domain, "domain told to clients of a create; empty: they use their own")
	fs.StringToStringVar(&c.Labels, "labels", c.Labels, "labels for placement, such as zone=a,disk=ssd")
	fs.StringVar(&c.P2PBackend, "p2p-backend", c.P2PBackend, "name of the peer-to-peer backend this node serves")
	fs.StringVar(&c.P2PAddress, "p2p-address", c.P2PAddress, "its address")
	fs.StringSliceVar(&c.ReadOnly, "show", c.ReadOnly, "folders shown to all sandboxes, read-only, beside the system's")
	fs.DurationVar(&c.KeyRetention, "key-retention", c.KeyRetention, "how long ids of deleted sandboxes are remembered, so that none is made again")
	fs.StringVar(&c.Isolation, "isolation", c.Isolation, "bubblewrap, or none: no isolation at all, for code you trust on a machine without namespaces")
	fs.StringVar(&c.Bubblewrap, "bubblewrap", c.Bubblewrap, "bubblewrap's program; empty: bwrap on PATH")
	fs.IntVar(&c.SandboxUID, "sandbox-uid", c.SandboxUID, "user of the machine that applications are, where the agent is root")
	fs.IntVar(&c.SandboxGID, "sandbox-gid", c.SandboxGID, "its group")
	fs.Uint64Var(&c.MaxOpenFiles, "max-open-files", c.MaxOpenFiles, "open files of each process in a sandbox")
	fs.Uint64Var(&c.MaxProcesses, "max-processes", c.MaxProcesses, "processes and threads of a sandbox")
	fs.IntVar(&c.MaxSandboxes, "max-sandboxes", c.MaxSandboxes, "sandboxes on this node, paused ones too")
	fs.Int64Var(&c.CapacityCPUMillis, "capacity-cpu-millis", c.CapacityCPUMillis, "thousandths of a core that sandboxes may take in all; 0: not limited by this node")
	fs.Int64Var(&c.CapacityMemoryMiB, "capacity-memory-mib", c.CapacityMemoryMiB, "memory that sandboxes may take in all, in MiB; 0: not limited by this node")
	fs.DurationVar(&c.DrainDelay, "drain-delay", c.DrainDelay, "how long to go on serving after /readyz says no")
	fs.DurationVar(&c.StopTimeout, "stop-timeout", c.StopTimeout, "longest time a clean stop may take")
	fs.StringVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
	fs.StringVar(&c.LogFormat, "log-format", c.LogFormat, "auto, console or json")

	flagenv.Variables(fs, "scheduler-url", "BERTH_SCHEDULER_URL")
	flagenv.Variables(fs, "scheduler-token", "BERTH_SCHEDULER_TOKEN")
	flagenv.Variables(fs, "node-key", "BERTH_NODE_KEY")
	flagenv.Variables(fs, "key-retention", "BERTH_KEY_RETENTION")
	flagenv.Variables(fs, "log-level", "BERTH_LOG_LEVEL")
	flagenv.Variables(fs, "log-format", "BERTH_LOG_FORMAT")
}

// least are the smallest limits with which a sandbox can do anything.
const (
	leastOpenFiles = 64
	leastProcesses = 32
	maxLabels      = 64
	maxLabelBytes  = 63
)

// Validate returns every mistake in c at once, each with its flag, its value and what to do.
func (c *Config) Validate() error {
	var errs []error
	bad := func(flag string, value any, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--%s (%s) is %q: "+format,
			append([]any{flag, variable(flag), fmt.Sprint(value)}, args...)...))
	}
	if _, err := node.ParseID(c.NodeID); err != nil {
		bad("node-id", c.NodeID, "%w; give letters, digits, hyphens and dots", err)
	}
	if err := node.CheckTag("cluster id", c.ClusterID); err != nil {
		bad("cluster-id", c.ClusterID, "%w", err)
	}
	for flag, address := range map[string]string{"listen": c.Listen, "ops-listen": c.OpsListen, "admin-listen": c.AdminListen} {
		if err := checkAddress(address, false); err != nil {
			bad(flag, address, "%w; give host:port or :port", err)
		}
	}
	if err := checkURL(c.Endpoint, true); err != nil {
		bad("endpoint", c.Endpoint, "%w; give the URL under which gateways reach this node, such as http://10.0.0.7:8000", err)
	}
	if c.Data == "" {
		bad("data", c.Data, "give a folder")
	}
	if len(c.NodeKeys) == 0 {
		bad("node-key", "", "give the key that gateways show; the gateways' BERTH_NODE_KEY is the same")
	}
	for _, key := range c.NodeKeys {
		if strings.TrimSpace(key) != key || key == "" {
			errs = append(errs, errors.New("--node-key (BERTH_NODE_KEY) has an empty key, or one with blanks around it"))
		}
	}
	if c.Isolation != IsolationBubblewrap && c.Isolation != IsolationNone {
		bad("isolation", c.Isolation, "give %s or %s", IsolationBubblewrap, IsolationNone)
	}
	c.checkScheduler(bad)
	c.checkNumbers(bad)
	if len(c.Labels) > maxLabels {
		bad("labels", len(c.Labels), "at most %d labels", maxLabels)
	}
	for key, value := range c.Labels {
		if key == "" || len(key) > maxLabelBytes || len(value) > maxLabelBytes {
			bad("labels", key+"="+value, "a label has 1 to %d bytes before its = and at most as many after it", maxLabelBytes)
		}
	}
	if (c.P2PBackend == "") != (c.P2PAddress == "") {
		bad("p2p-backend", c.P2PBackend, "--p2p-backend and --p2p-address go together")
	}
	return errors.Join(errs...)
}

func (c *Config) checkScheduler(bad func(flag string, value any, format string, args ...any)) {
	switch c.Transport {
	case TransportGRPC:
		if len(c.SchedulerGRPC) == 0 {
			bad("scheduler-grpc", "", "give host:port of at least one scheduler's gRPC")
		}
		for _, address := range c.SchedulerGRPC {
			if err := checkAddress(address, true); err != nil {
				bad("scheduler-grpc", address, "%w; give host:port", err)
			}
		}
	case TransportTwirp:
		if len(c.SchedulerURLs) == 0 {
			bad("scheduler-url", "", "give the URL of at least one scheduler's Twirp, such as http://127.0.0.1:9091")
		}
		for _, address := range c.SchedulerURLs {
			if err := checkURL(address, false); err != nil {
				bad("scheduler-url", address, "%w", err)
			}
		}
	default:
		bad("transport", c.Transport, "give %s or %s", TransportGRPC, TransportTwirp)
	}
}

func (c *Config) checkNumbers(bad func(flag string, value any, format string, args ...any)) {
	if c.SandboxUID < 1 || c.SandboxGID < 1 {
		bad("sandbox-uid", c.SandboxUID, "user and group of applications cannot be root or negative")
	}
	if c.MaxOpenFiles < leastOpenFiles {
		bad("max-open-files", c.MaxOpenFiles, "give at least %d", leastOpenFiles)
	}
	if c.MaxProcesses < leastProcesses {
		bad("max-processes", c.MaxProcesses, "give at least %d", leastProcesses)
	}
	if c.MaxSandboxes < 1 {
		bad("max-sandboxes", c.MaxSandboxes, "give at least 1")
	}
	if c.CapacityCPUMillis < 0 {
		bad("capacity-cpu-millis", c.CapacityCPUMillis, "give 0 or more")
	}
	if c.CapacityMemoryMiB < 0 || c.CapacityMemoryMiB > 1<<40 {
		bad("capacity-memory-mib", c.CapacityMemoryMiB, "give 0 or more, in MiB")
	}
	if c.KeyRetention < time.Minute {
		bad("key-retention", c.KeyRetention, "give at least a minute")
	}
	if c.DrainDelay < 0 {
		bad("drain-delay", c.DrainDelay, "give 0 or more")
	}
	if c.StopTimeout <= 0 {
		bad("stop-timeout", c.StopTimeout, "give more than 0")
	}
}

// variable names the environment variable of a flag, for messages.
func variable(flag string) string {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	c := DefaultConfig()
	c.Flags(fs)
	return flagenv.Names(fs.Lookup(flag), serviceName)[0]
}

func checkAddress(address string, needHost bool) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return errors.New("it is not host:port")
	}
	if needHost && host == "" {
		return errors.New("it has no host")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || needHost && n == 0 {
		return errors.New("its port is not a number from 1 to 65535")
	}
	return nil
}

func checkURL(text string, bare bool) error {
	if text == "" {
		return errors.New("it is missing")
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return errors.New("it is not an http or https URL with a host")
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return errors.New("it has a user, a query or a fragment")
	}
	if bare && u.Path != "" && u.Path != "/" {
		return errors.New("it has a path")
	}
	return nil
}
