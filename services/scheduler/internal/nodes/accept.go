package nodes

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/scheduler/internal/bindings"
)

// nextWhilePostponed is when a node whose roster was compared in part is to send the next heartbeat.
const nextWhilePostponed = time.Second

// maxRaces bounds how often a beat's transaction begins anew because somebody else's commit came first.
const maxRaces = 5

// acceptance is what came of a beat on the slow path.
type acceptance struct {
	answer   Answer
	outcome  bindings.Outcome
	path     string
	rang     bool // the node's own feed row was written
	compared bool
	inputs   bool // what the cluster's CPU template is made of may have changed
	offers   bool // the node was not told the cluster's CPU template
}

// accept takes a beat whose lease was not renewed as it is: a transaction for this node alone.
func (n *Nodes) accept(ctx context.Context, p *prepared) (Answer, error) {
	mine := turn{of: n.slow}
	if err := mine.take(ctx); err != nil {
		return Answer{}, fmt.Errorf("heartbeat of %s: %w", p.Node, err)
	}
	defer mine.free()
	var (
		done acceptance
		err  error
	)
	for races := 0; ; races++ {
		if done, err = n.acceptOnce(ctx, p, &mine); !errors.Is(err, bindings.ErrRaced) || races == maxRaces {
			break
		}
	}
	if err != nil {
		n.store.Failed("heartbeat", err)
		n.refuse(ctx, p, err)
		return Answer{}, fmt.Errorf("heartbeat of %s: %w", p.Node, err)
	}
	if done.compared && !p.RosterUnchanged {
		n.rosters.keep(p.Node, p.roster, p.Roster)
	}
	n.metrics.heartbeats.WithLabelValues(done.path).Inc()
	n.routes.Settle(ctx, p.Node, done.outcome)
	if done.rang {
		n.routes.Doorbell().Ring()
	}
	if done.answer.CPUConfigJSON, err = n.template(ctx, p, &done); err != nil {
		return Answer{}, err
	}
	return done.answer, nil
}

// turn is one of the places of the slow path.
type turn struct {
	of  chan struct{}
	has bool
}

