package scheduler

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"berth/pkg/flagenv"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/api"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/discovery"
	"berth/services/scheduler/internal/nodes"
	"berth/services/scheduler/internal/p2p"
	"berth/services/scheduler/internal/placement"
)

// Config is one scheduler replica. Replicas over one database should agree in all but the addresses.
type Config struct {
	DatabaseURL string
	Pool        int // most database connections, heartbeats' own apart

	GRPCListen  string
	TwirpListen string
	OpsListen   string // "": no health, no metrics
	AdminListen string // "": no profiles

	ConfigFile    string // AgentENV's JSON file; "": none
	DiscoveryMode string // static, kubernetes or register
	Register      bool   // a heartbeat with a node token makes a node known
	Nodes         string // JSON list of id and endpoint; "": the default of the mode
	Kubernetes    discovery.Settings

	Strategy   string
	SampleSize int
	Weights    placement.Weights
	Limits     placement.Limits
	PlaceBatch int

	ReportTTL          time.Duration
	ReservationTTL     time.Duration
	HeartbeatEvery     time.Duration
	HeartbeatBatch     int
	BindingGrace       time.Duration
	TombstoneGrace     time.Duration
	TombstoneRetention time.Duration
	LostGrace          time.Duration
	ParkedTTL          time.Duration
	FullReconcile      time.Duration
	RegisteredTTL      time.Duration
	KeyRetention       time.Duration
	EventRetention     time.Duration
	DrainDelay         time.Duration // from "not ready" to the end of listening

	ArtifactStoreCapacity   int           // most keys of artifacts
	ArtifactLookupNodeLimit int           // most holders in one answer; below 1: all
	ArtifactTouch           time.Duration // a key's recency is written at most this often

	DefaultCPUMillis int64
	DefaultMemoryMB  int64

	Tokens api.TokenConfig
	Guard  route.GuardConfig

	Query QueryOnly

	TLSCert, TLSKey, TLSClientCA string

	LogLevel, LogFormat string

	fs      *pflag.FlagSet // of Flags; Validate reads the file into it
	checked checked
}

// checked is what Validate made of the texts.
type checked struct {
	strategy   placement.Strategy
	static     []nodes.StaticNode // nil: no static list
	kubernetes discovery.Config   // of that mode
	guard      *route.Guard
	tls        *tls.Config // nil: no TLS
}

// DefaultConfig returns what runs where nothing else is said.
func DefaultConfig() Config {
	place, bind, members, stores := placement.DefaultConfig(), bindings.DefaultConfig(), nodes.DefaultConfig(), p2p.DefaultConfig()
	return Config{
		Pool: 16, GRPCListen: ":9090", TwirpListen: ":9091", OpsListen: ":9101", AdminListen: "127.0.0.1:9111",
		DiscoveryMode: discoveryStatic, Kubernetes: discovery.Settings{Scheme: "http"},
		Strategy: string(place.Strategy), SampleSize: place.Draws, Weights: place.Weights, PlaceBatch: place.Batch,
		ReportTTL: members.LeaseTTL, ReservationTTL: place.ReservationTTL,
		HeartbeatEvery: members.HeartbeatEvery, HeartbeatBatch: members.Batch,
		BindingGrace: bind.Grace, TombstoneGrace: bind.TombstoneGrace, TombstoneRetention: bind.TombstoneRetention,
		LostGrace: bind.LostGrace, ParkedTTL: bind.ParkedTTL,
		FullReconcile: members.FullReconcile, RegisteredTTL: members.RegisteredTTL,
		KeyRetention: 24 * time.Hour, EventRetention: bind.EventRetention, DrainDelay: time.Second,
		ArtifactStoreCapacity: stores.Capacity, ArtifactLookupNodeLimit: stores.LookupLimit, ArtifactTouch: stores.Touch,
		DefaultCPUMillis: 2000, DefaultMemoryMB: 512, Query: QueryOnly{MaxStaleness: defaultMaxStaleness},
		Guard:    route.GuardConfig{CIDRs: route.DefaultCIDRs, Schemes: route.DefaultSchemes},
		LogLevel: "info", LogFormat: "auto",
	}
}

