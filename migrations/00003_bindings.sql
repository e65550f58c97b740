-- +goose Up
SET lock_timeout = '50ms';

-- Which node a sandbox lives on. Every change of state or node raises the revision and writes the
-- feed in the same transaction. There is no foreign key to nodes: the table is hot, and a node that
-- is named here is never deleted.
CREATE TABLE bindings (
  sandbox_id text COLLATE "C" PRIMARY KEY
    CONSTRAINT bindings_sandbox_id_is_label CHECK (sandbox_id ~ '^[a-z0-9]([a-z0-9-]{0,55}[a-z0-9])?$'),
  state text NOT NULL CONSTRAINT bindings_state_is_known CHECK (state IN ('bound', 'parked', 'gone')),
  node_id text COLLATE "C" NOT NULL
    CONSTRAINT bindings_node_id_is_name CHECK (length(node_id) <= 253
      AND node_id ~ '^[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*$'),
  cluster_id text COLLATE "C" NOT NULL DEFAULT ''
    CONSTRAINT bindings_cluster_id_is_short CHECK (octet_length(cluster_id) <= 128),
  revision bigint NOT NULL DEFAULT nextval('revisions'),
  incarnation bigint NOT NULL DEFAULT 1 CONSTRAINT bindings_incarnation_counts CHECK (incarnation > 0),
  origin text NOT NULL CONSTRAINT bindings_origin_is_known CHECK (origin IN ('recorded', 'event', 'adopted')),
  tenant_id text COLLATE "C" NOT NULL DEFAULT ''
    CONSTRAINT bindings_tenant_id_is_short CHECK (octet_length(tenant_id) <= 128),
  spread_key text COLLATE "C" NOT NULL DEFAULT ''
    CONSTRAINT bindings_spread_key_is_short CHECK (octet_length(spread_key) <= 255),
  cpu_millis bigint NOT NULL DEFAULT 0,
  memory_bytes bigint NOT NULL DEFAULT 0,
  placement_id bigint,
  bound_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  ended_at timestamptz,
  ended_by text CONSTRAINT bindings_ended_by_is_known
    CHECK (ended_by IN ('deleted', 'suspended', 'event', 'roster', 'unregistered', 'node_gone', 'drain')),
  CONSTRAINT bindings_ended_has_reason CHECK ((state = 'bound') = (ended_at IS NULL) AND (state = 'bound') = (ended_by IS NULL))
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX bindings_node ON bindings (node_id) WHERE state = 'bound';
CREATE INDEX bindings_ended ON bindings (ended_at) WHERE state <> 'bound';
CREATE INDEX bindings_tenant ON bindings (tenant_id) INCLUDE (cpu_millis, memory_bytes)
  WHERE state = 'bound' AND tenant_id <> '';
CREATE INDEX bindings_spread ON bindings (spread_key, node_id) WHERE state = 'bound' AND spread_key <> '';
GRANT SELECT, INSERT, UPDATE, DELETE ON bindings TO berth_scheduler;
GRANT SELECT ON bindings TO berth_gateway, berth_sessions;

-- +goose Down
SET lock_timeout = '50ms';
DROP TABLE bindings;