// take waits for a place as long as ctx lasts.
func (t *turn) take(ctx context.Context) error {
	select {
	case t.of <- struct{}{}:
		t.has = true
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t *turn) free() {
	if t.has {
		<-t.of
		t.has = false
	}
}

func (n *Nodes) acceptOnce(ctx context.Context, p *prepared, mine *turn) (acceptance, error) {
	allowed, err := n.allowEndpoint(ctx, p, mine)
	if err != nil {
		return acceptance{}, err
	}
	var done acceptance
	err = n.db.Tx(ctx, func(tx pgx.Tx) error {
		done = acceptance{answer: n.answer(), path: pathLease}
		if err := n.lock(ctx, tx, p.Node); err != nil {
			return err
		}
		known, err := lockRow(ctx, tx, p.Node)
		if err != nil {
			return err
		}
		held, err := lockLease(ctx, tx, p.Node)
		if err != nil {
			return err
		}
		plan, err := known.plan(p, allowed)
		if err != nil {
			return err
		}
		next, err := held.admit(claim{Instance: p.Instance, Place: p.place, Moves: plan.moves && !plan.registers})
		if err != nil {
			return err
		}
		done.answer.Epoch, done.answer.Cordoned, done.answer.Draining = next.Epoch, plan.row.Cordoned, plan.row.DrainID != nil
		if held.repeated(p) {
			return nil
		}
		return n.write(ctx, tx, writing{beat: p, held: held, plan: plan, next: next}, &done)
	})
	return done, err
}

// lock waits for advisory.Node of id.
func (n *Nodes) lock(ctx context.Context, tx pgx.Tx, id node.ID) error {
	return n.store.Lock("node", func() error { return pgdb.Lock(ctx, tx, advisory.Node(id)) })
}

// writing is all that one beat's transaction writes from.
type writing struct {
	beat *prepared
	held *lease // nil: none
	plan plan
	next succession
}

func (n *Nodes) write(ctx context.Context, tx pgx.Tx, w writing, done *acceptance) (err error) {
	p := w.beat
	if w.held == nil || w.plan.writes() || string(w.held.FactsDigest) != string(p.facts) {
		if err := writeFacts(ctx, tx, w.plan, p, done); err != nil {
			return err
		}
		done.inputs = true
	}
	due := w.held == nil || w.held.Due
	done.inputs = done.inputs || due || w.next.Fresh
	changed := w.held == nil || string(w.held.RosterDigest) != string(p.roster)
	lw := leaseWrite{writing: w, ttl: n.cfg.LeaseTTL, roster: p.roster}
	switch {
	case p.RosterUnchanged:
		done.answer.SendFullRoster = changed || due || w.next.Fresh
		switch {
		case w.held == nil || w.next.Fresh:
			lw.roster = nil // nothing was compared under this lease
		case changed:
			lw.roster = w.held.RosterDigest
		}
	case changed || due || w.next.Fresh:
		report := bindings.Report{Node: p.Node, Cluster: p.Cluster, Roster: p.Roster, Cordoned: w.plan.row.Cordoned}
		done.path = pathFull
		if !due && !w.next.Fresh {
			if delta, ok := n.rosters.delta(p.Node, w.held.RosterDigest, p.Roster); ok {
				report.Partial, report.Delta, done.path = true, delta, pathDelta
			}
		}
		outcome, err := n.routes.Reconcile(ctx, tx, report)
		if err != nil {
			return err
		}
		done.outcome, done.compared = outcome, true
		done.answer.Orphans = outcome.Orphans
		if outcome.Postponed() {
			done.answer.NextHeartbeat = min(done.answer.NextHeartbeat, nextWhilePostponed)
			done.answer.SendFullRoster = true // or it would first be asked for it
		}
		switch {
		case !report.Partial:
			lw.dueIn = new(n.dueIn(rand.Float64(), outcome.RecheckIn))
		case outcome.RecheckIn > 0: // only a full comparison puts the next one off
			lw.dueIn, lw.sooner = new(outcome.RecheckIn), true
		}
		if due || w.next.Fresh {
			if err := writeDisks(ctx, tx, p); err != nil {
				return err
			}
		}
	}
	if w.next.Takeover {
		done.path = pathTakeover
	}
	done.offers, err = writeLease(ctx, tx, lw)
	return err
}

// refuse counts and logs a beat that was not accepted because of what it is.
func (n *Nodes) refuse(ctx context.Context, p *prepared, err error) {
	if !isRefusal(err) {
		return
	}
	n.metrics.refused()
	if errors.Is(err, node.ErrIDInUse) {
		n.conflict(ctx, p)
	}
}

const lockLeaseSQL = `
SELECT  ended_at IS NULL AND expires_at > clock_timestamp() AS live, ended_at, service_instance_id, place, epoch, node_seq,
        event_seq, retired, facts_digest, roster_digest, reconcile_due <= clock_timestamp() AS due
FROM    node_leases
WHERE   node_id = @node
FOR     UPDATE`

// lockLease locks the lease of id and returns it, or nil where there is none.
func lockLease(ctx context.Context, tx pgx.Tx, id node.ID) (*lease, error) {
	rows, err := tx.Query(ctx, lockLeaseSQL, pgx.StrictNamedArgs{"node": id})
	if err != nil {
		return nil, fmt.Errorf("lock the lease of %s: %w", id, err)
	}
	held, err := pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByName[lease])
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil //nolint:nilnil // no lease is a state, and admit takes it
	}
	if err != nil {
		return nil, fmt.Errorf("lock the lease of %s: %w", id, err)
	}
	return held, nil
}

// leaseWrite is a lease as it is to be.
type leaseWrite struct {
	writing
	ttl    time.Duration
	roster []byte         // digest of the roster that the bindings agree with; nil: of none
	dueIn  *time.Duration // nil: as before
	sooner bool           // dueIn counts only where it is before what was due
}