// Flags registers every setting with its default and the variables that are read for it.
func (c *Config) Flags(fs *pflag.FlagSet) {
	c.fs = fs
	fs.StringVar(&c.DatabaseURL, "database-url", c.DatabaseURL, "PostgreSQL, as a login in role berth_scheduler: postgres://user:password@host:port/database")
	flagenv.Variables(fs, "database-url", "BERTH_DATABASE_URL")
	fs.IntVar(&c.Pool, "pool", c.Pool, "most database connections")
	fs.StringVar(&c.GRPCListen, "grpc-listen", c.GRPCListen, "address of scheduler.v1 over gRPC")
	flagenv.Variables(fs, "grpc-listen", "BERTH_SCHEDULER_GRPC_LISTEN", "SCHEDULER_GRPC_LISTEN_ADDR")
	fs.StringVar(&c.TwirpListen, "twirp-listen", c.TwirpListen, "address of scheduler.v1 and admin.v1 over Twirp")
	fs.StringVar(&c.OpsListen, "ops-listen", c.OpsListen, "address of /metrics, /healthz and /readyz")
	flagenv.Variables(fs, "ops-listen", "BERTH_SCHEDULER_OPS_LISTEN", "SCHEDULER_METRICS_LISTEN_ADDR")
	fs.StringVar(&c.AdminListen, "admin-listen", c.AdminListen, "address of profiles and the log level")

	fs.StringVar(&c.ConfigFile, "config", c.ConfigFile, "AgentENV's JSON file; flags and variables go before it")
	c.sourceFlags(fs)
	c.queryFlags(fs)

	fs.StringVar(&c.Strategy, "strategy", c.Strategy, "how nodes are chosen: best_of_k, round_robin or random")
	flagenv.Variables(fs, "strategy", "BERTH_SCHEDULER_STRATEGY", "SCHEDULER_STRATEGY")
	fs.IntVar(&c.SampleSize, "sample-size", c.SampleSize, "nodes that best_of_k compares")
	fs.IntVar(&c.PlaceBatch, "place-batch", c.PlaceBatch, "most creates placed in one transaction")
	for _, w := range weights(&c.Weights) {
		fs.Float64Var(w.to, w.flag, *w.to, w.what)
	}
	for _, l := range limits(&c.Limits) {
		fs.Var(optional{l.to}, l.flag(), "limit of a node, this create and all holds included; empty: off")
		flagenv.Nullable(fs, l.flag())
	}

	fs.DurationVar(&c.ReportTTL, "report-ttl", c.ReportTTL, "lease of a heartbeat")
	fs.DurationVar(&c.ReservationTTL, "reservation-ttl", c.ReservationTTL, "how long room is held for a create that names no time")
	fs.DurationVar(&c.HeartbeatEvery, "heartbeat-every", c.HeartbeatEvery, "period asked of Berth nodes")
	fs.IntVar(&c.HeartbeatBatch, "heartbeat-batch", c.HeartbeatBatch, "most heartbeats renewed in one statement")
	fs.DurationVar(&c.BindingGrace, "binding-grace", c.BindingGrace, "age below which a roster cannot end a binding")
	fs.DurationVar(&c.TombstoneGrace, "tombstone-grace", c.TombstoneGrace, "an ended sandbox is not adopted again before this")
	fs.DurationVar(&c.TombstoneRetention, "tombstone-retention", c.TombstoneRetention, "how long ended bindings are kept")
	fs.DurationVar(&c.LostGrace, "lost-grace", c.LostGrace, "bindings of an absent, silent node are parked after this")
	fs.DurationVar(&c.ParkedTTL, "parked-ttl", c.ParkedTTL, "parked bindings end after this")
	fs.DurationVar(&c.FullReconcile, "full-reconcile", c.FullReconcile, "a roster is compared in full after this")
	fs.DurationVar(&c.RegisteredTTL, "registered-ttl", c.RegisteredTTL, "a registered node is absent this long after its lease ended")
	fs.DurationVar(&c.KeyRetention, "key-retention", c.KeyRetention, "how long placements and their request ids are kept")
	flagenv.Variables(fs, "key-retention", "BERTH_KEY_RETENTION")
	fs.DurationVar(&c.EventRetention, "event-retention", c.EventRetention, "how long events of sandboxes and nodes are kept; whole days go")
	fs.DurationVar(&c.DrainDelay, "drain-delay", c.DrainDelay, "wait between not ready and the end of listening")

	fs.IntVar(&c.ArtifactStoreCapacity, "artifact-store-capacity", c.ArtifactStoreCapacity, "most keys in the index of artifacts; above it the least recently used go")
	flagenv.Variables(fs, "artifact-store-capacity", "BERTH_SCHEDULER_ARTIFACT_STORE_CAPACITY", "SCHEDULER_ARTIFACT_STORE_CAPACITY")
	fs.IntVar(&c.ArtifactLookupNodeLimit, "artifact-lookup-node-limit", c.ArtifactLookupNodeLimit, "most holders of an artifact in one answer; 0 or less: all")
	flagenv.Variables(fs, "artifact-lookup-node-limit", "BERTH_SCHEDULER_ARTIFACT_LOOKUP_NODE_LIMIT", "SCHEDULER_ARTIFACT_LOOKUP_NODE_LIMIT")
	fs.DurationVar(&c.ArtifactTouch, "artifact-touch", c.ArtifactTouch, "the recency of an artifact is written at most this often; 0: with each use")

	fs.Int64Var(&c.DefaultCPUMillis, "default-cpu-millis", c.DefaultCPUMillis, "CPU of a create that names none, in thousandths of a core")
	fs.Int64Var(&c.DefaultMemoryMB, "default-memory-mb", c.DefaultMemoryMB, "memory of a create that names none, in MiB")

	for _, of := range []struct {
		role api.Role
		to   *[]string
	}{
		{api.Node, &c.Tokens.Node},
		{api.Gateway, &c.Tokens.Gateway},
		{api.Dispatcher, &c.Tokens.Dispatcher},
		{api.Operator, &c.Tokens.Operator},
	} {
		fs.StringSliceVar(of.to, string(of.role)+"-tokens", *of.to,
			"tokens of role "+string(of.role)+", several for rotation; a list stays out of the process list as a variable")
	}
	fs.BoolVar(&c.Tokens.Require, "require-tokens", c.Tokens.Require, "refuse every call without a token")

	fs.StringSliceVar(&c.Guard.CIDRs, "endpoint-cidrs", c.Guard.CIDRs, "networks in which nodes may have their endpoints")
	flagenv.Variables(fs, "endpoint-cidrs", "BERTH_ENDPOINT_CIDRS")
	fs.StringSliceVar(&c.Guard.Schemes, "endpoint-schemes", c.Guard.Schemes, "schemes of endpoints: http, https")
	flagenv.Variables(fs, "endpoint-schemes", "BERTH_ENDPOINT_SCHEMES")
	fs.BoolVar(&c.Guard.Loopback, "endpoint-loopback", c.Guard.Loopback, "allow endpoints on this machine's loopback")
	flagenv.Variables(fs, "endpoint-loopback", "BERTH_ENDPOINT_LOOPBACK")

	fs.StringVar(&c.TLSCert, "tls-cert", c.TLSCert, "PEM file with the certificate of both listeners; empty: no TLS")
	fs.StringVar(&c.TLSKey, "tls-key", c.TLSKey, "PEM file with its key")
	fs.StringVar(&c.TLSClientCA, "tls-client-ca", c.TLSClientCA, "PEM file with the authorities of callers; set, it makes TLS mutual")

	fs.StringVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
	flagenv.Variables(fs, "log-level", "BERTH_LOG_LEVEL", "LOG_LEVEL")
	fs.StringVar(&c.LogFormat, "log-format", c.LogFormat, "auto, console or json")
	flagenv.Variables(fs, "log-format", "BERTH_LOG_FORMAT", "LOG_FORMAT")
}

