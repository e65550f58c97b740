-- +goose Up
SET lock_timeout = '50ms';

-- What operators ask, asked once. A view has no create keys, hashes, answers or labels in it, so that whoever may
-- look may look at all of it. docs/sql.md has examples.

-- A node as others may act on it now: scheduler.v1's effective status on the database's clock, the first that
-- applies, and a word for who is not observed.
CREATE VIEW node_standing AS
SELECT n.node_id,
       n.endpoint,
       CASE WHEN l.ended_at IS NOT NULL THEN 'unregistered'
            WHEN l.node_id IS NULL AND NOT n.present THEN 'absent'
            WHEN l.node_id IS NULL THEN 'connecting'
            WHEN l.expires_at <= clock_timestamp() THEN 'unhealthy'
            WHEN NOT n.present THEN 'connecting'
            WHEN n.lingering OR n.cordoned OR n.drain_id IS NOT NULL THEN 'lingering'
            WHEN l.reported_status = 1 THEN 'ready'
            WHEN l.reported_status = 3 THEN 'unhealthy'
            WHEN l.reported_status = 4 THEN 'lingering'
            ELSE 'connecting' END AS status
FROM   nodes AS n
LEFT   JOIN node_leases AS l ON l.node_id = n.node_id;

COMMENT ON VIEW node_standing IS 'Nodes: where each is reached and whether others may act on it';
COMMENT ON COLUMN node_standing.node_id IS 'The node';
COMMENT ON COLUMN node_standing.endpoint IS 'Where gateways reach it';
COMMENT ON COLUMN node_standing.status IS 'ready, connecting, unhealthy or lingering; unregistered after it said goodbye; absent when never heard and not listed';

-- A node and all that is on it.
CREATE VIEW node_overview AS
SELECT n.node_id,
       n.cluster_id,
       n.endpoint,
       n.source,
       n.present,
       s.status,
       l.service_instance_id,
       l.epoch,
       l.last_seen_at,
       CASE WHEN l.ended_at IS NULL THEN l.expires_at - clock_timestamp() END AS lease_left,
       make_interval(secs => l.skew_ms::float8 / 1000) AS clock_skew,
       l.cpu_percent,
       l.cpu_count,
       l.allocated_cpu,
       l.memory_used_bytes,
       l.memory_total_bytes,
       l.allocated_memory_bytes,
       l.sandbox_count,
       l.sandbox_starting_count,
       l.paused_sandbox_count,
       bound.sandboxes AS bound_sandboxes,
       held.open AS open_holds,
       held.confirmed AS confirmed_holds,
       held.cpu_millis AS held_cpu_millis,
       held.memory_bytes AS held_memory_bytes,
       orphan.sandboxes AS orphans,
       n.lingering,
       n.cordoned,
       n.cordon_reason,
       d.drain_id,
       d.state AS drain_state,
       d.mode AS drain_mode,
       d.deadline_at - clock_timestamp() AS drain_deadline_left,
       n.version,
       n.cpu_config_error
FROM   nodes AS n
JOIN   node_standing AS s ON s.node_id = n.node_id
LEFT   JOIN node_leases AS l ON l.node_id = n.node_id
LEFT   JOIN drains AS d ON d.node_id = n.node_id AND d.ended_at IS NULL
CROSS  JOIN LATERAL (
       SELECT count(*) AS sandboxes FROM bindings AS b WHERE b.node_id = n.node_id AND b.state = 'bound') AS bound
CROSS  JOIN LATERAL (
       SELECT count(*) FILTER (WHERE r.sandbox_id IS NULL) AS open, count(r.sandbox_id) AS confirmed,
              COALESCE(sum(r.cpu_millis), 0) AS cpu_millis, COALESCE(sum(r.memory_bytes), 0) AS memory_bytes
       FROM   reservations AS r WHERE r.node_id = n.node_id) AS held
CROSS  JOIN LATERAL (
       SELECT count(*) AS sandboxes FROM orphans AS o WHERE o.node_id = n.node_id) AS orphan;

