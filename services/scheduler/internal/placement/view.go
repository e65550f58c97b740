package placement

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
)

// view is what one goroutine remembers of all nodes. Choices are planned on it and decided on what is
// read under the locks.
type view struct {
	nodes  []*Node // sorted by id
	byID   map[node.ID]*Node
	quotas quotas
	readAt time.Time // when the reading began
	took   time.Duration
	ruled  time.Time // when the quotas were read
	raised []raise   // planned, not committed
}

type raise struct {
	n *Node
	r *Request
}

func (v *view) age() time.Duration {
	if v.readAt.IsZero() {
		return time.Hour
	}
	return time.Since(v.readAt)
}

// stale reports whether all nodes are to be read again.
func (v *view) stale() bool {
	return v.age() > min(max(viewAge, viewShare*v.took), viewAgeMost)
}

// selectSpreadSQL counts bound sandboxes and open holds by spread key: a confirmed hold has a binding.
const selectSpreadSQL = `
SELECT  node_id, spread_key, count(*) AS sandboxes
FROM    (SELECT node_id, spread_key
        FROM   bindings
        WHERE  state = 'bound' AND spread_key <> '' AND spread_key = ANY (@keys::text[])
        UNION  ALL
        SELECT node_id, spread_key
        FROM   reservations
        WHERE  sandbox_id IS NULL AND spread_key = ANY (@keys::text[])) AS placed
GROUP   BY node_id, spread_key`

type spreadRow struct {
	NodeID    node.ID
	SpreadKey string
	Sandboxes int64
}

// refresh reads all nodes, those with limits among the tenants, and what else the requests ask about.
func (v *view) refresh(ctx context.Context, db *pgdb.DB, asked ...*Request) error {
	readAt := time.Now()
	batch := &pgx.Batch{}
	batch.Queue(selectAllNodesSQL)
	batch.Queue(selectQuotasSQL)
	results := db.SendBatch(ctx, batch)
	defer func() { _ = results.Close() }() // an error of the batch was returned by whoever read it
	rows, err := results.Query()
	if err != nil {
		return fmt.Errorf("read all nodes: %w", err)
	}
	nodes, err := scanNodes(rows)
	if err != nil {
		return fmt.Errorf("read all nodes: %w", err)
	}
	if rows, err = results.Query(); err != nil {
		return fmt.Errorf("read quotas: %w", err)
	}
	quotas, err := scanQuotas(rows)
	if err != nil {
		return fmt.Errorf("read quotas: %w", err)
	}
	v.nodes, v.quotas, v.raised, v.readAt, v.took, v.ruled = nodes, quotas, nil, readAt, time.Since(readAt), readAt
	v.byID = make(map[node.ID]*Node, len(nodes))
	for _, n := range nodes {
		v.byID[n.ID] = n
	}
	return v.consult(ctx, db, asked)
}

// consult reads what no node tells about itself, for choices that ask.
func (v *view) consult(ctx context.Context, db *pgdb.DB, asked []*Request) error {
	if err := v.rule(ctx, db); err != nil {
		return err
	}
	if err := v.count(ctx, db, spreadKeys(asked...)); err != nil {
		return err
	}
	return v.hold(ctx, db, asked)
}

// rule reads the quotas again where the nodes need not be read yet: an operator was promised when they hold.
func (v *view) rule(ctx context.Context, db *pgdb.DB) error {
	readAt := time.Now()
	if readAt.Sub(v.ruled) <= viewAge {
		return nil
	}
	rows, err := db.Query(ctx, selectQuotasSQL)
	if err != nil {
		return fmt.Errorf("read quotas: %w", err)
	}
	quotas, err := scanQuotas(rows)
	if err != nil {
		return fmt.Errorf("read quotas: %w", err)
	}
	v.quotas, v.ruled = quotas, readAt
	return nil
}

// count reads how the sandboxes of the spread keys are spread.
func (v *view) count(ctx context.Context, db *pgdb.DB, keys []string) error {
	if len(keys) == 0 {
		return nil
	}
	rows, err := db.Query(ctx, selectSpreadSQL, pgx.StrictNamedArgs{"keys": keys})
	if err != nil {
		return fmt.Errorf("count %d spread keys: %w", len(keys), err)
	}
	counts, err := pgx.CollectRows(rows, pgx.RowToStructByName[spreadRow])
	if err != nil {
		return fmt.Errorf("count %d spread keys: %w", len(keys), err)
	}
	for _, n := range v.nodes {
		n.Spread = nil
	}
	spreadOver(v.byID, counts)
	return nil
}

func spreadOver(nodes map[node.ID]*Node, counts []spreadRow) {
	for _, row := range counts {
		if n := nodes[row.NodeID]; n != nil {
			if n.Spread == nil {
				n.Spread = map[string]int64{}
			}
			n.Spread[row.SpreadKey] = row.Sandboxes
		}
	}
}

// raise counts a planned placement until settle, so that the calls of one batch do not all choose the
// node that is emptiest now.
func (v *view) raise(n *Node, r *Request) {
	n.take(r, 1)
	v.raised = append(v.raised, raise{n, r})
}

// settle takes all raises back and stores what a committed transaction has read and written.
func (v *view) settle(committed map[node.ID]*Node) {
	for _, planned := range v.raised {
		planned.n.take(planned.r, -1)
	}
	v.raised = nil
	for id, fresh := range committed {
		if n := v.byID[id]; n != nil {
			spread, holds := n.Spread, n.Holds
			*n = *fresh
			if n.Spread == nil {
				n.Spread = spread
			}
			n.Holds = holds
		}
	}
}

// take counts r on n times once more (1) or once less (-1).
func (n *Node) take(r *Request, times int64) {
	n.Held = n.Held.add(r.Size, times*int64(r.Count))
	if key := r.Constraints.SpreadKey; key != "" {
		if n.Spread == nil {
			n.Spread = map[string]int64{}
		}
		n.Spread[key] += times * int64(r.Count)
	}
}

func spreadKeys(requests ...*Request) []string {
	var keys []string
	for _, r := range requests {
		if r.Constraints.SpreadKey != "" {
			keys = append(keys, r.Constraints.SpreadKey)
		}
	}
	return keys
}
