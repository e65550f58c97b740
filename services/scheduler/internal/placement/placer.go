package placement

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
)

const (
	// viewAge is how old the view may be that a choice is planned on. Reading it may take a share of the
	// time, though, and no more: a view is a hint, for what counts is read again under the locks.
	viewAge     = 250 * time.Millisecond
	viewAgeMost = time.Second
	viewShare   = 10

	// patience limits a call that came without a deadline.
	patience = 10 * time.Second

	// passOver is how long a replica prefers other nodes after one was full or not reached.
	passOver = 2 * time.Second

	// queued is how many calls may wait for the worker before the next one waits for a place.
	queued = 1024
)

// errStopped ends the calls that wait when Run ends; to callers it is a store that cannot answer.
var errStopped = fmt.Errorf("placing has stopped: %w", net.ErrClosed)

// Config is how nodes are chosen.
type Config struct {
	Strategy       Strategy
	Draws          int // candidates compared by best_of_k, from 1
	Weights        Weights
	Limits         Limits
	Batch          int           // most calls of one transaction, from 1
	ReservationTTL time.Duration // of a request that names none
	KeyRetention   time.Duration // how long an ended placement and its request id are kept
	KeyGrace       time.Duration // how long past its expiry the claim of a create key may be taken over
}

// DefaultConfig returns the documented defaults: no limits, the best of three.
func DefaultConfig() Config {
	return Config{Strategy: BestOfK, Draws: 3, Weights: DefaultWeights(), Batch: 64, ReservationTTL: 90 * time.Second, KeyRetention: 24 * time.Hour, KeyGrace: 10 * time.Second}
}

// Placer places creates. Its methods may be called at once; any number of Placers may work on one
// database.
type Placer struct {
	db      *pgdb.DB
	cfg     Config
	chooser Chooser
	log     *slog.Logger
	metrics *metrics

	queue   chan *call
	stopped chan struct{} // closed when Run has ended
	turn    atomic.Uint64 // of round_robin
	keys    keyWatch

	view   view    // of Run's goroutine alone
	stored limiter // likewise: refusals without a request id

	picking sync.Mutex
	picks   view // of Pick

	overlooking sync.Mutex
	overlook    map[node.ID]time.Time // until when a node is passed over
}

// New returns a Placer; Schedule needs its Run. reg may be nil.
func New(db *pgdb.DB, cfg Config, log *slog.Logger, reg prometheus.Registerer) *Placer {
	return &Placer{
		db: db, cfg: cfg, log: log, metrics: newMetrics(reg, cfg.Strategy),
		chooser:  Chooser{Strategy: cfg.Strategy, Draws: cfg.Draws, Weights: cfg.Weights, Limits: cfg.Limits},
		queue:    make(chan *call, queued),
		stopped:  make(chan struct{}),
		stored:   limiter{most: storedRefusals},
		overlook: map[node.ID]time.Time{},
		keys:     newKeyWatch(),
	}
}

// Schedule chooses a node for r and holds room there for r.TTL, or the configured time where that is
// zero. The answer is durable. A repeated RequestID whose placement is reserved or confirmed gets that
// placement, from any replica; after release, expiry or refusal it is a new try. It waits for Run.
//
// A CreateKey is one create within its tenant: see State. While another request has it in flight, the
// call waits up to two seconds, without a connection or a lock, for that to end.
//
// Errors: *node.Refused when no node takes r; node.ErrRequestReused when the request id, and
// node.ErrKeyReused when the create key stands for something else; a store that cannot answer (pgdb.Unavailable); ctx's own. After an error other than
// a refusal the room may be held until it expires.
func (p *Placer) Schedule(ctx context.Context, r Request) (Placement, error) {
	started := time.Now()
	placed, err := p.schedule(ctx, r)
	p.metrics.scheduled(started, err)
	return placed, err
}

func (p *Placer) schedule(ctx context.Context, r Request) (Placement, error) {
	if r.TTL == 0 {
		r.TTL = p.cfg.ReservationTTL
	}
	if r.DryRun {
		return p.rehearse(ctx, &r)
	}
	if _, limited := ctx.Deadline(); !limited {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, patience)
		defer cancel()
	}
	placed, err := p.ask(ctx, &r)
	if err == nil && placed.State == KeyPending {
		return p.await(ctx, &r)
	}
	return placed, err
}

