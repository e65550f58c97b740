-- +goose Up
SET lock_timeout = '50ms';

-- 64 bits so that ids need no registry: 8 of class, 56 of hash. Classes never meet, and ascending
-- keys are the order in which locks are taken.
CREATE FUNCTION lock_key(class int, id text) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (class::bigint << 56) | (hashtextextended(id, 0) & 72057594037927935);

-- For bindings and endpoints: an id that returns after its tombstone is gone still gets a higher one.
CREATE SEQUENCE revisions;
GRANT USAGE ON SEQUENCE revisions TO berth_scheduler;

-- Discovery, registration, facts that changed, cordon, drain; never a plain heartbeat. Node ids are
-- unique in the database, so no key has a cluster in it. cluster_id is '' until the first heartbeat.
CREATE TABLE nodes (
  node_id text COLLATE "C" PRIMARY KEY
    CONSTRAINT nodes_node_id_is_name CHECK (length(node_id) <= 253
      AND node_id ~ '^[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*$'),
  cluster_id text COLLATE "C" NOT NULL DEFAULT ''
    CONSTRAINT nodes_cluster_id_is_short CHECK (octet_length(cluster_id) <= 128),
  endpoint text NOT NULL,
  endpoint_revision bigint NOT NULL DEFAULT nextval('revisions'),
  source text NOT NULL CONSTRAINT nodes_source_is_known CHECK (source IN ('static', 'kubernetes', 'registered')),
  trusted boolean NOT NULL DEFAULT false,
  capabilities text[] NOT NULL DEFAULT '{}',
  present boolean NOT NULL DEFAULT true,
  gone_at timestamptz,
  lingering boolean NOT NULL DEFAULT false,
  cordoned boolean NOT NULL DEFAULT false,
  cordon_reason text NOT NULL DEFAULT '',
  drain_id bigint,
  labels jsonb NOT NULL DEFAULT '{}',
  version text NOT NULL DEFAULT '',
  commit text NOT NULL DEFAULT '',
  machine_info jsonb,
  cpu_config_json text NOT NULL DEFAULT '',
  cpu_config_error text NOT NULL DEFAULT '',
  disks jsonb,                               -- written once a minute at most
  cap_sandboxes int,
  cap_cpu_millis bigint,
  cap_memory_bytes bigint,
  changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT nodes_gone_has_time CHECK (present = (gone_at IS NULL)),
  CONSTRAINT nodes_trusted_is_static CHECK (NOT trusted OR source = 'static')
);
GRANT SELECT, INSERT, UPDATE, DELETE ON nodes TO berth_scheduler;
GRANT SELECT ON nodes TO berth_gateway;

-- All that a plain heartbeat writes. What moves stands together, and there is no index but the key,
-- so that a renewal is a small HOT update: nothing a heartbeat writes is indexed, ever.
CREATE TABLE node_leases (
  expires_at timestamptz NOT NULL,
  last_seen_at timestamptz NOT NULL,
  reported_at_unix_ms bigint NOT NULL,
  node_seq bigint NOT NULL DEFAULT 0,
  create_successes bigint NOT NULL DEFAULT 0,
  create_fails bigint NOT NULL DEFAULT 0,
  memory_used_bytes bigint NOT NULL DEFAULT 0,
  allocated_memory_bytes bigint NOT NULL DEFAULT 0,
  paused_allocated_memory_bytes bigint NOT NULL DEFAULT 0,
  skew_ms int,
  cpu_percent int NOT NULL DEFAULT 0,
  allocated_cpu int NOT NULL DEFAULT 0,
  sandbox_count int NOT NULL DEFAULT 0,
  sandbox_starting_count int NOT NULL DEFAULT 0,
  paused_sandbox_count int NOT NULL DEFAULT 0,
  paused_allocated_cpu int NOT NULL DEFAULT 0,
  reported_status smallint NOT NULL DEFAULT 0,
  has_snapshot boolean NOT NULL DEFAULT false,
  cpu_count int NOT NULL DEFAULT 0,
  memory_total_bytes bigint NOT NULL DEFAULT 0,
  epoch bigint NOT NULL DEFAULT 1,
  event_seq bigint NOT NULL DEFAULT 0,
  ended_at timestamptz,
  reconcile_due timestamptz NOT NULL DEFAULT '-infinity',
  facts_digest bytea NOT NULL,
  roster_digest bytea NOT NULL,
  template_sent bytea NOT NULL DEFAULT '',
  node_id text COLLATE "C" PRIMARY KEY REFERENCES nodes,
  service_instance_id text COLLATE "C" NOT NULL
    CONSTRAINT node_leases_instance_is_short CHECK (octet_length(service_instance_id) BETWEEN 1 AND 128),
  place text NOT NULL,
  retired text[] NOT NULL DEFAULT '{}' CONSTRAINT node_leases_retired_is_short CHECK (cardinality(retired) <= 8)
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500,
        autovacuum_vacuum_cost_delay = 0);
GRANT SELECT, INSERT, UPDATE, DELETE ON node_leases TO berth_scheduler;
GRANT SELECT ON node_leases TO berth_gateway;

-- Where a node's peer-to-peer store listens; not its HTTP endpoint. Written with changed facts.
CREATE TABLE peer_endpoints (
  node_id text COLLATE "C" PRIMARY KEY REFERENCES nodes,
  cluster_id text COLLATE "C" NOT NULL
    CONSTRAINT peer_endpoints_cluster_id_is_short CHECK (octet_length(cluster_id) <= 128),
  backend text COLLATE "C" NOT NULL
    CONSTRAINT peer_endpoints_has_backend CHECK (backend <> '' AND octet_length(backend) <= 128),
  address text NOT NULL CONSTRAINT peer_endpoints_has_address CHECK (address <> '')
);
GRANT SELECT, INSERT, UPDATE, DELETE ON peer_endpoints TO berth_scheduler;
GRANT SELECT ON peer_endpoints TO berth_gateway;

-- +goose Down
SET lock_timeout = '50ms';
DROP TABLE peer_endpoints;
DROP TABLE node_leases;
DROP TABLE nodes;
DROP SEQUENCE revisions;
DROP FUNCTION lock_key(int, text);