// writeLeaseSQL writes a lease that this transaction has locked, or the first one under advisory.Node. It tells
// whether the node is to be told its cluster's CPU template.
const writeLeaseSQL = `
INSERT  INTO node_leases AS l (node_id, service_instance_id, place, epoch, retired, node_seq, event_seq, facts_digest, roster_digest,
        expires_at, last_seen_at, ended_at, reconcile_due, reported_at_unix_ms, skew_ms, create_successes, create_fails,
        memory_used_bytes, memory_total_bytes, allocated_memory_bytes, paused_allocated_memory_bytes, cpu_percent, cpu_count,
        allocated_cpu, paused_allocated_cpu, sandbox_count, sandbox_starting_count, paused_sandbox_count, reported_status,
        has_snapshot)
SELECT  @node, @instance, @place, @epoch, @retired::text[], @seq, @event_seq, @facts, COALESCE(@roster::bytea, ''),
        clock_timestamp() + @ttl::interval, clock_timestamp(), NULL, COALESCE(clock_timestamp() + @due_in::interval, '-infinity'),
        @reported::bigint,
        CASE WHEN @reported::bigint <> 0 THEN LEAST(GREATEST(
        @reported::bigint - extract(epoch FROM clock_timestamp())::float8 * 1000, -2147483648), 2147483647)::int END,
        @successes, @fails, @memory_used, @memory_total, @memory_allocated, @memory_paused, @cpu_percent, @cpu_count,
        @cpu_allocated, @cpu_paused, @sandboxes, @starting, @paused, @status, @given
ON CONFLICT (node_id) DO UPDATE
SET     template_sent = CASE WHEN l.service_instance_id = EXCLUDED.service_instance_id THEN l.template_sent ELSE '' END,
        service_instance_id = EXCLUDED.service_instance_id, place = EXCLUDED.place, epoch = EXCLUDED.epoch,
        retired = EXCLUDED.retired, node_seq = EXCLUDED.node_seq, event_seq = EXCLUDED.event_seq,
        facts_digest = EXCLUDED.facts_digest, roster_digest = EXCLUDED.roster_digest, expires_at = EXCLUDED.expires_at,
        last_seen_at = EXCLUDED.last_seen_at, ended_at = NULL,
        reconcile_due = CASE WHEN @due_in::interval IS NULL THEN l.reconcile_due
                        WHEN @sooner::boolean THEN LEAST(l.reconcile_due, EXCLUDED.reconcile_due) ELSE EXCLUDED.reconcile_due END,
        reported_at_unix_ms = EXCLUDED.reported_at_unix_ms, skew_ms = EXCLUDED.skew_ms,
        create_successes = EXCLUDED.create_successes, create_fails = EXCLUDED.create_fails,
        memory_used_bytes = EXCLUDED.memory_used_bytes, memory_total_bytes = EXCLUDED.memory_total_bytes,
        allocated_memory_bytes = EXCLUDED.allocated_memory_bytes,
        paused_allocated_memory_bytes = EXCLUDED.paused_allocated_memory_bytes, cpu_percent = EXCLUDED.cpu_percent,
        cpu_count = EXCLUDED.cpu_count, allocated_cpu = EXCLUDED.allocated_cpu,
        paused_allocated_cpu = EXCLUDED.paused_allocated_cpu, sandbox_count = EXCLUDED.sandbox_count,
        sandbox_starting_count = EXCLUDED.sandbox_starting_count, paused_sandbox_count = EXCLUDED.paused_sandbox_count,
        reported_status = EXCLUDED.reported_status, has_snapshot = EXCLUDED.has_snapshot
RETURNING EXISTS (
        SELECT 1 FROM cpu_templates AS t
        WHERE  t.cluster_id = @cluster AND t.digest <> ''
        AND    CASE WHEN @echoes::boolean THEN @echo::bytea ELSE l.template_sent END <> t.digest)`

func writeLease(ctx context.Context, tx pgx.Tx, w leaseWrite) (offers bool, err error) {
	p, seq, eventSeq := w.beat, w.beat.Seq, int64(0)
	if w.held != nil && w.held.ServiceInstanceID == p.Instance {
		seq, eventSeq = max(seq, w.held.NodeSeq), w.held.EventSeq
	}
	retired := w.next.Retired
	if retired == nil {
		retired = []string{}
	}
	err = tx.QueryRow(ctx, writeLeaseSQL, pgx.StrictNamedArgs{
		"cluster": p.Cluster, "echoes": p.echoes(), "echo": p.TemplateDigest,
		"node": p.Node, "instance": p.Instance, "place": p.place, "epoch": w.next.Epoch, "retired": retired,
		"seq": seq, "event_seq": eventSeq, "facts": p.facts, "roster": w.roster, "ttl": w.ttl, "due_in": w.dueIn, "sooner": w.sooner,
		"reported": p.load.reportedAt, "successes": p.load.createSuccesses, "fails": p.load.createFails,
		"memory_used": p.load.memoryUsed, "memory_total": p.load.memoryTotal, "memory_allocated": p.load.allocatedMemory,
		"memory_paused": p.load.pausedMemory, "cpu_percent": p.load.cpuPercent, "cpu_count": p.load.cpuCount,
		"cpu_allocated": p.load.allocatedCPU, "cpu_paused": p.load.pausedCPU, "sandboxes": p.load.sandboxes,
		"starting": p.load.starting, "paused": p.load.paused, "status": p.load.status, "given": p.load.given,
	}).Scan(&offers)
	if err != nil {
		return false, fmt.Errorf("write the lease of %s: %w", p.Node, err)
	}
	return offers, nil
}