// mostWeight keeps scores finite: no term of a score is above 1 by much.
const mostWeight = 1000

// weightFlag is one weight of best_of_k's score.
type weightFlag struct {
	flag string
	to   *float64
	what string
}

func weights(w *placement.Weights) []weightFlag {
	return []weightFlag{
		{"weight-r-cpu", &w.ResourceCPU, "vCPUs promised for each one there is, at which a node counts as full"},
		{"weight-r-mem", &w.ResourceMemory, "memory promised, in shares of what there is, at which a node counts as full"},
		{"weight-cpu-used", &w.CPUUsed, "weight of measured CPU"},
		{"weight-mem-used", &w.MemoryUsed, "weight of measured memory"},
		{"weight-starting", &w.Starting, "weight of sandboxes that start"},
		{"weight-spread", &w.Spread, "weight of sandboxes with the same spread key"},
		{"weight-artifact", &w.Artifact, "what a node that holds the artifact is better by"},
		{"weight-prefer", &w.Prefer, "what a preferred node is better by"},
	}
}

// limit is one limit of a node: its name in AgentENV's file and where it goes.
type limit struct {
	name string
	to   **uint64
}

func (l limit) flag() string { return strings.ReplaceAll(l.name, "_", "-") }

func limits(l *placement.Limits) []limit {
	return []limit{
		{string(placement.MaxSandboxCount), &l.SandboxCount},
		{string(placement.MaxSandboxStartingCount), &l.SandboxStartingCount},
		{string(placement.MaxCPUUsedPercent), &l.CPUUsedPercent},
		{string(placement.MaxMemoryUsedPercent), &l.MemoryUsedPercent},
		{string(placement.MaxCPUAllocatedPercent), &l.CPUAllocatedPercent},
		{string(placement.MaxMemoryAllocatedPercent), &l.MemoryAllocatedPercent},
		{string(placement.MaxSandboxCountIncludingPaused), &l.SandboxCountIncludingPaused},
		{string(placement.MaxAllocatedCPU), &l.AllocatedCPUIncludingPaused},
		{string(placement.MaxAllocatedMemory), &l.AllocatedBytesIncludingPaused},
	}
}

