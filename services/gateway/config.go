package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"berth/pkg/flagenv"
	"berth/pkg/twirpkit"
	"berth/services/gateway/internal/auth"
	"berth/services/gateway/internal/httpapi"
	"berth/services/gateway/internal/proxy"
	"berth/services/internal/route"
)

// Config is one gateway replica. Replicas over one database should agree in all but the addresses.
type Config struct {
	Listen      string
	OpsListen   string // "": no health, no metrics
	AdminListen string // "": no profiles; loopback only

	Domains string // comma-separated; "": sandboxes are reached by headers only

	DatabaseURL         string
	DatabaseDirectURL   string // for LISTEN, which passes no pooler; "": DatabaseURL
	SessionsDatabaseURL string // as a login in role berth_sessions; "": DatabaseURL
	Pool, SessionsPool  int

	SchedulerURLs  []string
	SchedulerToken string

	APIKey         string // the bootstrap key; "": the environment's, see Lookup
	NodeKeys       []string
	ClusterSecrets []string

	ConfigFile string // AgentENV's JSON file; "": none

	FirstByteTimeout  time.Duration
	IdleTimeout       time.Duration
	StreamIdleTimeout time.Duration // 0: none
	RequestTimeout    time.Duration // AgentENV's: the first two at once; 0: as they are
	MaxHeaderBytes    int
	MaxTimeout        time.Duration // the longest life a sandbox may be given
	ResponseLimit     int64         // bytes of a create's answer that are searched for ids
	StaleLimit        time.Duration
	OrphanedCreate    string // delete, keep

	TrustedProxies       []string
	CORSOrigins          []string
	UnknownSandboxStatus int    // 502, 404
	ProxyPrefix          string // strip, keep
	Debug                bool
	AccessLog            string // errors, all, off

	Guard route.GuardConfig

	DrainDelay  time.Duration // accepting goes on after "not ready"
	StreamGrace time.Duration // open exchanges, streams and creates get this to end

	LogLevel, LogFormat string

	// Lookup reads the bootstrap key's variables, for which present but empty is a mistake; SecretFile
	// is asked after them. AccessOutput gets the access log.
	Lookup       func(string) (string, bool)
	SecretFile   string
	AccessOutput io.Writer

	fs      *pflag.FlagSet // of Flags; Validate reads the file into it
	checked checked
}

// checked is what Validate made of the texts.
type checked struct {
	domains   proxy.Domains
	trusted   []netip.Prefix
	guard     *route.Guard
	bootstrap *auth.Bootstrap // nil: none was given
	access    httpapi.AccessMode
	ignored   []string // keys of the file that have no effect here
}

// The words of Config.
const (
	prefixStrip  = "strip"
	prefixKeep   = "keep"
	orphanDelete = "delete"
	orphanKeep   = "keep"

	minSecretBytes = 32
	maxSecrets     = 2 // while one is changed
)

// DefaultConfig returns what runs where nothing else is said.
func DefaultConfig() Config {
	limits := proxy.DefaultConfig()
	return Config{
		Listen: ":8080", OpsListen: ":9102", AdminListen: "127.0.0.1:9112", Pool: 16, SessionsPool: 8,
		FirstByteTimeout: limits.FirstByte, IdleTimeout: limits.Idle, StreamIdleTimeout: limits.StreamIdle,
		MaxHeaderBytes: 128 << 10, MaxTimeout: 30 * 24 * time.Hour, ResponseLimit: 4 << 20, StaleLimit: 15 * time.Minute,
		OrphanedCreate: orphanDelete, CORSOrigins: []string{"*"}, UnknownSandboxStatus: 502, ProxyPrefix: prefixStrip,
		AccessLog:  string(httpapi.AccessErrors),
		Guard:      route.GuardConfig{CIDRs: route.DefaultCIDRs, Schemes: route.DefaultSchemes},
		DrainDelay: 5 * time.Second, StreamGrace: 60 * time.Second, LogLevel: "info", LogFormat: "auto",
		// flagenv takes an empty variable for none, and an empty key must stop the start.
		Lookup:     os.LookupEnv, //nolint:forbidigo // the one setting that flagenv cannot read
		SecretFile: auth.SecretFile, AccessOutput: os.Stdout,
	}
}

