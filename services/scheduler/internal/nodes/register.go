package nodes

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/p2p"
)

// The sources of nodes, as the rows spell them.
const (
	sourceStatic     = "static"
	sourceRegistered = "registered"
)

// row is a row of nodes as a beat is judged by it.
type row struct {
	ClusterID        string
	Endpoint         string
	EndpointRevision int64
	Source           string
	Trusted          bool
	Present          bool
	Cordoned         bool
	DrainID          *int64
	Capabilities     []string
}

// plan is what a beat makes of its node's row.
type plan struct {
	row       row  // as it is to be, but for its revision
	registers bool // no source listed the node: this beat does
	moves     bool // the endpoint it sent is not the row's
	announces bool // gateways must hear of it
}

func (p plan) writes() bool { return p.registers || p.moves || p.announces }

// plan returns what p makes of r, nil where there is no row. allowed is an endpoint that has passed the
// guard. Errors: node.ErrNotListed for a node that no source lists and that may not register itself;
// node.ErrBadEndpoint where the endpoint is not p's to choose; bindings.ErrRaced when the row changed
// since the guard was asked.
func (r *row) plan(p *prepared, allowed string) (plan, error) {
	if r == nil || !r.Present {
		return r.register(p, allowed)
	}
	next := plan{row: *r, moves: p.Endpoint != "" && p.Endpoint != r.Endpoint}
	switch {
	case !next.moves:
	case r.Source != sourceRegistered || !p.MayRegister:
		return plan{}, node.ErrBadEndpoint
	case p.Endpoint != allowed:
		return plan{}, fmt.Errorf("the endpoint was not judged: %w", bindings.ErrRaced)
	default:
		next.row.Endpoint = p.Endpoint
	}
	next.row.Capabilities = p.capabilities()
	next.announces = next.moves || !slices.Equal(next.row.Capabilities, r.Capabilities)
	return next, nil
}

// register lists a node by its own word. A row that its source gave up is nobody's, so it may be taken;
// what operators said about the node stays.
func (r *row) register(p *prepared, allowed string) (plan, error) {
	switch {
	case !p.MayRegister || p.Endpoint == "":
		return plan{}, node.ErrNotListed
	case p.Endpoint != allowed:
		return plan{}, fmt.Errorf("the endpoint was not judged: %w", bindings.ErrRaced)
	}
	next := plan{registers: true, moves: true, announces: true}
	if r != nil {
		next.row = *r
		next.moves = r.Endpoint != p.Endpoint
		next.announces = next.moves || r.Trusted || !slices.Equal(p.capabilities(), r.Capabilities)
	}
	next.row.Source, next.row.Trusted, next.row.Present = sourceRegistered, false, true
	next.row.Endpoint, next.row.Capabilities = p.Endpoint, p.capabilities()
	return next, nil
}

const selectEndpointSQL = `
SELECT  endpoint, source, present
FROM    nodes
WHERE   node_id = @node`

// allowEndpoint asks the guard about an endpoint that would change the node's, and returns it if it
// passes; "": there is nothing to ask. Names are resolved here, before the transaction and without the
// caller's turn: a few nodes whose names nobody resolves must not hold up the others.
func (n *Nodes) allowEndpoint(ctx context.Context, p *prepared, mine *turn) (string, error) {
	if p.Endpoint == "" || !p.MayRegister {
		return "", nil
	}
	var known row
	err := n.db.QueryRow(ctx, selectEndpointSQL, pgx.StrictNamedArgs{"node": p.Node}).Scan(&known.Endpoint, &known.Source, &known.Present)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
	case err != nil:
		return "", fmt.Errorf("read the endpoint: %w", err)
	case known.Present && (known.Endpoint == p.Endpoint || known.Source != sourceRegistered):
		return "", nil
	}
	if !n.guard.Resolves(p.Endpoint) {
		return n.guard.Check(ctx, p.Endpoint)
	}
	mine.free()
	allowed, err := n.guard.Check(ctx, p.Endpoint)
	if err != nil {
		return "", err
	}
	return allowed, mine.take(ctx)
}