// optional is a flag of a number that may be absent.
type optional struct{ to **uint64 }

// String returns the number, and "" where there is none.
func (o optional) String() string {
	if o.to == nil || *o.to == nil {
		return ""
	}
	return strconv.FormatUint(**o.to, 10)
}

// Set takes a number, or "" for none.
func (o optional) Set(s string) error {
	if s == "" {
		*o.to = nil
		return nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return errors.New("a whole number from 0 is wanted")
	}
	*o.to = &n
	return nil
}

// Type names what is wanted.
func (optional) Type() string { return "uint64" }

// fileKeys are the keys of AgentENV's JSON file with their flags. Those without are known and have no
// effect here: bindings do not expire, and there is no Redis.
func (c *Config) fileKeys() map[string]string {
	keys := map[string]string{
		"log_level": "log-level", "log_format": "log-format",
		"scheduler.strategy": "strategy", "scheduler.report_ttl": "report-ttl",
		"scheduler.grpc_listen_addr": "grpc-listen", "scheduler.metrics_listen_addr": "ops-listen",
		"scheduler.binding_ttl": "", "scheduler.redis_addr": "",
		"scheduler.artifact_store_capacity":    "artifact-store-capacity",
		"scheduler.artifact_lookup_node_limit": "artifact-lookup-node-limit",
		"gateway":                              "", // one file may be for both
	}
	c.sourceKeys(keys)
	for _, l := range limits(&c.Limits) {
		keys["scheduler.node_resource_limit."+l.name] = l.flag()
	}
	return keys
}

