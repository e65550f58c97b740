package nodes

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
)

// Heartbeat renews the lease of beat's node and, where its roster changed or is due, makes the
// bindings what it says. It may repeat, in any order and to any replica.
//
// Errors: node.ErrNotListed for a node that no source lists and that may not register;
// node.ErrBadEndpoint or route.ErrNotAllowed; node.ErrIDInUse while another instance lives elsewhere;
// node.ErrSuperseded for an instance that was replaced; node.ErrBadTag and node.ErrBadRoster.
func (n *Nodes) Heartbeat(ctx context.Context, beat Beat) (Answer, error) {
	p, err := n.prepare(beat)
	if err != nil {
		n.metrics.refused()
		return Answer{}, fmt.Errorf("heartbeat of %s: %w", beat.Node, err)
	}
	lease, err := n.batcher.submit(ctx, p)
	if err != nil {
		n.store.Failed("renew leases", err)
		return Answer{}, err
	}
	if lease == nil {
		return n.accept(ctx, p)
	}
	n.metrics.heartbeats.WithLabelValues(pathLease).Inc()
	answer := n.answer()
	answer.Epoch, answer.Cordoned, answer.Draining = lease.Epoch, lease.Cordoned, lease.Draining
	return answer, nil
}

// answer is what every node is told.
func (n *Nodes) answer() Answer {
	return Answer{LeaseTTL: n.cfg.LeaseTTL, NextHeartbeat: n.cfg.HeartbeatEvery}
}

// renewLeasesSQL renews leases of which nothing but time and load has changed. The joins are the
// fence: who was replaced, who is no longer listed, whose facts or roster differ, and who was not told its
// cluster's CPU template gets no row back, and takes the slow path, where nothing is guessed from its absence here. Rows are locked in id order,
// so that replicas with overlapping batches do not deadlock; one that is locked already is left to the
// slow path, which waits for it, so that no node makes its neighbours wait.
const renewLeasesSQL = `
WITH    held AS MATERIALIZED (
        SELECT l.node_id, n.cordoned, n.drain_id IS NOT NULL AS draining, beat.*
        FROM   node_leases AS l
        JOIN   unnest(@nodes::text[], @instances::text[], @facts::bytea[], @rosters::bytea[], @seqs::bigint[],
                      @reported::bigint[], @successes::bigint[], @fails::bigint[], @memory_used::bigint[],
                      @memory_total::bigint[], @memory_allocated::bigint[], @memory_paused::bigint[],
                      @cpu_percents::int[], @cpu_counts::int[], @cpu_allocated::int[], @cpu_paused::int[],
                      @sandboxes::int[], @starting::int[], @paused::int[], @statuses::smallint[], @given::boolean[],
                      @echoing::boolean[], @echoes::bytea[])
               AS beat (id, instance_id, facts, roster, seq, reported, successes, fails, memory_used, memory_total,
                        memory_allocated, memory_paused, cpu_percent, cpu_count, cpu_allocated, cpu_paused,
                        sandboxes, starting, paused, status, given, echoing, echo)
        ON     beat.id = l.node_id AND beat.instance_id = l.service_instance_id
        AND    beat.facts = l.facts_digest AND beat.roster = l.roster_digest
        JOIN   nodes AS n ON n.node_id = l.node_id AND n.present
        LEFT   JOIN cpu_templates AS t ON t.cluster_id = n.cluster_id AND t.digest <> ''
        WHERE  (t.digest IS NULL OR CASE WHEN beat.echoing THEN beat.echo ELSE l.template_sent END = t.digest)
        AND    l.ended_at IS NULL AND l.expires_at > clock_timestamp() AND l.reconcile_due > clock_timestamp()
        AND    (beat.seq = 0 OR beat.seq > l.node_seq)
        ORDER  BY l.node_id
        FOR    UPDATE OF l SKIP LOCKED)
UPDATE  node_leases AS l
SET     expires_at = clock_timestamp() + @ttl::interval, last_seen_at = clock_timestamp(),
        node_seq = GREATEST(l.node_seq, held.seq), reported_at_unix_ms = held.reported,
        skew_ms = CASE WHEN held.reported <> 0 THEN LEAST(GREATEST(
                  held.reported - extract(epoch FROM clock_timestamp())::float8 * 1000, -2147483648), 2147483647)::int END,
        create_successes = held.successes, create_fails = held.fails,
        memory_used_bytes = held.memory_used, memory_total_bytes = held.memory_total,
        allocated_memory_bytes = held.memory_allocated, paused_allocated_memory_bytes = held.memory_paused,
        cpu_percent = held.cpu_percent, cpu_count = held.cpu_count, allocated_cpu = held.cpu_allocated,
        paused_allocated_cpu = held.cpu_paused, sandbox_count = held.sandboxes, sandbox_starting_count = held.starting,
        paused_sandbox_count = held.paused, reported_status = held.status, has_snapshot = held.given
FROM    held
WHERE   l.node_id = held.node_id
RETURNING l.node_id, l.epoch, held.cordoned, held.draining`

