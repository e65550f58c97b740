package httpapi

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/services/gateway/internal/proxy"
)

// AccessMode says which exchanges of the data plane are logged; the control plane's always are.
type AccessMode string

// The modes.
const (
	AccessErrors AccessMode = "errors" // those the gateway itself answered with an error
	AccessAll    AccessMode = "all"
	AccessOff    AccessMode = "off"
)

// ParseAccessMode returns s as a mode, or an error that names what is wanted.
func ParseAccessMode(s string) (AccessMode, error) {
	switch m := AccessMode(s); m {
	case AccessErrors, AccessAll, AccessOff:
		return m, nil
	}
	return "", fmt.Errorf("access log %q: errors, all or off is wanted", s)
}

// queued is how many lines wait for the writer; more are lost, and counted.
const queued = 4096

// AccessLog writes one JSON line for each exchange. One goroutine writes; who logs never waits.
type AccessLog struct {
	mode  AccessMode
	out   io.Writer
	lines chan accessLine
	lost  prometheus.Counter
}

// NewAccessLog returns a log that writes to out while Run runs.
func NewAccessLog(mode AccessMode, out io.Writer, reg prometheus.Registerer) *AccessLog {
	l := &AccessLog{mode: mode, out: out, lines: make(chan accessLine, queued), lost: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_gateway_log_lines_lost_total", Help: "Access log lines that found the queue full or could not be written.",
	})}
	reg.MustRegister(l.lost)
	return l
}

// Run writes lines until ctx ends, and then those that wait.
func (l *AccessLog) Run(ctx context.Context) error {
	for {
		select {
		case line := <-l.lines:
			l.write(line)
		case <-ctx.Done():
			for {
				select {
				case line := <-l.lines:
					l.write(line)
				default:
					return nil
				}
			}
		}
	}
}

func (l *AccessLog) write(line accessLine) {
	text, err := json.Marshal(line)
	if err == nil {
		_, err = l.out.Write(append(text, '\n'))
	}
	if err != nil {
		l.lost.Inc()
	}
}

// note logs x if its plane and outcome are wanted.
func (l *AccessLog) note(x *exchange, r *http.Request, took time.Duration, trusted []netip.Prefix) {
	code := x.Header().Get("Berth-Error")
	if x.target.Plane == proxy.Data {
		if l.mode == AccessOff || l.mode == AccessErrors && code == "" {
			return
		}
	}
	line := accessLine{
		Time: x.begun, Request: proxy.RequestID(r), Trace: x.trace, Plane: x.target.Plane.String(), Source: string(x.target.Source),
		Method: r.Method, Host: r.Host, Path: x.target.Path, Status: x.status, Error: code,
		Sandbox: string(x.target.Sandbox), Port: x.target.Port, Node: string(x.route.Route.Node), Revision: int64(x.route.Revision),
		Tenant: x.caller.Tenant, Key: x.caller.Key, Client: remote(r, trusted), Proto: r.Proto, Upgrade: x.upgraded,
		In: x.in.Load(), Out: x.out, TTFB: x.firstByte.Seconds(), Took: took.Seconds(), Attempts: x.attempts, Stale: x.route.Stale,
	}
	if x.status == 0 {
		line.Status = statusClientLeft
	}
	if x.target.Source == "" {
		line.Source = string(proxy.SourceUnknown)
	}
	l.add(line)
}

// statusClientLeft is logged where nothing was answered, for nobody was there.
const statusClientLeft = 499

// splitList splits a header's list and trims its items.
func splitList(text string) []string {
	items := strings.Split(text, ",")
	for i, item := range items {
		items[i] = strings.TrimSpace(item)
	}
	return items
}

func (l *AccessLog) add(line accessLine) {
	select {
	case l.lines <- line:
	default:
		l.lost.Inc()
	}
}

// accessLine is what is said of one exchange. There is no query, token, key, cookie or body in it.
type accessLine struct {
	Time     time.Time `json:"time"`
	Request  string    `json:"request"`
	Trace    string    `json:"trace,omitempty"`
	Plane    string    `json:"plane"`
	Source   string    `json:"source"`
	Method   string    `json:"method"`
	Host     string    `json:"host"`
	Path     string    `json:"path"`
	Status   int       `json:"status"`
	Error    string    `json:"error,omitempty"`
	Sandbox  string    `json:"sandbox,omitempty"`
	Port     uint16    `json:"port,omitempty"`
	Node     string    `json:"node,omitempty"`
	Revision int64     `json:"revision,omitempty"`
	Tenant   string    `json:"tenant,omitempty"`
	Key      string    `json:"key,omitempty"`
	Client   string    `json:"client"`
	Proto    string    `json:"proto"`
	Upgrade  bool      `json:"upgrade,omitempty"`
	In       int64     `json:"in"`
	Out      int64     `json:"out"`
	TTFB     float64   `json:"ttfb"` // seconds
	Took     float64   `json:"took"` // seconds
	Attempts int       `json:"attempts,omitempty"`
	Stale    bool      `json:"stale,omitempty"`
}