COMMENT ON VIEW node_overview IS 'Nodes: effective status, lease, load, holds, bound sandboxes, orphans, cordon and drain';
COMMENT ON COLUMN node_overview.node_id IS 'The node';
COMMENT ON COLUMN node_overview.cluster_id IS 'Its cluster; blank until the first heartbeat';
COMMENT ON COLUMN node_overview.endpoint IS 'Where gateways reach it';
COMMENT ON COLUMN node_overview.source IS 'Who listed it: static, kubernetes, registered';
COMMENT ON COLUMN node_overview.present IS 'Whether its source lists it now';
COMMENT ON COLUMN node_overview.status IS 'Its status, as node_standing has it';
COMMENT ON COLUMN node_overview.service_instance_id IS 'The process that holds its lease';
COMMENT ON COLUMN node_overview.epoch IS 'How many processes have had its lease, this one included';
COMMENT ON COLUMN node_overview.last_seen_at IS 'Its last heartbeat, on the database''s clock';
COMMENT ON COLUMN node_overview.lease_left IS 'Until it counts as unhealthy; negative: since then; null: never heard, or unregistered';
COMMENT ON COLUMN node_overview.clock_skew IS 'Its clock less the database''s, when it last reported; shown, never compared';
COMMENT ON COLUMN node_overview.cpu_percent IS 'CPU in use, as it reports';
COMMENT ON COLUMN node_overview.cpu_count IS 'Its vCPUs';
COMMENT ON COLUMN node_overview.allocated_cpu IS 'vCPUs given to sandboxes, as it reports';
COMMENT ON COLUMN node_overview.memory_used_bytes IS 'Memory in use, as it reports';
COMMENT ON COLUMN node_overview.memory_total_bytes IS 'Its memory';
COMMENT ON COLUMN node_overview.allocated_memory_bytes IS 'Memory given to sandboxes, as it reports';
COMMENT ON COLUMN node_overview.sandbox_count IS 'Running sandboxes, as it reports';
COMMENT ON COLUMN node_overview.sandbox_starting_count IS 'Sandboxes that are being created or resumed, as it reports';
COMMENT ON COLUMN node_overview.paused_sandbox_count IS 'Paused sandboxes, as it reports';
COMMENT ON COLUMN node_overview.bound_sandboxes IS 'Sandboxes that gateways route to it';
COMMENT ON COLUMN node_overview.open_holds IS 'Room promised to creates that are under way';
COMMENT ON COLUMN node_overview.confirmed_holds IS 'Sandboxes it does not report yet';
COMMENT ON COLUMN node_overview.held_cpu_millis IS 'Thousandths of a core in both kinds of holds';
COMMENT ON COLUMN node_overview.held_memory_bytes IS 'Memory in both kinds of holds';
COMMENT ON COLUMN node_overview.orphans IS 'Sandboxes it lists that may not be bound there; table orphans names them';
COMMENT ON COLUMN node_overview.lingering IS 'Its source says that it is leaving';
COMMENT ON COLUMN node_overview.cordoned IS 'An operator closed it for creates';
COMMENT ON COLUMN node_overview.cordon_reason IS 'Why it is cordoned';
COMMENT ON COLUMN node_overview.drain_id IS 'Its open drain';
COMMENT ON COLUMN node_overview.drain_state IS 'closing while holds made before may still become sandboxes, then draining';
COMMENT ON COLUMN node_overview.drain_mode IS 'wait, move or park';
COMMENT ON COLUMN node_overview.drain_deadline_left IS 'Until the drain expires, or parks what is left; null: no deadline';
COMMENT ON COLUMN node_overview.version IS 'The agent''s version';
COMMENT ON COLUMN node_overview.cpu_config_error IS 'Why its CPU configuration cannot be read; blank: it can';

