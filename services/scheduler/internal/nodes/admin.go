package nodes

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/scheduler/internal/bindings"
)

// The standings of a node that is not observed, beside the statuses of one that is.
const (
	standingAbsent       = "absent"
	standingUnregistered = "unregistered"
)

// Known is a node as operators see it, whatever its state.
type Known struct {
	ID           node.ID
	Cluster      string
	Endpoint     string
	Source       string
	Standing     string // its effective status, or that it has unregistered, or is absent and was never heard
	Present      bool
	Cordoned     bool
	CordonReason string
	DrainID      int64         // 0: none is open
	LeaseLeft    time.Duration // negative once the lease expired; 0: none, or it unregistered
	LastSeen     time.Time     // zero: never
	Left         bindings.Left
	Labels       map[string]string
	Capabilities []string
	Version      string
}

// selectKnownSQL reads present nodes and those with a live lease, or all there ever were.
const selectKnownSQL = `
SELECT  n.node_id, n.cluster_id, n.endpoint, n.source, n.present, n.cordoned, n.cordon_reason, n.drain_id, n.labels, n.capabilities,
        n.version, n.lingering OR n.cordoned OR n.drain_id IS NOT NULL AS leaving, l.node_id IS NOT NULL AS heard,
        l.ended_at IS NOT NULL AS ended, l.expires_at, l.last_seen_at, COALESCE(l.reported_status, 0) AS reported_status,
        clock_timestamp() AS as_of
FROM    nodes AS n
LEFT JOIN node_leases AS l ON l.node_id = n.node_id
WHERE   (@node::text = '' OR n.node_id = @node) AND (@cluster::text = '' OR n.cluster_id = @cluster)
AND     (@every::boolean OR n.present OR l.ended_at IS NULL AND l.expires_at > clock_timestamp())
ORDER   BY n.node_id`

type knownRow struct {
	NodeID         node.ID
	ClusterID      string
	Endpoint       string
	Source         string
	Present        bool
	Cordoned       bool
	CordonReason   string
	DrainID        *int64
	Labels         map[string]string
	Capabilities   []string
	Version        string
	Leaving        bool
	Heard          bool
	Ended          bool
	ExpiresAt      *time.Time
	LastSeenAt     *time.Time
	ReportedStatus node.Status
	AsOf           time.Time
}

func (r *knownRow) known() Known {
	k := Known{
		ID: r.NodeID, Cluster: r.ClusterID, Endpoint: r.Endpoint, Source: r.Source, Present: r.Present, Cordoned: r.Cordoned,
		CordonReason: r.CordonReason, Labels: r.Labels, Capabilities: r.Capabilities, Version: r.Version,
	}
	if r.DrainID != nil {
		k.DrainID = *r.DrainID
	}
	if r.Heard {
		k.LastSeen = *r.LastSeenAt
	}
	if r.Heard && !r.Ended {
		k.LeaseLeft = r.ExpiresAt.Sub(r.AsOf)
	}
	switch {
	case r.Ended:
		k.Standing = standingUnregistered
	case !r.Heard && !r.Present:
		k.Standing = standingAbsent
	case !r.Heard:
		k.Standing = node.Connecting.String()
	default:
		k.Standing = node.Standing{
			LeaseHeld: k.LeaseLeft > 0, Present: r.Present, Leaving: r.Leaving, Reported: r.ReportedStatus,
		}.Effective().String()
	}
	return k
}

// ListKnown returns nodes by id: those that are present or alive, or with every all there ever were.
// cluster is compared exactly, after trimming; blank means all.
func (n *Nodes) ListKnown(ctx context.Context, cluster string, every bool) ([]Known, error) {
	return n.known(ctx, "", strings.TrimSpace(cluster), every)
}

// GetKnown returns one node, whatever its state. Errors: node.ErrUnknown.
func (n *Nodes) GetKnown(ctx context.Context, id node.ID) (Known, error) {
	found, err := n.known(ctx, id, "", true)
	if err != nil {
		return Known{}, err
	}
	if len(found) == 0 {
		return Known{}, node.ErrUnknown
	}
	return found[0], nil
}