// Validate reads the configuration file, if one is named, and checks everything. It returns all
// mistakes at once; each names flag or key, value and what to do.
func (c *Config) Validate() error {
	if c.fs != nil && c.ConfigFile != "" {
		if err := flagenv.File(c.fs, c.ConfigFile, c.fileKeys()); err != nil {
			return err
		}
	}
	var errs []error
	wrong := func(flag string, value any, want string) {
		errs = append(errs, fmt.Errorf("--%s is %q: %s", flag, fmt.Sprint(value), want))
	}
	if c.DatabaseURL == "" {
		errs = append(errs, errors.New("no database: set --database-url or BERTH_DATABASE_URL to postgres://user:password@host:port/database"))
	}
	for _, n := range []struct {
		flag  string
		value int64
		most  int64
	}{
		{"pool", int64(c.Pool), 200},
		{"sample-size", int64(c.SampleSize), 100},
		{"place-batch", int64(c.PlaceBatch), 1000},
		{"heartbeat-batch", int64(c.HeartbeatBatch), 1000},
		{"artifact-store-capacity", int64(c.ArtifactStoreCapacity), 1_000_000_000},
		{"default-cpu-millis", c.DefaultCPUMillis, 1_000_000_000},
		{"default-memory-mb", c.DefaultMemoryMB, 1 << 30},
	} {
		if n.value < 1 || n.value > n.most {
			wrong(n.flag, n.value, fmt.Sprintf("choose a number from 1 to %d", n.most))
		}
	}
	for _, d := range []struct {
		flag      string
		value     time.Duration
		least     time.Duration
		most      time.Duration
		suggested string
	}{
		{"report-ttl", c.ReportTTL, time.Second, time.Hour, "30s"},
		{"reservation-ttl", c.ReservationTTL, time.Second, 15 * time.Minute, "90s"},
		{"heartbeat-every", c.HeartbeatEvery, 100 * time.Millisecond, 10 * time.Minute, "5s"},
		{"binding-grace", c.BindingGrace, 0, time.Hour, "15s"},
		{"tombstone-grace", c.TombstoneGrace, 0, time.Hour, "30s"},
		{"tombstone-retention", c.TombstoneRetention, time.Second, 30 * 24 * time.Hour, "10m"},
		{"lost-grace", c.LostGrace, time.Second, 24 * time.Hour, "5m"},
		{"parked-ttl", c.ParkedTTL, time.Second, 30 * 24 * time.Hour, "15m"},
		{"full-reconcile", c.FullReconcile, time.Second, time.Hour, "60s"},
		{"registered-ttl", c.RegisteredTTL, time.Second, 30 * 24 * time.Hour, "1h"},
		{"artifact-touch", c.ArtifactTouch, 0, 24 * time.Hour, "1m"},
		{"key-retention", c.KeyRetention, time.Minute, 365 * 24 * time.Hour, "24h"},
		{"event-retention", c.EventRetention, 24 * time.Hour, 10 * 365 * 24 * time.Hour, "168h"},
		{"drain-delay", c.DrainDelay, 0, 10 * time.Minute, "1s"},
	} {
		if d.value < d.least || d.value > d.most {
			wrong(d.flag, d.value, fmt.Sprintf("choose a duration from %s to %s, such as %s", d.least, d.most, d.suggested))
		}
	}
	for _, w := range weights(&c.Weights) {
		if *w.to >= 0 && *w.to <= mostWeight { // nor is NaN
			continue
		}
		wrong(w.flag, *w.to, fmt.Sprintf("choose a number from 0 to %d", mostWeight))
	}
	for _, l := range []struct {
		flag, addr string
		required   bool
	}{
		{"grpc-listen", c.GRPCListen, true},
		{"twirp-listen", c.TwirpListen, true},
		{"ops-listen", c.OpsListen, false},
		{"admin-listen", c.AdminListen, false},
	} {
		if l.addr == "" && !l.required {
			continue
		}
		if err := checkAddress(l.addr); err != nil {
			wrong(l.flag, l.addr, "want host:port or :port")
		}
	}
	var err error
	if err := c.checkQuery(); err != nil {
		errs = append(errs, err)
	}
	if c.checked.strategy, err = placement.ParseStrategy(c.Strategy); err != nil && !c.Query.On {
		errs = append(errs, fmt.Errorf("--strategy: %w", err))
	}
	if t := c.Tokens; t.Require && len(slices.Concat(t.Node, t.Gateway, t.Dispatcher, t.Operator)) == 0 {
		errs = append(errs, errors.New("--require-tokens is set and no token is: every call would be refused; set --node-tokens, --gateway-tokens and --operator-tokens, or leave it out"))
	}
	if c.checked.guard, err = route.NewGuard(c.Guard); err != nil {
		errs = append(errs, fmt.Errorf("--endpoint-cidrs or --endpoint-schemes: %w", err))
	} else if err := c.checkSources(); err != nil && !c.Query.On {
		errs = append(errs, err)
	}
	if c.checked.tls, err = c.tlsConfig(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func checkAddress(addr string) error {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	_, err = strconv.ParseUint(port, 10, 16)
	return err
}

func (c *Config) tlsConfig() (*tls.Config, error) {
	if c.TLSCert == "" && c.TLSKey == "" && c.TLSClientCA == "" {
		return nil, nil
	}
	if c.TLSCert == "" || c.TLSKey == "" {
		return nil, errors.New("TLS needs both --tls-cert and --tls-key")
	}
	pair, err := tls.LoadX509KeyPair(c.TLSCert, c.TLSKey)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert %q and --tls-key %q: %w; give readable PEM files that belong together", c.TLSCert, c.TLSKey, err)
	}
	out := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	if c.TLSClientCA == "" {
		return out, nil
	}
	pem, err := os.ReadFile(c.TLSClientCA)
	if err != nil {
		return nil, fmt.Errorf("--tls-client-ca: %w; give a readable PEM file", err)
	}
	out.ClientCAs = x509.NewCertPool()
	if !out.ClientCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--tls-client-ca %q has no certificate in it: give a PEM file", c.TLSClientCA)
	}
	out.ClientAuth = tls.RequireAndVerifyClientCert
	return out, nil
}

// defaultSize is what a create takes that names nothing.
func (c *Config) defaultSize() sandbox.Size {
	return sandbox.Size{CPUMillis: c.DefaultCPUMillis, MemoryBytes: c.DefaultMemoryMB << 20}
}
