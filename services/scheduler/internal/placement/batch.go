package placement

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
)

const (
	// patienceOfTries is how often a call loses a lock before its batch waits for locks instead.
	patienceOfTries = 2

	// detour is how much fuller than the planned node, as a share of its room, one may be that is taken
	// because its lock was free.
	detour = 0.2

	// storedRefusals is how many refusals without a request id a replica stores in a second.
	storedRefusals = 10

	// roundLimit ends a transaction that hangs; the role's own timeouts are shorter.
	roundLimit = 15 * time.Second
)

// call is one Schedule that waits for the worker.
type call struct {
	ctx     context.Context //nolint:containedctx // the call of a batch ends by its own context, not the batch's
	r       Request
	arrived time.Time
	done    chan answer // takes one answer, never blocks

	contended atomic.Bool // others held the locks it needed

	losses   int
	avoid    map[node.ID]bool // nodes whose lock it lost
	unplaced bool             // no node passed: next time it plans first, on a view read after it arrived
	again    bool             // it was repeated after a lost connection

	choice Choice // of this round
	tries  int    // of its request id before this one
}

type answer struct {
	placed Placement
	err    error
}

func (c *call) answer(placed Placement, err error) { c.done <- answer{placed, err} }

// Run places what Schedule brings, until ctx ends: a batch is what waits when the former one is done,
// without a timer, so an idle replica places at once and a busy one in large transactions. It is called
// once. On one connection at a time, for more connections would only wait for each other.
func (p *Placer) Run(ctx context.Context) error {
	var watching sync.WaitGroup
	watching.Go(func() { p.keys.watch(ctx, p.db, p.log) })
	defer watching.Wait()
	defer close(p.stopped)
	for {
		select {
		case <-ctx.Done():
			return nil
		case first := <-p.queue:
			pending := []*call{first}
			for len(pending) > 0 {
				if ctx.Err() != nil {
					return nil // Schedule sees that Run has ended
				}
				pending = p.round(ctx, p.fill(pending))
			}
		}
	}
}

// fill adds what waits, up to a full batch.
func (p *Placer) fill(pending []*call) []*call {
	for len(pending) < p.cfg.Batch {
		select {
		case c := <-p.queue:
			pending = append(pending, c)
		default:
			return pending
		}
	}
	return pending
}

// round plans the calls, decides them in one transaction, and returns those that need another round.
func (p *Placer) round(ctx context.Context, pending []*call) []*call {
	ctx, cancel := context.WithTimeout(ctx, roundLimit)
	defer cancel()
	pending = slices.DeleteFunc(pending, func(c *call) bool { return c.ctx.Err() != nil })
	if len(pending) == 0 {
		return nil
	}
	if err := p.look(ctx, pending); err != nil {
		for _, c := range pending {
			c.answer(Placement{}, err)
		}
		p.metrics.failed("read nodes")
		return nil
	}
	batch, rest := p.plan(pending)
	if len(batch) == 0 {
		return rest
	}
	p.metrics.batched(len(batch))
	return append(rest, p.commit(ctx, batch)...)
}

// look makes sure that the view is fresh enough to plan on.
func (p *Placer) look(ctx context.Context, pending []*call) error {
	requests := make([]*Request, len(pending))
	stale := p.view.stale()
	for i, c := range pending {
		requests[i] = &c.r
		stale = stale || c.unplaced && p.view.readAt.Before(c.arrived)
	}
	if stale {
		return p.view.refresh(ctx, p.db, requests...)
	}
	return p.view.consult(ctx, p.db, requests)
}

// plan chooses a node for each call and splits them into those that go into the transaction and those
// that must wait for the next one. A call is refused only on a view that was read after it arrived and
// has nothing in it that is merely planned: what another call has not committed must not refuse it.
func (p *Placer) plan(pending []*call) (batch, rest []*call) {
	slices.SortStableFunc(pending, func(a, b *call) int {
		switch {
		case a.unplaced == b.unplaced:
			return 0
		case a.unplaced:
			return -1
		}
		return 1
	})
	requested := map[[2]string]bool{}
	for _, c := range pending {
		if c.r.RequestID != "" {
			// The second of two equal request ids waits, and then reads what became of the first.
			key := [2]string{c.r.Tenant, c.r.RequestID}
			if requested[key] {
				rest = append(rest, c)
				continue
			}
			requested[key] = true
		}
		c.choice = p.chooser.Choose(&c.r, p.view.nodes, p.draw(c.avoid))
		switch {
		case c.choice.Node != nil:
			p.view.raise(c.choice.Node, &c.r)
			batch = append(batch, c)
		case len(p.view.raised) == 0 && !p.view.readAt.Before(c.arrived):
			batch = append(batch, c)
		default:
			c.unplaced = true
			rest = append(rest, c)
		}
	}
	return batch, rest
}

// commit decides the batch in one transaction and answers; it returns the calls that need another round.
func (p *Placer) commit(ctx context.Context, batch []*call) []*call {
	round := p.newRound(batch)
	err := round.run(ctx)
	if err == nil {
		p.view.settle(round.nodes)
		round.tell()
		return round.rest
	}
	p.view.settle(nil)
	p.view.readAt = time.Time{} // what it knew may be wrong
	return p.recover(ctx, batch, err)
}

// recover sorts the calls of a transaction that failed into those that go again and those that get err.
func (p *Placer) recover(ctx context.Context, batch []*call, err error) []*call {
	lost := errors.Is(err, pgdb.ErrUnknown)
	contended := pgdb.Code(err)
	if keyConstraints[pgdb.Constraint(err)] {
		contended = "40001" // a late record has just given a key back to its placement, without the key's lock
	}
	switch contended {
	case "55P03", "40P01", "40001": // others held the locks; the calls' own deadlines end this
		for _, c := range batch {
			c.contended.Store(true)
			c.losses++
		}
		return batch
	}
	if len(batch) > 1 && !lost && !pgdb.Unavailable(err) {
		// One of them is poison: the others must not fail with it.
		var rest []*call
		for _, c := range batch {
			rest = append(rest, p.commit(ctx, []*call{c})...)
		}
		return rest
	}
	p.metrics.failed("place")
	var rest []*call
	for _, c := range batch {
		// A transaction that never began, or a lost answer that the request id can find again.
		if !c.again && (pgconn.SafeToRetry(err) || lost && c.r.RequestID != "") {
			c.again = true
			rest = append(rest, c)
			continue
		}
		c.answer(Placement{}, err)
	}
	return rest
}