// Flags registers every setting with its default and the variables that are read for it.
func (c *Config) Flags(fs *pflag.FlagSet) {
	c.fs = fs
	fs.StringVar(&c.Listen, "listen", c.Listen, "address of the API and of all sandboxes: HTTP/1.1, WebSocket, HTTP/2 without TLS")
	flagenv.Variables(fs, "listen", "BERTH_GATEWAY_LISTEN", "GATEWAY_HTTP_LISTEN_ADDR")
	fs.StringVar(&c.OpsListen, "ops-listen", c.OpsListen, "address of /metrics, /healthz and /readyz")
	flagenv.Variables(fs, "ops-listen", "BERTH_GATEWAY_OPS_LISTEN", "GATEWAY_METRICS_LISTEN_ADDR")
	fs.StringVar(&c.AdminListen, "admin-listen", c.AdminListen, "address of profiles and the log level; a loopback one")
	fs.StringVar(&c.Domains, "domains", c.Domains, "domains whose labels are sandboxes, {port}-{sandbox}.{domain}, comma-separated")
	flagenv.Variables(fs, "domains", "BERTH_GATEWAY_DOMAINS", "GATEWAY_SANDBOX_PROXY_DOMAINS")

	fs.StringVar(&c.DatabaseURL, "database-url", c.DatabaseURL, "PostgreSQL, as a login in role berth_gateway: postgres://user:password@host:port/database")
	flagenv.Variables(fs, "database-url", "BERTH_DATABASE_URL")
	fs.StringVar(&c.DatabaseDirectURL, "database-direct-url", c.DatabaseDirectURL, "the same past any pooler, for LISTEN; empty: --database-url")
	flagenv.Variables(fs, "database-direct-url", "BERTH_DATABASE_DIRECT_URL")
	fs.StringVar(&c.SessionsDatabaseURL, "sessions-database-url", c.SessionsDatabaseURL, "the same as a login in role berth_sessions; empty: --database-url")
	fs.IntVar(&c.Pool, "pool", c.Pool, "most database connections for routes")
	fs.IntVar(&c.SessionsPool, "sessions-pool", c.SessionsPool, "most database connections for keys")

	fs.StringSliceVar(&c.SchedulerURLs, "scheduler-url", c.SchedulerURLs, "URL of each scheduler's Twirp")
	flagenv.Variables(fs, "scheduler-url", "BERTH_SCHEDULER_URL")
	fs.StringVar(&c.SchedulerToken, "scheduler-token", c.SchedulerToken, "gateway token, as the schedulers know it")
	flagenv.Variables(fs, "scheduler-token", "BERTH_SCHEDULER_TOKEN")
	fs.StringVar(&c.APIKey, "api-key", c.APIKey, "bootstrap key; rather BERTH_API_KEY, AENV_API_KEY or the file "+auth.SecretFile+", which no process list shows")
	flagenv.Variables(fs, "api-key") // an empty variable is a mistake here, so Validate reads them
	fs.StringSliceVar(&c.NodeKeys, "node-key", c.NodeKeys, "key for nodes, two while it is changed; empty: the bootstrap key")
	flagenv.Variables(fs, "node-key", "BERTH_NODE_KEY")
	fs.StringSliceVar(&c.ClusterSecrets, "cluster-secret", c.ClusterSecrets, "secret of 32 bytes or more that all gateways share, two while it is changed")
	flagenv.Variables(fs, "cluster-secret", "BERTH_CLUSTER_SECRET")

	fs.StringVar(&c.ConfigFile, "config", c.ConfigFile, "AgentENV's JSON file; flags and variables go before it")

	fs.DurationVar(&c.FirstByteTimeout, "first-byte-timeout", c.FirstByteTimeout, "from the end of a request to the first byte of its answer")
	fs.DurationVar(&c.IdleTimeout, "idle-timeout", c.IdleTimeout, "silence within a body, either way")
	fs.DurationVar(&c.StreamIdleTimeout, "stream-idle-timeout", c.StreamIdleTimeout, "silence of a stream or tunnel; 0: not limited")
	fs.DurationVar(&c.RequestTimeout, "request-timeout", c.RequestTimeout, "first-byte and idle timeout at once; 0: as they are")
	flagenv.Variables(fs, "request-timeout", "BERTH_GATEWAY_REQUEST_TIMEOUT", "GATEWAY_REQUEST_TIMEOUT")
	fs.IntVar(&c.MaxHeaderBytes, "max-header-bytes", c.MaxHeaderBytes, "head of a request; more is 431")
	fs.DurationVar(&c.MaxTimeout, "max-timeout", c.MaxTimeout, "longest life a sandbox may be given")
	fs.Int64Var(&c.ResponseLimit, "response-limit", c.ResponseLimit, "bytes of a create's answer that are searched for its id")
	fs.DurationVar(&c.StaleLimit, "stale-limit", c.StaleLimit, "how long known routes are served without PostgreSQL")
	fs.StringVar(&c.OrphanedCreate, "orphaned-create", c.OrphanedCreate, "what becomes of a sandbox whose client left before it was told: delete or keep")

	fs.StringSliceVar(&c.TrustedProxies, "trusted-proxies", c.TrustedProxies, "networks of fronts whose X-Forwarded-* headers are believed")
	fs.StringSliceVar(&c.CORSOrigins, "cors-origins", c.CORSOrigins, "origins whose pages may read the API; * is any")
	fs.IntVar(&c.UnknownSandboxStatus, "unknown-sandbox-status", c.UnknownSandboxStatus, "status of an unknown sandbox on the data plane: 502 as SDKs expect, or AgentENV's 404")
	fs.StringVar(&c.ProxyPrefix, "proxy-prefix", c.ProxyPrefix, "whether applications see /proxy of a path routed by header: strip or keep")
	fs.BoolVar(&c.Debug, "debug", c.Debug, "say in answers which node and route they came by")
	flagenv.Variables(fs, "debug", "BERTH_GATEWAY_DEBUG", "GATEWAY_DEBUG_MODE")
	fs.StringVar(&c.AccessLog, "access-log", c.AccessLog, "data-plane exchanges that are logged: errors, all or off")

	fs.StringSliceVar(&c.Guard.CIDRs, "endpoint-cidrs", c.Guard.CIDRs, "networks in which nodes may be dialled")
	flagenv.Variables(fs, "endpoint-cidrs", "BERTH_ENDPOINT_CIDRS")
	fs.StringSliceVar(&c.Guard.Schemes, "endpoint-schemes", c.Guard.Schemes, "schemes of endpoints: http, https")
	flagenv.Variables(fs, "endpoint-schemes", "BERTH_ENDPOINT_SCHEMES")
	fs.BoolVar(&c.Guard.Loopback, "endpoint-loopback", c.Guard.Loopback, "allow endpoints on this machine's loopback")
	flagenv.Variables(fs, "endpoint-loopback", "BERTH_ENDPOINT_LOOPBACK")

	fs.DurationVar(&c.DrainDelay, "drain-delay", c.DrainDelay, "wait between not ready and the end of listening")
	fs.DurationVar(&c.StreamGrace, "stream-grace", c.StreamGrace, "how long open exchanges may go on after that")
	fs.StringVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
	flagenv.Variables(fs, "log-level", "BERTH_LOG_LEVEL", "LOG_LEVEL")
	fs.StringVar(&c.LogFormat, "log-format", c.LogFormat, "auto, console or json")
	flagenv.Variables(fs, "log-format", "BERTH_LOG_FORMAT", "LOG_FORMAT")
}