// ask lets the worker decide r.
func (p *Placer) ask(ctx context.Context, r *Request) (Placement, error) {
	c := &call{ctx: ctx, r: *r, arrived: time.Now(), done: make(chan answer, 1)}
	select {
	case p.queue <- c:
	case <-ctx.Done():
		return Placement{}, p.gaveUp(c)
	case <-p.stopped:
		return Placement{}, errStopped
	}
	select {
	case a := <-c.done:
		return a.placed, a.err
	case <-ctx.Done():
		return Placement{}, p.gaveUp(c)
	case <-p.stopped:
		select {
		case a := <-c.done:
			return a.placed, a.err
		default:
			return Placement{}, errStopped
		}
	}
}

// gaveUp is the error of a call whose time is over: a refusal if others held the locks meanwhile.
func (p *Placer) gaveUp(c *call) error {
	err := c.ctx.Err()
	if errors.Is(err, context.DeadlineExceeded) && c.contended.Load() {
		return refused(&c.r, node.ErrContended, nil, 0)
	}
	return fmt.Errorf("schedule: %w", err)
}

// refused is what the caller of r is told. One that sets no Berth field knows one refusal only.
func refused(r *Request, cause error, reasons map[Reason]int, tries int) *node.Refused {
	told := &node.Refused{Cause: cause}
	if !r.Named {
		told.Cause = node.ErrNoneReady
	}
	if r.Named && len(reasons) > 0 {
		told.Reasons = make(map[string]int, len(reasons))
		for reason, nodes := range reasons {
			told.Reasons[string(reason)] = nodes
		}
	}
	if !errors.Is(cause, node.ErrConstraints) {
		wait := 200 * time.Millisecond << min(tries, 5)
		told.RetryAfter = wait - wait/5 + rand.N(wait*2/5)
	}
	return told
}

// Pick returns some node for a call that creates nothing, by the strategy, and writes nothing. The
// error is a *node.Refused, which is node.ErrNoneReady, when no node may take creates.
func (p *Placer) Pick(ctx context.Context) (node.ID, string, error) {
	started := time.Now()
	id, endpoint, err := p.pick(ctx)
	p.metrics.scheduled(started, err)
	return id, endpoint, err
}

func (p *Placer) pick(ctx context.Context) (node.ID, string, error) {
	r := Request{}
	p.picking.Lock()
	defer p.picking.Unlock()
	read := time.Now()
	if p.picks.stale() {
		if err := p.picks.refresh(ctx, p.db); err != nil {
			return "", "", err
		}
	}
	choice := p.chooser.Choose(&r, p.picks.nodes, p.draw(nil))
	if choice.Node == nil && p.picks.readAt.Before(read) {
		if err := p.picks.refresh(ctx, p.db); err != nil {
			return "", "", err
		}
		choice = p.chooser.Choose(&r, p.picks.nodes, p.draw(nil))
	}
	if choice.Node == nil {
		return "", "", refused(&r, choice.Cause, choice.Reasons, 0)
	}
	return choice.Node.ID, choice.Node.Endpoint, nil
}

// rehearse answers a dry run: a choice on a fresh view, and no write.
func (p *Placer) rehearse(ctx context.Context, r *Request) (Placement, error) {
	var v view
	if err := v.refresh(ctx, p.db, r); err != nil {
		return Placement{}, err
	}
	if v.quotas.limit(r.Tenant) {
		used, err := readUsage(ctx, p.db, r.Tenant)
		if err != nil {
			return Placement{}, err
		}
		if over := used.exceededBy(used, r); over.resource != "" {
			return Placement{}, over.tell(refused(r, node.ErrQuota, nil, 0))
		}
	}
	choice := p.chooser.Choose(r, v.nodes, p.draw(nil))
	if choice.Node == nil {
		return Placement{}, refused(r, choice.Cause, choice.Reasons, 0)
	}
	n := choice.Node
	return Placement{Node: n.ID, Endpoint: n.Endpoint, Capabilities: n.Capabilities}, nil
}

// draw takes the luck of one choice; a node is avoided if avoid says so or it was passed over lately.
func (p *Placer) draw(avoid map[node.ID]bool) Draw {
	d := Draw{Rand: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))}
	if p.chooser.Strategy == RoundRobin {
		d.Turn = p.turn.Add(1) - 1
	}
	over := p.overlooked()
	if len(avoid) > 0 || len(over) > 0 {
		d.Avoid = func(id node.ID) bool { return avoid[id] || over[id] }
	}
	return d
}
