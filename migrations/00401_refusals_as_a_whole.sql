-- +goose Up
SET lock_timeout = '50ms';

-- A create may be refused without a word about a node: there is none, or its tenant's quota is used up. It
-- is a row all the same, and a limit of zero is a limit.
CREATE OR REPLACE VIEW placement_refusals AS
SELECT p.placement_id,
       p.created_at,
       p.tenant_id,
       p.outcome,
       p.refusal,
       reason.name AS reason,
       COALESCE(reason.nodes, 0) AS nodes_refused,
       seen.node_id,
       seen.value,
       seen.limit_value
FROM   placements AS p
LEFT   JOIN LATERAL (
       SELECT of_nodes.name, of_nodes.nodes::int AS nodes
       FROM   jsonb_each_text(p.reasons) AS of_nodes (name, nodes)
       UNION  ALL
       SELECT DISTINCT c ->> 'reason', 0
       FROM   jsonb_array_elements(p.candidates) AS c
       WHERE  c ->> 'verdict' = 'refused' AND NOT p.reasons ? (c ->> 'reason')) AS reason ON true
LEFT   JOIN LATERAL (
       SELECT NULLIF(c ->> 'node', '') AS node_id, (c ->> 'value')::float8 AS value,
              CASE WHEN c ? 'value' THEN COALESCE((c ->> 'limit')::float8, 0) END AS limit_value
       FROM   jsonb_array_elements(p.candidates) AS c
       WHERE  c ->> 'verdict' = 'refused' AND c ->> 'reason' = reason.name) AS seen ON true
WHERE  reason.name IS NOT NULL OR p.refusal IS NOT NULL
ORDER  BY p.placement_id DESC, reason.name, seen.node_id;

COMMENT ON COLUMN placement_refusals.reason IS 'Why nodes were passed over: absent, unhealthy, cordoned, a limit''s name and others; or the tenant''s quota; null: there is no node';
COMMENT ON COLUMN placement_refusals.nodes_refused IS 'How many nodes were passed over for this reason; 0: it is no reason of a node';
COMMENT ON COLUMN placement_refusals.node_id IS 'One of them; null: none of them is among those that are kept, or there is none';
COMMENT ON COLUMN placement_refusals.value IS 'What the rule saw on this node, or of this tenant, the create included';

-- +goose Down
SET lock_timeout = '50ms';
CREATE OR REPLACE VIEW placement_refusals AS
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
COMMENT ON COLUMN placement_refusals.reason IS 'Why nodes were passed over: absent, unhealthy, cordoned, a limit''s name and others';
COMMENT ON COLUMN placement_refusals.nodes_refused IS 'How many nodes were passed over for this reason';
COMMENT ON COLUMN placement_refusals.node_id IS 'One of them; null: none of them is among those that are kept';
COMMENT ON COLUMN placement_refusals.value IS 'What the rule saw on this node, the create included';