// fileKeys are the keys of AgentENV's JSON file with their flags. Those without are known and have no
// effect here: schedulers are asked over Twirp, and their part of the file is theirs.
func fileKeys() map[string]string {
	return map[string]string{
		"log_level": "log-level", "log_format": "log-format",
		"gateway.http_listen_addr": "listen", "gateway.metrics_listen_addr": "ops-listen",
		"gateway.request_timeout": "request-timeout", "gateway.forward_response_size": "response-limit",
		"gateway.sandbox_proxy_domains": "domains", "gateway.debug_mode": "debug",
		"gateway.scheduler_addr": "", "gateway.query_only_scheduler_addr": "", "scheduler": "",
	}
}

// ignoredKeys names the keys of AgentENV's file that look as if they mattered here and do not.
func ignoredKeys(path string) []string {
	text, err := os.ReadFile(path)
	var file struct {
		Gateway map[string]json.RawMessage `json:"gateway"`
	}
	if path == "" || err != nil || json.Unmarshal(text, &file) != nil {
		return nil // there is none, or it was refused
	}
	var found []string
	for _, key := range []string{"scheduler_addr", "query_only_scheduler_addr"} {
		if _, given := file.Gateway[key]; given {
			found = append(found, "gateway."+key)
		}
	}
	return found
}

// mistakes gathers what is wrong, so that all of it is told at once.
type mistakes struct{ errs []error }

func (m *mistakes) add(err error) { m.errs = append(m.errs, err) }

