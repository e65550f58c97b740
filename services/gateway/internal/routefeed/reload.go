package routefeed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

const (
	fillPage  = 5000
	fillTries = 5
)

// readPositionSQL is where a reader that has nothing begins: all that is visible now is read from
// the tables, all later comes by the feed.
const readPositionSQL = `
SELECT pg_current_snapshot()::text AS position, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint AS lsn`

// resync empties the cache and begins anew: another database, or a gap. Routes come back by look-ups
// and, behind those, in bulk.
func (f *Follower) resync(ctx context.Context, s *session, reason string) error {
	f.metrics.resyncs.WithLabelValues(reason).Inc()
	f.log.InfoContext(ctx, "routes are read anew", slog.String("reason", reason))
	f.stopFilling()
	generation := f.cache.Reset(s.identity)
	f.onKey("")
	f.identity, f.epoch, f.timeline = s.identity, s.epoch, s.timeline
	f.ring.clear()

	began := time.Now()
	if err := f.limited(ctx, func(ctx context.Context) error {
		return s.conn.QueryRow(ctx, readPositionSQL).Scan(&f.position, &f.lsn)
	}); err != nil {
		f.identity = "" // nothing was read: the next connection begins anew too
		return fmt.Errorf("read the feed's position: %w", err)
	}
	if err := f.limited(ctx, func(ctx context.Context) error {
		nodes, err := s.nodes(ctx, nil)
		if err == nil {
			f.cache.ApplyNodes(nodes)
		}
		return err
	}); err != nil {
		f.identity = ""
		return err
	}
	f.good(began)
	f.startFilling(ctx, generation)
	return nil
}

// startFilling reads bound routes in the background, so that a restart does not turn into misses.
func (f *Follower) startFilling(ctx context.Context, generation uint64) {
	if f.cfg.MaxFill <= 0 {
		return
	}
	ctx, f.fill = context.WithCancel(ctx)
	identity := f.identity
	f.filling.Go(func() {
		if err := f.fillRoutes(ctx, generation, identity); err != nil && ctx.Err() == nil {
			f.log.InfoContext(ctx, "routes could not be read in bulk; they are read one by one", slog.Any("error", err))
		}
	})
}

func (f *Follower) stopFilling() {
	if f.fill != nil {
		f.fill()
		f.fill = nil
	}
}

// readRoutesSQL reads a page of bound routes by key, and which database they are of.
const readRoutesSQL = `
WITH    here AS MATERIALIZED (
        SELECT concat_ws('/', (SELECT system_identifier FROM pg_control_system()),
               (SELECT oid FROM pg_database WHERE datname = current_database()),
               substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8), m.epoch) AS identity
        FROM   feed_meta AS m)
SELECT  here.identity, b.sandbox_id, b.node_id, b.revision, b.incarnation, b.tenant_id, b.state
FROM    here
CROSS JOIN (
        SELECT sandbox_id, node_id, revision, incarnation, tenant_id, state
        FROM   bindings
        WHERE  state = 'bound' AND sandbox_id > @after
        ORDER  BY sandbox_id
        LIMIT  @page) AS b
ORDER   BY b.sandbox_id`

type routeRow struct {
	Identity    string
	SandboxID   sandbox.ID
	NodeID      node.ID
	Revision    sandbox.Revision
	Incarnation sandbox.Incarnation
	TenantID    string
	State       sandbox.State
}

// fillRoutes reads up to MaxFill bound routes by key. A page is tried again after a pause.
func (f *Follower) fillRoutes(ctx context.Context, generation uint64, identity string) error {
	after, tries := sandbox.ID(""), 0
	for total := 0; total < f.cfg.MaxFill; {
		routes, err := f.readPage(ctx, after, identity)
		if err != nil {
			if tries++; tries == fillTries {
				return err
			}
			pause(ctx, time.Duration(tries)*200*time.Millisecond)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			continue
		}
		f.cache.Fill(generation, routes)
		if len(routes) < fillPage {
			return nil
		}
		after, tries, total = routes[len(routes)-1].Sandbox, 0, total+len(routes)
	}
	return nil
}

func (f *Follower) readPage(ctx context.Context, after sandbox.ID, identity string) ([]route.Route, error) {
	rows, err := f.db.Query(ctx, readRoutesSQL, pgx.StrictNamedArgs{"after": after, "page": fillPage})
	if err != nil {
		return nil, fmt.Errorf("read routes after %q: %w", after, err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[routeRow])
	if err != nil {
		return nil, fmt.Errorf("read routes after %q: %w", after, err)
	}
	routes := make([]route.Route, len(found))
	for i, row := range found {
		if row.Identity != identity {
			return nil, errors.New("read routes: this is not the database the feed comes from")
		}
		routes[i] = route.Route{
			Sandbox: row.SandboxID, Node: row.NodeID, Revision: row.Revision,
			Incarnation: row.Incarnation, Tenant: row.TenantID, State: row.State,
		}
	}
	return routes, nil
}