-- A sandbox and where it lives, whatever its state.
CREATE VIEW binding_overview AS
SELECT b.sandbox_id,
       b.state,
       b.tenant_id,
       b.node_id,
       b.cluster_id,
       n.endpoint AS node_endpoint,
       n.status AS node_status,
       b.revision,
       b.incarnation,
       b.origin,
       b.cpu_millis,
       b.memory_bytes,
       b.placement_id,
       b.bound_at,
       clock_timestamp() - b.bound_at AS age,
       b.ended_at,
       b.ended_by,
       r.sandbox_id IS NOT NULL AS held
FROM   bindings AS b
LEFT   JOIN node_standing AS n ON n.node_id = b.node_id
LEFT   JOIN reservations AS r ON r.sandbox_id = b.sandbox_id;

COMMENT ON VIEW binding_overview IS 'Sandboxes: where each lives or lived, whose it is, and how its node is';
COMMENT ON COLUMN binding_overview.sandbox_id IS 'The sandbox';
COMMENT ON COLUMN binding_overview.state IS 'bound: routed to its node; parked: its node left, the next roster that lists it brings it back; gone: ended';
COMMENT ON COLUMN binding_overview.tenant_id IS 'Whose it is; blank: not known';
COMMENT ON COLUMN binding_overview.node_id IS 'The node that has it, or had it last';
COMMENT ON COLUMN binding_overview.cluster_id IS 'That node''s cluster when it was bound';
COMMENT ON COLUMN binding_overview.node_endpoint IS 'Where gateways reach that node now';
COMMENT ON COLUMN binding_overview.node_status IS 'That node''s status, as node_standing has it';
COMMENT ON COLUMN binding_overview.revision IS 'Grows with every change that gateways must see';
COMMENT ON COLUMN binding_overview.incarnation IS 'Which start of the sandbox is meant';
COMMENT ON COLUMN binding_overview.origin IS 'Who told of it first: recorded by a gateway, event of its node, adopted from a roster';
COMMENT ON COLUMN binding_overview.cpu_millis IS 'Its size in thousandths of a core; 0: not told';
COMMENT ON COLUMN binding_overview.memory_bytes IS 'Its memory; 0: not told';
COMMENT ON COLUMN binding_overview.placement_id IS 'The placement that chose its node; null: none is known';
COMMENT ON COLUMN binding_overview.bound_at IS 'Since when it is bound there';
COMMENT ON COLUMN binding_overview.age IS 'How long ago that was';
COMMENT ON COLUMN binding_overview.ended_at IS 'Since when it is parked or gone';
COMMENT ON COLUMN binding_overview.ended_by IS 'Why: deleted, suspended, event, roster, unregistered, node_gone, drain';
COMMENT ON COLUMN binding_overview.held IS 'Its room is held because its node does not report it yet';

-- What is known of a sandbox, in order: the placement that chose a node for it, what its nodes told and the
-- scheduler did, and where it stands now.
CREATE VIEW sandbox_timeline AS
SELECT e.sandbox_id,
       e.at,
       CASE e.source WHEN 'node' THEN 'event' ELSE 'scheduler' END AS source,
       e.kind AS what,
       e.effect,
       e.node_id,
       NULL::bigint AS revision,
       e.detail,
       2 AS rank,
       e.event_id AS place
FROM   sandbox_events AS e
WHERE  e.sandbox_id <> ''
UNION  ALL
SELECT placed.sandbox_id,
       p.created_at,
       'placement',
       'placed',
       p.outcome,
       p.node_id,
       NULL,
       jsonb_build_object('placement_id', p.placement_id, 'strategy', p.strategy, 'tries', p.tries),
       1,
       p.placement_id
FROM   placements AS p
CROSS  JOIN LATERAL unnest(p.sandbox_ids) AS placed (sandbox_id)
WHERE  p.node_id IS NOT NULL
UNION  ALL
SELECT b.sandbox_id,
       b.bound_at,
       'binding',
       'bound',
       b.origin,
       b.node_id,
       CASE WHEN b.state = 'bound' THEN b.revision END,
       jsonb_build_object('incarnation', b.incarnation),
       3,
       0