func (m *mistakes) wrong(flag string, value any, want string) {
	m.add(fmt.Errorf("--%s is %q: %s", flag, fmt.Sprint(value), want))
}

// Validate reads the configuration file, if one is named, and checks everything. It returns all mistakes
// at once; each names flag or key, value and what to do, and none shows a secret.
func (c *Config) Validate() error {
	if c.fs != nil && c.ConfigFile != "" {
		if err := flagenv.File(c.fs, c.ConfigFile, fileKeys()); err != nil {
			return err
		}
	}
	c.checked.ignored = ignoredKeys(c.ConfigFile)
	var m mistakes
	c.checkAddresses(&m)
	c.checkDatabases(&m)
	c.checkSecrets(&m)
	c.checkTimes(&m)
	c.checkWords(&m)
	return errors.Join(m.errs...)
}

func (c *Config) checkAddresses(m *mistakes) {
	for _, l := range []struct {
		flag, addr string
		required   bool
	}{{"listen", c.Listen, true}, {"ops-listen", c.OpsListen, false}, {"admin-listen", c.AdminListen, false}} {
		if l.addr == "" && !l.required {
			continue
		}
		host, port, err := net.SplitHostPort(l.addr)
		if _, portErr := strconv.ParseUint(port, 10, 16); err != nil || portErr != nil {
			m.wrong(l.flag, l.addr, "want host:port or :port")
			continue
		}
		if l.flag == "admin-listen" && !loopback(host) {
			m.wrong(l.flag, l.addr, "profiles need no key, so choose a loopback address like 127.0.0.1:9112")
		}
	}
	var err error
	if c.checked.domains, err = proxy.ParseDomains(c.Domains); err != nil {
		m.add(fmt.Errorf("--domains: %w", err))
	}
	if len(c.SchedulerURLs) == 0 {
		m.add(errors.New("no scheduler: set --scheduler-url or BERTH_SCHEDULER_URL to the URL of each scheduler's Twirp, such as http://127.0.0.1:9091"))
	} else if _, err := twirpkit.NewFailover(c.SchedulerURLs, twirpkit.FailoverOptions{}); err != nil {
		m.add(fmt.Errorf("--scheduler-url: %w", err))
	}
	if c.checked.guard, err = route.NewGuard(c.Guard); err != nil {
		m.add(fmt.Errorf("--endpoint-cidrs, --endpoint-schemes: %w", err))
	}
	c.checked.trusted = nil
	for _, text := range c.TrustedProxies {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			m.wrong("trusted-proxies", text, "want a network like 10.0.0.0/8")
			continue
		}
		c.checked.trusted = append(c.checked.trusted, prefix.Masked())
	}
}

// loopback reports whether host is this machine alone; an empty host is every address.
func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.IsLoopback()
}

func (c *Config) checkDatabases(m *mistakes) {
	if c.DatabaseURL == "" {
		m.add(errors.New("no database: set --database-url or BERTH_DATABASE_URL to postgres://user:password@host:port/database"))
	}
	for _, p := range []struct {
		flag  string
		value int
	}{{"pool", c.Pool}, {"sessions-pool", c.SessionsPool}} {
		if p.value < 2 || p.value > 200 {
			m.wrong(p.flag, p.value, "choose a number from 2 to 200")
		}
	}
}

func (c *Config) checkSecrets(m *mistakes) {
	var err error
	switch {
	case c.APIKey != "":
		c.checked.bootstrap, err = auth.NewBootstrap("--api-key", c.APIKey)
	case c.Lookup != nil:
		c.checked.bootstrap, err = auth.FindBootstrap(c.Lookup, c.SecretFile)
	}
	if err != nil {
		m.add(err)
	}
	if len(c.NodeKeys) == 0 && c.checked.bootstrap == nil && err == nil {
		m.add(errors.New("no node key: set --node-key or BERTH_NODE_KEY to the nodes' key, or BERTH_API_KEY, which stands in for it"))
	}
	if len(c.NodeKeys) > maxSecrets {
		m.add(fmt.Errorf("--node-key has %d keys: give one, or two while it is changed", len(c.NodeKeys)))
	}
	for i, key := range c.NodeKeys {
		if key == "" || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
			m.add(fmt.Errorf("--node-key number %d is empty or has a byte that is not printable ASCII: give the key the nodes have", i+1))
		}
	}
	if len(c.ClusterSecrets) == 0 {
		m.add(errors.New("no cluster secret: set --cluster-secret or BERTH_CLUSTER_SECRET to 32 random bytes or more, the same on all gateways"))
	}
	if len(c.ClusterSecrets) > maxSecrets {
		m.add(fmt.Errorf("--cluster-secret has %d secrets: give one, or two while it is changed", len(c.ClusterSecrets)))
	}
	for i, secret := range c.ClusterSecrets {
		if len(secret) < minSecretBytes {
			m.add(fmt.Errorf("--cluster-secret number %d has %d bytes: give %d or more", i+1, len(secret), minSecretBytes))
		}
	}
}

