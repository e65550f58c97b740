package routecache

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/route"
)

// Node is what a gateway knows of a node: where it is dialled and what it can. It is immutable.
type Node struct {
	ID           node.ID
	Endpoint     string // as registered: "http://10.0.0.1:8000"
	Scheme       string // http or https
	Address      string // host:port, what is dialled
	Capabilities []string
	Trusted      bool // the operator's word: its address is dialled without the endpoint guard
	Revision     int64

	// Asked for on every request, so they are not searched for.
	Revisions bool // it refuses a stale revision
	H2C       bool // it speaks HTTP/2 without TLS
}

// NewNode returns the node of a row. The error says that its endpoint is none.
func NewNode(id node.ID, endpoint string, capabilities []string, trusted bool, revision int64) (*Node, error) {
	u, err := url.Parse(endpoint)
	if err != nil || u.Port() == "" || u.Hostname() == "" {
		return nil, fmt.Errorf("node %s: endpoint is no URL with host and port", id)
	}
	return &Node{
		ID: id, Endpoint: endpoint, Scheme: u.Scheme, Address: net.JoinHostPort(u.Hostname(), u.Port()),
		Capabilities: capabilities, Trusted: trusted, Revision: revision,
		Revisions: slices.Contains(capabilities, route.CapabilityRouteRevision),
		H2C:       slices.Contains(capabilities, route.CapabilityH2C),
	}, nil
}

// Can tells whether the node announced a capability.
func (n *Node) Can(capability string) bool { return slices.Contains(n.Capabilities, capability) }

const readNodeSQL = `
SELECT  n.node_id, n.endpoint, n.capabilities, n.trusted, n.endpoint_revision,
        coalesce(l.ended_at IS NULL AND l.expires_at > clock_timestamp(), false) AS lease_held
FROM    nodes AS n
LEFT JOIN node_leases AS l ON l.node_id = n.node_id
WHERE   n.node_id = @node`

type nodeRow struct {
	NodeID           node.ID
	Endpoint         string
	Capabilities     []string
	Trusted          bool
	EndpointRevision int64
	LeaseHeld        bool
}

// readNode reads one node now; node.ErrNotObserved if there is none.
func (c *Cache) readNode(ctx context.Context, id node.ID) (n *Node, leaseHeld bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.LookupTimeout)
	defer cancel()
	rows, err := c.db.Query(ctx, readNodeSQL, pgx.StrictNamedArgs{"node": id})
	if err != nil {
		return nil, false, fmt.Errorf("read node %s: %w: %w", id, ErrUnavailable, err)
	}
	row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[nodeRow])
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, false, node.ErrNotObserved
	case err != nil:
		return nil, false, fmt.Errorf("read node %s: %w: %w", id, ErrUnavailable, err)
	}
	n, err = NewNode(row.NodeID, row.Endpoint, row.Capabilities, row.Trusted, row.EndpointRevision)
	if err != nil {
		return nil, false, err
	}
	return n, row.LeaseHeld, nil
}

// Node returns what is known of a node, reading its row if nothing is. Errors: node.ErrNotObserved,
// ErrUnavailable.
func (c *Cache) Node(ctx context.Context, id node.ID) (*Node, error) {
	if n := c.nodes.get(id); n != nil {
		return n, nil
	}
	generation := c.generation.Load()
	n, _, err := c.readNode(ctx, id)
	if err != nil {
		return nil, err
	}
	return c.storeNode(generation, n), nil
}

// Nodes returns all that are known, in no order.
func (c *Cache) Nodes() []*Node { return c.nodes.all() }

// Trusted tells whether address, as host:port, is that of a trusted node.
func (c *Cache) Trusted(address string) bool { return c.nodes.trustedAddress(address) }

// storeNode keeps n unless the generation has ended or something newer is known, and returns what
// is known then.
func (c *Cache) storeNode(generation uint64, n *Node) *Node {
	c.resetting.RLock()
	defer c.resetting.RUnlock()
	if generation != c.generation.Load() {
		return n
	}
	return c.nodes.put(n)
}
