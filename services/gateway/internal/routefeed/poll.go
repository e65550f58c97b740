package routefeed

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/gateway/internal/routecache"
	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// readIdentitySQL tells which database this is. The timeline comes from the name of the log file,
// which a promotion changes at once; the call fails on a standby.
const readIdentitySQL = `
SELECT  m.epoch::text AS epoch, substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) AS timeline,
        concat_ws('/', (SELECT system_identifier FROM pg_control_system()),
        (SELECT oid FROM pg_database WHERE datname = current_database()),
        substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8), m.epoch) AS identity
FROM    feed_meta AS m`

// pollFeedSQL reads what is visible now and was not at position: one statement, one snapshot. There
// is always a row, with NULLs where nothing is new.
const pollFeedSQL = `
SELECT  m.epoch::text AS epoch, substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) AS timeline,
        pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint AS lsn, pg_current_snapshot()::text AS position,
        pg_snapshot_xmin(@position::pg_snapshot) < m.floor AS gone,
        f.kind, f.key, f.revision, f.state, f.node_id, f.incarnation, f.tenant_id
FROM    feed_meta AS m
LEFT JOIN route_feed AS f
ON      f.xid >= pg_snapshot_xmin(@position::pg_snapshot) AND NOT pg_visible_in_snapshot(f.xid, @position::pg_snapshot)`

type feedRow struct {
	Epoch       string
	Timeline    string
	LSN         int64
	Position    string
	Gone        bool
	Kind        *string
	Key         *string
	Revision    *sandbox.Revision
	State       *sandbox.State
	NodeID      *node.ID
	Incarnation *sandbox.Incarnation
	TenantID    *string
}

// polled is what one poll found.
type polled struct {
	epoch, timeline, position string
	lsn                       int64
	gone                      bool // rows after the position have been deleted
	routes                    []route.Route
	nodes                     []node.ID
	keys                      []string
	kinds                     map[string]int
}

// session is one connection to the feed.
type session struct {
	conn                      *pgx.Conn
	identity, epoch, timeline string
}

// close ends the connection, also where ctx has ended.
func (s *session) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = s.conn.Close(ctx)
}

const listenRouteSQL = `LISTEN route`

// listen asks for the doorbell. It comes before the first read, so that no change falls between.
func (s *session) listen(ctx context.Context) error {
	if _, err := s.conn.Exec(ctx, listenRouteSQL); err != nil {
		return fmt.Errorf("listen for the doorbell: %w", err)
	}
	return nil
}

// identify reads which database this is.
func (s *session) identify(ctx context.Context) error {
	err := s.conn.QueryRow(ctx, readIdentitySQL).Scan(&s.epoch, &s.timeline, &s.identity)
	if err != nil {
		return fmt.Errorf("read the database's identity: %w", err)
	}
	return nil
}

// poll reads the rows after position.
func (s *session) poll(ctx context.Context, sql, position string) (polled, error) {
	rows, err := s.conn.Query(ctx, sql, pgx.StrictNamedArgs{"position": position})
	if err != nil {
		return polled{}, fmt.Errorf("poll the route feed: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[feedRow])
	if err != nil {
		return polled{}, fmt.Errorf("poll the route feed: %w", err)
	}
	if len(found) == 0 {
		return polled{}, errors.New("poll the route feed: feed_meta has no row")
	}
	head := found[0]
	p := polled{
		epoch: head.Epoch, timeline: head.Timeline, position: head.Position, lsn: head.LSN, gone: head.Gone,
		kinds: map[string]int{},
	}
	for _, row := range found {
		if row.Kind != nil {
			p.take(row)
		}
	}
	return p, nil
}

func (p *polled) take(row feedRow) {
	kind := *row.Kind
	switch kind {
	case route.KindBinding:
		p.routes = append(p.routes, route.Route{
			Sandbox: sandbox.ID(*row.Key), Node: *row.NodeID, Revision: *row.Revision,
			Incarnation: *row.Incarnation, Tenant: *row.TenantID, State: *row.State,
		})
	case route.KindNode:
		p.nodes = append(p.nodes, node.ID(*row.Key))
	case route.KindKey:
		p.keys = append(p.keys, *row.Key)
	case route.KindPeer: // gateways have no use for peers
	default:
		kind = "unknown"
	}
	p.kinds[kind]++
}

// wait waits for the doorbell until a moment, and swallows all rings that have queued up. It tells
// what woke it: bell or timer.
func (s *session) wait(ctx context.Context, until time.Time) (woke string, err error) {
	limited, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	_, err = s.conn.WaitForNotification(limited)
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case err == nil:
		woke = "bell"
	case limited.Err() != nil && !s.conn.IsClosed():
		return "timer", nil
	default:
		return "", fmt.Errorf("wait for the doorbell: %w", err)
	}
	over, end := context.WithCancel(ctx)
	end()
	for err == nil { // a context that has ended takes what has queued up and reads nothing
		_, err = s.conn.WaitForNotification(over)
	}
	return woke, nil
}

const readNodesSQL = `
SELECT  node_id, endpoint, capabilities, trusted, endpoint_revision
FROM    nodes
WHERE   node_id = ANY (@nodes::text[])`

const readAllNodesSQL = `
SELECT  node_id, endpoint, capabilities, trusted, endpoint_revision
FROM    nodes`

type nodeRow struct {
	NodeID           node.ID
	Endpoint         string
	Capabilities     []string
	Trusted          bool
	EndpointRevision int64
}

// nodes reads the nodes with these ids, all of them if ids is nil. A node whose endpoint is none is
// left out: nothing can be sent there.
func (s *session) nodes(ctx context.Context, ids []node.ID) ([]*routecache.Node, error) {
	sql, args := readAllNodesSQL, []any(nil)
	if ids != nil {
		sql, args = readNodesSQL, []any{pgx.StrictNamedArgs{"nodes": ids}}
	}
	rows, err := s.conn.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("read nodes: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[nodeRow])
	if err != nil {
		return nil, fmt.Errorf("read nodes: %w", err)
	}
	nodes := make([]*routecache.Node, 0, len(found))
	for _, row := range found {
		if n, err := routecache.NewNode(row.NodeID, row.Endpoint, row.Capabilities, row.Trusted, row.EndpointRevision); err == nil {
			nodes = append(nodes, n)
		}
	}
	return nodes, nil
}