func (c *Config) checkTimes(m *mistakes) {
	for _, d := range []struct {
		flag        string
		value       time.Duration
		least, most time.Duration
		example     string
	}{
		{"first-byte-timeout", c.FirstByteTimeout, time.Second, 24 * time.Hour, "10m"},
		{"idle-timeout", c.IdleTimeout, time.Second, 24 * time.Hour, "10m"},
		{"stream-idle-timeout", c.StreamIdleTimeout, 0, 24 * time.Hour, "0"},
		{"request-timeout", c.RequestTimeout, 0, 24 * time.Hour, "10m"},
		{"max-timeout", c.MaxTimeout, time.Second, 10 * 365 * 24 * time.Hour, "720h"},
		{"stale-limit", c.StaleLimit, 0, 30 * 24 * time.Hour, "15m"},
		{"drain-delay", c.DrainDelay, 0, 10 * time.Minute, "5s"},
		{"stream-grace", c.StreamGrace, 0, 24 * time.Hour, "60s"},
	} {
		if d.value < d.least || d.value > d.most {
			m.wrong(d.flag, d.value, fmt.Sprintf("choose a duration from %s to %s, such as %s", d.least, d.most, d.example))
		}
	}
	if c.MaxHeaderBytes < 8<<10 || c.MaxHeaderBytes > 8<<20 {
		m.wrong("max-header-bytes", c.MaxHeaderBytes, fmt.Sprintf("choose a number from %d to %d", 8<<10, 8<<20))
	}
	if c.ResponseLimit > 1<<30 {
		m.wrong("response-limit", c.ResponseLimit, fmt.Sprintf("choose a number up to %d; 0 is the default", 1<<30))
	}
}

func (c *Config) checkWords(m *mistakes) {
	if c.UnknownSandboxStatus != 502 && c.UnknownSandboxStatus != 404 {
		m.wrong("unknown-sandbox-status", c.UnknownSandboxStatus, "choose 502 or 404")
	}
	for _, w := range []struct {
		flag, value string
		words       []string
	}{
		{"proxy-prefix", c.ProxyPrefix, []string{prefixStrip, prefixKeep}},
		{"orphaned-create", c.OrphanedCreate, []string{orphanDelete, orphanKeep}},
		{"log-level", c.LogLevel, []string{"debug", "info", "warn", "error"}},
		{"log-format", c.LogFormat, []string{"auto", "console", "json"}},
	} {
		if !slices.Contains(w.words, w.value) {
			m.wrong(w.flag, w.value, "choose one of "+strings.Join(w.words, ", "))
		}
	}
	var err error
	if c.checked.access, err = httpapi.ParseAccessMode(c.AccessLog); err != nil {
		m.add(fmt.Errorf("--access-log: %w", err))
	}
}

// directURL is the database past any pooler.
func (c *Config) directURL() string {
	if c.DatabaseDirectURL != "" {
		return c.DatabaseDirectURL
	}
	return c.DatabaseURL
}

func (c *Config) sessionsURL() string {
	if c.SessionsDatabaseURL != "" {
		return c.SessionsDatabaseURL
	}
	return c.DatabaseURL
}

// nodeKeys are those sent to nodes, the first first.
func (c *Config) nodeKeys() []string {
	if len(c.NodeKeys) > 0 {
		return c.NodeKeys
	}
	return []string{c.checked.bootstrap.Key()}
}

// limits are those on silence. AgentENV's one limit stands for two of ours.
func (c *Config) limits() proxy.Limits {
	l := proxy.Limits{FirstByte: c.FirstByteTimeout, Idle: c.IdleTimeout, StreamIdle: c.StreamIdleTimeout}
	if c.RequestTimeout > 0 {
		l.FirstByte, l.Idle = c.RequestTimeout, c.RequestTimeout
	}
	return l
}