func (n *Nodes) known(ctx context.Context, id node.ID, cluster string, every bool) ([]Known, error) {
	rows, err := n.db.Query(ctx, selectKnownSQL, pgx.StrictNamedArgs{"node": id, "cluster": cluster, "every": every})
	if err != nil {
		return nil, fmt.Errorf("read nodes: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByName[knownRow])
	if err != nil {
		return nil, fmt.Errorf("read nodes: %w", err)
	}
	ids := make([]node.ID, len(list))
	for i, r := range list {
		ids[i] = r.NodeID
	}
	left, err := bindings.CountLeft(ctx, n.db, ids...)
	if err != nil {
		return nil, err
	}
	known := make([]Known, len(list))
	for i, r := range list {
		known[i] = r.known()
		known[i].Left = left[r.NodeID]
	}
	return known, nil
}

// Registration is a node that an operator lists because it cannot announce itself.
type Registration struct {
	Node     node.ID
	Endpoint string
	Labels   map[string]string // empty: those of before stay
}

const registerNodeSQL = `
INSERT  INTO nodes AS n (node_id, endpoint, endpoint_revision, source, labels)
SELECT  @node, @endpoint, @revision, 'registered', @labels::jsonb
ON CONFLICT (node_id) DO UPDATE
SET     endpoint = EXCLUDED.endpoint, endpoint_revision = EXCLUDED.endpoint_revision, source = 'registered', trusted = false,
        labels = CASE WHEN EXCLUDED.labels = '{}' THEN n.labels ELSE EXCLUDED.labels END,
        present = true, gone_at = NULL, changed_at = clock_timestamp()`

// Register lists a node, or lists it again with another endpoint or other labels. Cordon and drain stay as
// they are. Errors: node.ErrBadTag and node.ErrBadEndpoint or route.ErrNotAllowed for what may not be stored;
// node.ErrOtherSource for a node that configuration or discovery lists; node.ErrIDInUse for another endpoint
// than that of a node that is alive.
func (n *Nodes) Register(ctx context.Context, r Registration) error {
	if err := (&Beat{Labels: r.Labels, Endpoint: r.Endpoint}).check(); err != nil {
		return fmt.Errorf("register %s: %w", r.Node, err)
	}
	endpoint, err := n.guard.Check(ctx, r.Endpoint)
	if err != nil {
		return fmt.Errorf("register %s: %w", r.Node, err)
	}
	var (
		announced bool
		noted     []bindings.Event
	)
	err = n.db.Tx(ctx, func(tx pgx.Tx) error {
		announced, noted = false, nil
		known, held, err := lockNode(ctx, tx, r.Node)
		if err != nil {
			return err
		}
		change := bindings.NodeChange{Node: r.Node, Endpoint: endpoint}
		switch {
		case known == nil:
			announced = true
		case known.Present && known.Source != sourceRegistered:
			return node.ErrOtherSource
		case held != nil && held.Live && known.Endpoint != endpoint:
			return node.ErrIDInUse
		default:
			announced = known.Endpoint != endpoint || known.Trusted
			change.Cluster, change.Above = known.ClusterID, known.EndpointRevision
		}
		revision := change.Above
		if announced {
			if revision, err = bindings.AnnounceNode(ctx, tx, change); err != nil {
				return err
			}
		}
		labels := r.Labels
		if labels == nil {
			labels = map[string]string{}
		}
		_, err = tx.Exec(ctx, registerNodeSQL, pgx.StrictNamedArgs{
			"node": r.Node, "endpoint": endpoint, "revision": revision, "labels": labels,
		})
		if err != nil || !announced && known.Present {
			return err
		}
		noted = []bindings.Event{{Kind: bindings.KindRegistered, Cluster: change.Cluster, Node: r.Node, Detail: map[string]any{"by": "operator"}}}
		return bindings.Note(ctx, tx, noted...)
	})
	if err != nil {
		return fmt.Errorf("register %s: %w", r.Node, err)
	}
	n.routes.Count(noted...)
	if announced {
		n.routes.Doorbell().Ring()
	}
	return nil
}

// Remove makes a registered node absent; its row and what is bound to it stay. A second call changes
// nothing. Errors: node.ErrUnknown; node.ErrLeaseLives while it is alive; node.ErrOtherSource for a node that
// configuration or discovery lists, and would list again.
func (n *Nodes) Remove(ctx context.Context, id node.ID) error {
	var noted []bindings.Event
	err := n.db.Tx(ctx, func(tx pgx.Tx) error {
		noted = nil
		known, held, err := lockNode(ctx, tx, id)
		switch {
		case err != nil:
			return err
		case known == nil:
			return node.ErrUnknown
		case !known.Present:
			return nil
		case known.Source != sourceRegistered:
			return node.ErrOtherSource
		case held != nil && held.Live:
			return node.ErrLeaseLives
		}
		if err := leave(ctx, tx, []node.ID{id}); err != nil {
			return err
		}
		noted = []bindings.Event{{Kind: bindings.KindRemoved, Cluster: known.ClusterID, Node: id, Detail: map[string]any{"by": "operator"}}}
		return bindings.Note(ctx, tx, noted...)
	})
	if err != nil {
		return fmt.Errorf("remove %s: %w", id, err)
	}
	n.routes.Count(noted...)
	return nil
}