const lockNodeSQL = `
SELECT  cluster_id, endpoint, endpoint_revision, source, trusted, present, cordoned, drain_id, capabilities
FROM    nodes
WHERE   node_id = @node
FOR     NO KEY UPDATE`

// lockRow locks the row of id and returns it, or nil where there is none.
func lockRow(ctx context.Context, tx pgx.Tx, id node.ID) (*row, error) {
	rows, err := tx.Query(ctx, lockNodeSQL, pgx.StrictNamedArgs{"node": id})
	if err != nil {
		return nil, fmt.Errorf("lock node %s: %w", id, err)
	}
	known, err := pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByName[row])
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil //nolint:nilnil // no row is a state, and plan takes it
	}
	if err != nil {
		return nil, fmt.Errorf("lock node %s: %w", id, err)
	}
	return known, nil
}

// writeNodeSQL keeps what the node does not repeat: its machine and CPU configuration.
const writeNodeSQL = `
INSERT  INTO nodes AS n (node_id, cluster_id, endpoint, endpoint_revision, source, trusted, capabilities, labels, version, commit,
        machine_info, cpu_config_json, cap_sandboxes, cap_cpu_millis, cap_memory_bytes)
SELECT  @node, @cluster, @endpoint, @revision, @source, @trusted, @capabilities::text[], COALESCE(@labels::jsonb, '{}'), @version, @commit,
        @machine::jsonb, @cpu_config, nullif(@cap_sandboxes::int, 0), nullif(@cap_cpu::bigint, 0), nullif(@cap_memory::bigint, 0)
ON CONFLICT (node_id) DO UPDATE
SET     cluster_id = EXCLUDED.cluster_id, endpoint = EXCLUDED.endpoint, endpoint_revision = EXCLUDED.endpoint_revision,
        source = EXCLUDED.source, trusted = EXCLUDED.trusted, capabilities = EXCLUDED.capabilities, labels = COALESCE(@labels::jsonb, n.labels),
        present = true, gone_at = NULL, version = EXCLUDED.version, commit = EXCLUDED.commit,
        machine_info = COALESCE(EXCLUDED.machine_info, n.machine_info),
        cpu_config_json = CASE WHEN EXCLUDED.cpu_config_json = '' THEN n.cpu_config_json ELSE EXCLUDED.cpu_config_json END,
        cap_sandboxes = EXCLUDED.cap_sandboxes, cap_cpu_millis = EXCLUDED.cap_cpu_millis,
        cap_memory_bytes = EXCLUDED.cap_memory_bytes, changed_at = clock_timestamp()`

// writeFacts writes the node's row and where its store listens, and the feed if gateways must hear.
func writeFacts(ctx context.Context, tx pgx.Tx, plan plan, p *prepared, done *acceptance) error {
	revision := plan.row.EndpointRevision
	if plan.announces {
		var err error
		revision, err = bindings.AnnounceNode(ctx, tx, bindings.NodeChange{
			Node: p.Node, Cluster: p.Cluster, Endpoint: plan.row.Endpoint, Above: revision,
		})
		if err != nil {
			return err
		}
		done.rang = true
	}
	var labels map[string]string // nil: a node that knows no labels keeps those of its operator
	if p.Endpoint != "" || len(p.Labels) > 0 {
		labels = make(map[string]string, len(p.Labels))
	}
	for key, value := range p.Labels {
		labels[storable(key)] = storable(value)
	}
	capabilities := plan.row.Capabilities
	if capabilities == nil {
		capabilities = []string{}
	}
	machine, config := p.Machine.storable()
	_, err := tx.Exec(ctx, writeNodeSQL, pgx.StrictNamedArgs{
		"node": p.Node, "cluster": p.Cluster, "endpoint": plan.row.Endpoint, "revision": revision,
		"source": plan.row.Source, "trusted": plan.row.Trusted, "capabilities": capabilities, "labels": labels,
		"version": p.Version, "commit": p.Commit, "machine": machine, "cpu_config": config,
		"cap_sandboxes": narrow32(p.Capacity.Sandboxes), "cap_cpu": p.Capacity.CPUMillis, "cap_memory": p.Capacity.MemoryBytes,
	})
	if err != nil {
		return fmt.Errorf("write node %s: %w", p.Node, err)
	}
	return writePeer(ctx, tx, p)
}