// maxRerun bounds how often a statement runs that met a deadlock or a lock timeout.
const maxRerun = 3

// renew renews the leases of beats, each of another node, in one statement. What is not in the answer
// takes the slow path.
func (n *Nodes) renew(ctx context.Context, beats []*prepared) (map[node.ID]*renewed, error) {
	args := columns(beats)
	args["ttl"] = n.cfg.LeaseTTL
	for reruns := 0; ; reruns++ {
		answers, err := n.renewOnce(ctx, args)
		if err == nil || reruns == maxRerun || !contended(err) {
			return answers, err
		}
	}
}

func contended(err error) bool {
	code := pgdb.Code(err)
	return code == "40P01" || code == "55P03"
}

func (n *Nodes) renewOnce(ctx context.Context, args pgx.StrictNamedArgs) (map[node.ID]*renewed, error) {
	conn, err := n.db.Acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("renew leases: %w", err)
	}
	defer conn.Release()
	rows, err := conn.Query(ctx, renewLeasesSQL, args)
	if err != nil {
		return nil, fmt.Errorf("renew leases: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[renewed])
	if err != nil {
		return nil, fmt.Errorf("renew leases: %w", err)
	}
	answers := make(map[node.ID]*renewed, len(list))
	for _, r := range list {
		answers[r.NodeID] = r
	}
	return answers, nil
}

// columns returns beats as the arrays of renewLeasesSQL, all of one length.
func columns(beats []*prepared) pgx.StrictNamedArgs {
	return pgx.StrictNamedArgs{
		"nodes":            column(beats, func(p *prepared) string { return string(p.Node) }),
		"instances":        column(beats, func(p *prepared) string { return p.Instance }),
		"facts":            column(beats, func(p *prepared) []byte { return p.facts }),
		"rosters":          column(beats, func(p *prepared) []byte { return p.roster }),
		"seqs":             column(beats, func(p *prepared) int64 { return p.Seq }),
		"reported":         column(beats, func(p *prepared) int64 { return p.load.reportedAt }),
		"successes":        column(beats, func(p *prepared) int64 { return p.load.createSuccesses }),
		"fails":            column(beats, func(p *prepared) int64 { return p.load.createFails }),
		"memory_used":      column(beats, func(p *prepared) int64 { return p.load.memoryUsed }),
		"memory_total":     column(beats, func(p *prepared) int64 { return p.load.memoryTotal }),
		"memory_allocated": column(beats, func(p *prepared) int64 { return p.load.allocatedMemory }),
		"memory_paused":    column(beats, func(p *prepared) int64 { return p.load.pausedMemory }),
		"cpu_percents":     column(beats, func(p *prepared) int32 { return p.load.cpuPercent }),
		"cpu_counts":       column(beats, func(p *prepared) int32 { return p.load.cpuCount }),
		"cpu_allocated":    column(beats, func(p *prepared) int32 { return p.load.allocatedCPU }),
		"cpu_paused":       column(beats, func(p *prepared) int32 { return p.load.pausedCPU }),
		"sandboxes":        column(beats, func(p *prepared) int32 { return p.load.sandboxes }),
		"starting":         column(beats, func(p *prepared) int32 { return p.load.starting }),
		"paused":           column(beats, func(p *prepared) int32 { return p.load.paused }),
		"statuses":         column(beats, func(p *prepared) int16 { return p.load.status }),
		"given":            column(beats, func(p *prepared) bool { return p.load.given }),
		"echoing":          column(beats, func(p *prepared) bool { return p.echoes() }),
		"echoes":           column(beats, func(p *prepared) []byte { return p.TemplateDigest }),
	}
}

func column[T any](beats []*prepared, of func(*prepared) T) []T {
	values := make([]T, len(beats))
	for i, p := range beats {
		values[i] = of(p)
	}
	return values
}

// dueIn returns when a roster is compared in full again: spread, so that nodes which started together
// do not stay together, and sooner where the outcome asks for that.
func (n *Nodes) dueIn(random float64, recheck time.Duration) time.Duration {
	due := n.cfg.FullReconcile - n.cfg.FullReconcile/5 + time.Duration(random*float64(n.cfg.FullReconcile)*2/5)
	if recheck > 0 && recheck < due {
		return recheck
	}
	return due
}
