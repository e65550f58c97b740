package launch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/gateway/internal/proxy"
	"berth/services/gateway/internal/routecache"
	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// What Create returns besides the scheduler's refusals and ErrSchedulerAway.
var (
	// ErrSilent means that a node gave no answer in time.
	ErrSilent = errors.New("node is silent")
	// ErrUnknown means that a node may or may not have the sandbox; it is ErrSilent too when it was.
	ErrUnknown = errors.New("create outcome unknown")
	// ErrUnrecorded means that the sandbox was made, could not be bound, and was deleted again.
	ErrUnrecorded = errors.New("sandbox could not be recorded")
	// ErrNodeKey means that a node refused the gateway's own key.
	ErrNodeKey = errors.New("node refuses the node key")
	// ErrClientGone means that nobody waits for an answer any more.
	ErrClientGone = errors.New("client has left")
)

// BadAnswer is an answer of a node that may not be passed on. Text is for the client.
type BadAnswer struct{ Text string }

// Error returns the text.
func (e *BadAnswer) Error() string { return e.Text }

// Nodes makes one call to a node, once; proxy.NothingSent tells of an error that no byte had left.
type Nodes interface {
	Do(ctx context.Context, c proxy.NodeCall) (proxy.NodeAnswer, error)
}

// Routes is the cache that this gateway's next request is routed by.
type Routes interface {
	Put(r route.Route)
}

// Config has the limits of creates; zero values are the defaults.
type Config struct {
	MaxNodes    int           // candidates of one create: 4
	PlaceFor    time.Duration // for all of them: 30 s
	HeaderLimit time.Duration // silence of a node before and inside its answer: 120 s
	DeleteLimit time.Duration // all tries of a compensating delete: 10 s
	AnswerLimit int64         // bytes of an answer searched for ids: 4 MiB
	KeepOrphans bool          // a client that left does not end its sandbox
}

func (c *Config) defaults() {
	c.MaxNodes = orDefault(c.MaxNodes, 4)
	c.PlaceFor = orDefault(c.PlaceFor, 30*time.Second)
	c.HeaderLimit = orDefault(c.HeaderLimit, 120*time.Second)
	c.DeleteLimit = orDefault(c.DeleteLimit, 10*time.Second)
	c.AnswerLimit = orDefault(c.AnswerLimit, 4<<20)
}

func orDefault[T int | int64 | time.Duration](v, fallback T) T {
	if v <= 0 {
		return fallback
	}
	return v
}

// Deps are what a Launcher works with.
type Deps struct {
	Scheduler *Scheduler
	Nodes     Nodes
	Routes    Routes
	Log       *slog.Logger
	Registry  prometheus.Registerer
}

// Launcher runs creates. It may be used at the same time.
type Launcher struct {
	Deps
	cfg     Config
	metrics metrics
}

// New returns a Launcher.
func New(deps Deps, cfg Config) *Launcher {
	cfg.defaults()
	return &Launcher{Deps: deps, cfg: cfg, metrics: newMetrics(deps.Registry)}
}

// Request is one create whose body was read and checked.
type Request struct {
	Tenant string
	Ask    Ask
	Client *http.Request // its header goes on
	Raw    string        // path and query, byte for byte
	Body   []byte
}

// Created is a create that is bound: any gateway can route to it. Close must be called.
type Created struct {
	Response  *http.Response // status, header and body as they came
	Sandboxes []sandbox.ID
	Node      node.ID
	Revision  sandbox.Revision
	close     func()
}

// Close gives the node's connection back.
func (c *Created) Close() { c.close() }

// Refusal is a node's own answer of 4xx or 5xx: nothing was made. Response is the caller's to close.
type Refusal struct{ Response *http.Response }

// Error returns the status; the body is the client's to read.
func (e *Refusal) Error() string { return "node answered " + e.Response.Status }

// creation is one create on its way. ctx outlives the client's.
type creation struct {
	*Launcher
	Request
	ctx    context.Context //nolint:containedctx // lives as long as the create, by design longer than the client
	client context.Context //nolint:containedctx // asked only whether the client is still there
}