// storable returns m as its column takes it, and the CPU configuration, which has one of its own.
func (m *Machine) storable() (stored *Machine, config string) {
	if m == nil {
		return nil, ""
	}
	return &Machine{
		CPUFamily: storable(m.CPUFamily), CPUModel: storable(m.CPUModel), CPUModelName: storable(m.CPUModelName),
		CPUArchitecture: storable(m.CPUArchitecture),
	}, storable(m.CPUConfig)
}

const writePeerSQL = `
INSERT  INTO peer_endpoints (node_id, cluster_id, backend, address)
SELECT  @node, @cluster, @backend, @address
ON CONFLICT (node_id) DO UPDATE
SET     cluster_id = EXCLUDED.cluster_id, backend = EXCLUDED.backend, address = EXCLUDED.address`

const deletePeersSQL = `DELETE FROM peer_endpoints WHERE node_id = ANY (@nodes::text[])`

func writePeer(ctx context.Context, tx pgx.Tx, p *prepared) error {
	if p.Peer == nil {
		return deletePeers(ctx, tx, p.Node)
	}
	_, err := tx.Exec(ctx, writePeerSQL, pgx.StrictNamedArgs{
		"node": p.Node, "cluster": p.Cluster, "backend": p.Peer.Backend, "address": p.Peer.Address,
	})
	if err != nil {
		return fmt.Errorf("write the peer endpoint of %s: %w", p.Node, err)
	}
	return nil
}

func deletePeers(ctx context.Context, tx pgx.Tx, nodes ...node.ID) error {
	if _, err := tx.Exec(ctx, deletePeersSQL, pgx.StrictNamedArgs{"nodes": nodes}); err != nil {
		return fmt.Errorf("delete %d peer endpoints: %w", len(nodes), err)
	}
	return nil
}

// forgetFactsSQL lets the next heartbeats of nodes write their facts, though these are what they were.
const forgetFactsSQL = `
WITH    held AS MATERIALIZED (
        SELECT node_id
        FROM   node_leases
        WHERE  node_id = ANY (@nodes::text[])
        ORDER  BY node_id
        FOR    UPDATE)
UPDATE  node_leases AS l
SET     facts_digest = ''
FROM    held
WHERE   l.node_id = held.node_id`

// forgetPeers forgets where the stores of nodes listen and what they hold. A node that comes back as it
// was is a peer again, and says itself what it holds.
func forgetPeers(ctx context.Context, tx pgx.Tx, nodes ...node.ID) error {
	if _, err := tx.Exec(ctx, forgetFactsSQL, pgx.StrictNamedArgs{"nodes": nodes}); err != nil {
		return fmt.Errorf("forget the facts of %d nodes: %w", len(nodes), err)
	}
	if err := deletePeers(ctx, tx, nodes...); err != nil {
		return err
	}
	return p2p.ForgetNodes(ctx, tx, nodes...)
}

const writeDisksSQL = `
UPDATE  nodes
SET     disks = @disks::jsonb
WHERE   node_id = @node`

// writeDisks is called only where a full comparison is due, so once a minute or so.
func writeDisks(ctx context.Context, tx pgx.Tx, p *prepared) error {
	if p.Snapshot == nil || len(p.Snapshot.Disks) == 0 {
		return nil
	}
	disks := make([]Disk, len(p.Snapshot.Disks))
	for i, d := range p.Snapshot.Disks {
		d.MountPoint, d.Device, d.FilesystemType = storable(d.MountPoint), storable(d.Device), storable(d.FilesystemType)
		disks[i] = d
	}
	if _, err := tx.Exec(ctx, writeDisksSQL, pgx.StrictNamedArgs{"node": p.Node, "disks": disks}); err != nil {
		return fmt.Errorf("write the disks of %s: %w", p.Node, err)
	}
	return nil
}