FROM   bindings AS b
UNION  ALL
SELECT b.sandbox_id,
       b.ended_at,
       'binding',
       b.state,
       b.ended_by,
       b.node_id,
       b.revision,
       jsonb_build_object('incarnation', b.incarnation),
       4,
       0
FROM   bindings AS b
WHERE  b.state <> 'bound';

COMMENT ON VIEW sandbox_timeline IS 'What happened to a sandbox: ask for one sandbox_id, ordered by at, rank, place';
COMMENT ON COLUMN sandbox_timeline.sandbox_id IS 'The sandbox';
COMMENT ON COLUMN sandbox_timeline.at IS 'When, on the database''s clock';
COMMENT ON COLUMN sandbox_timeline.source IS 'placement: chosen for it; event: its node told; scheduler: done about it; binding: how it stands';
COMMENT ON COLUMN sandbox_timeline.what IS 'placed; create, fork, pause, resume, delete; adopted, moved, revived, parked, gone, orphan; bound';
COMMENT ON COLUMN sandbox_timeline.effect IS 'What came of it, or why';
COMMENT ON COLUMN sandbox_timeline.node_id IS 'On which node';
COMMENT ON COLUMN sandbox_timeline.revision IS 'The binding''s revision now; null: it is of the past';
COMMENT ON COLUMN sandbox_timeline.detail IS 'More, by source';
COMMENT ON COLUMN sandbox_timeline.rank IS 'Order within one moment: placement, event, binding';
COMMENT ON COLUMN sandbox_timeline.place IS 'Order within one moment and rank';

-- Why nodes did not get creates: one row for each node that was looked at and refused, and one for each
-- reason that no row of candidates has, for only twenty of them are kept.
CREATE VIEW placement_refusals AS
SELECT p.placement_id,
       p.created_at,
       p.tenant_id,
       p.outcome,
       p.refusal,
       reason.name AS reason,
       reason.nodes::int AS nodes_refused,
       seen.node_id,
       seen.value,
       seen.limit_value
FROM   placements AS p
CROSS  JOIN LATERAL jsonb_each_text(p.reasons) AS reason (name, nodes)
LEFT   JOIN LATERAL (
       SELECT c ->> 'node' AS node_id, (c ->> 'value')::float8 AS value, (c ->> 'limit')::float8 AS limit_value
       FROM   jsonb_array_elements(p.candidates) AS c
       WHERE  c ->> 'verdict' = 'refused' AND c ->> 'reason' = reason.name) AS seen ON true
ORDER  BY p.placement_id DESC, reason.name, seen.node_id;

COMMENT ON VIEW placement_refusals IS 'Why nodes did not get creates, newest first: each reason of each placement with the nodes that are known';
COMMENT ON COLUMN placement_refusals.placement_id IS 'The placement';
COMMENT ON COLUMN placement_refusals.created_at IS 'When it was asked for';
COMMENT ON COLUMN placement_refusals.tenant_id IS 'Whose create it is; blank: not told';
COMMENT ON COLUMN placement_refusals.outcome IS 'What became of it; refused: no node took it';
COMMENT ON COLUMN placement_refusals.refusal IS 'Why it was refused as a whole; null: it was placed';
COMMENT ON COLUMN placement_refusals.reason IS 'Why nodes were passed over: absent, unhealthy, cordoned, a limit''s name and others';
COMMENT ON COLUMN placement_refusals.nodes_refused IS 'How many nodes were passed over for this reason';
COMMENT ON COLUMN placement_refusals.node_id IS 'One of them; null: none of them is among those that are kept';
COMMENT ON COLUMN placement_refusals.value IS 'What the rule saw on this node, the create included';
COMMENT ON COLUMN placement_refusals.limit_value IS 'What it allows';

GRANT SELECT ON node_standing, node_overview, binding_overview, sandbox_timeline, placement_refusals TO berth_console;

-- +goose Down
SET lock_timeout = '50ms';
DROP VIEW placement_refusals;
DROP VIEW sandbox_timeline;
DROP VIEW binding_overview;
DROP VIEW node_overview;
DROP VIEW node_standing;