// Create places the sandbox, has a node make it and binds it. A *Refusal is the node's answer for the
// client; every other error is told by the gateway, and then nothing is left behind but what doc.go
// says. From the choice of a node on it runs to its end without ctx, whose client may leave.
func (l *Launcher) Create(ctx context.Context, r Request) (*Created, error) {
	c := &creation{Launcher: l, Request: r, ctx: context.WithoutCancel(ctx), client: ctx}
	created, err := c.run() //nolint:contextcheck // it outlives its client on purpose
	l.metrics.creates.WithLabelValues(outcomeOf(err)).Inc()
	return created, err
}

// run asks one candidate after the other.
func (c *creation) run() (*Created, error) {
	request, err := newRequestID()
	if err != nil {
		return nil, err
	}
	until := time.Now().Add(c.cfg.PlaceFor)
	var excluded []string
	stuck := "" // a hold that could not be released
	for {
		p, err := c.place(request, excluded, stuck)
		if err != nil {
			return nil, c.afterRefusals(err, excluded)
		}
		if c.client.Err() != nil {
			c.release(p, schedulerv1.ReleaseReason_RELEASE_REASON_CANCELED)
			return nil, ErrClientGone
		}
		created, err := c.on(p)
		refused, next := errors.AsType[*refusedBy](err)
		if !next {
			return created, err
		}
		c.Log.InfoContext(c.ctx, "node did not take a create", slog.Any("node", p.node.ID),
			slog.String("reason", refused.reason.String()), slog.Any("error", refused.cause))
		excluded = append(excluded, string(p.node.ID))
		stuck = ""
		if !c.release(p, refused.reason) {
			// Under this request id the scheduler may still answer with the old hold.
			stuck = p.reservation
			if request, err = newRequestID(); err != nil {
				return nil, err
			}
		}
		if len(excluded) >= c.cfg.MaxNodes || time.Now().After(until) {
			return nil, noNodes(0)
		}
	}
}

// refusedBy means that a node took nothing, so that another may be asked.
type refusedBy struct {
	reason schedulerv1.ReleaseReason
	cause  error
}

func (e *refusedBy) Error() string { return fmt.Sprintf("%s: %v", e.reason, e.cause) }

// afterRefusals says "no nodes available" where the scheduler has no further candidate.
func (c *creation) afterRefusals(err error, excluded []string) error {
	if len(excluded) == 0 {
		return err
	}
	if errors.Is(err, node.ErrNoneReady) || errors.Is(err, node.ErrNoRoom) || errors.Is(err, node.ErrConstraints) {
		var after time.Duration
		if refused, ok := errors.AsType[*node.Refused](err); ok {
			after = refused.RetryAfter
		}
		return noNodes(after)
	}
	return err
}

func noNodes(after time.Duration) error {
	return &node.Refused{Cause: node.ErrNoneReady, RetryAfter: max(after, time.Second)}
}

// placement is one hold on one node.
type placement struct {
	node        *routecache.Node
	id          int64
	reservation string
	hold        time.Duration
	sandbox     sandbox.ID // drawn by the scheduler for nodes that take ids, else ""
}

// place asks the scheduler for a node. stuck is a hold that ends with the new placement.
func (c *creation) place(request string, excluded []string, stuck string) (*placement, error) {
	in := &schedulerv1.ScheduleRequest{
		Hint: c.Ask.Hint, RequestId: request, TenantId: c.Tenant,
		ExcludeNodeIds: excluded, Sandbox: c.Ask.Managed, ReplaceReservationId: stuck,
	}
	out, err := c.Scheduler.schedule(c.ctx, in)
	if err != nil {
		return nil, fmt.Errorf("place: %w", err)
	}
	id, err := node.ParseID(out.GetNode().GetNodeId())
	if err != nil {
		return nil, fmt.Errorf("place: scheduler named no node: %w", err)
	}
	// The endpoint of now: the cache may not know it yet.
	to, err := routecache.NewNode(id, out.GetNode().GetEndpoint(), out.GetNodeCapabilities(), false, 0)
	if err != nil {
		return nil, fmt.Errorf("place: %w", err)
	}
	p := &placement{
		node: to, id: out.GetPlacementId(), reservation: out.GetReservationId(),
		hold: time.Duration(out.GetHoldMs()) * time.Millisecond,
	}
	if drawn := out.GetSandboxId(); drawn != "" {
		if p.sandbox, err = sandbox.ParseID(drawn); err != nil {
			return nil, fmt.Errorf("place: scheduler drew a bad id: %w", err)
		}
	}
	return p, nil
}

func newRequestID() (string, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return "", fmt.Errorf("draw a request id: %w", err)
	}
	return id.String(), nil
}
