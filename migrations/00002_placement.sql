-- +goose Up
SET lock_timeout = '50ms';

-- What was asked of placement, and what became of it. Client keys live here until the row goes.
CREATE TABLE placements (
  placement_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  tenant_id text COLLATE "C" NOT NULL DEFAULT ''
    CONSTRAINT placements_tenant_id_is_short CHECK (octet_length(tenant_id) <= 128),
  request_id text COLLATE "C"
    CONSTRAINT placements_request_id_is_short CHECK (octet_length(request_id) BETWEEN 1 AND 255),
  fingerprint bytea,
  create_key text COLLATE "C"
    CONSTRAINT placements_create_key_is_short CHECK (octet_length(create_key) BETWEEN 1 AND 255),
  create_digest bytea,
  sealed_answer bytea,
  new_sandbox jsonb,
  count int NOT NULL DEFAULT 1 CONSTRAINT placements_count_in_range CHECK (count BETWEEN 1 AND 100),
  cluster_id text COLLATE "C" NOT NULL DEFAULT ''
    CONSTRAINT placements_cluster_id_is_short CHECK (octet_length(cluster_id) <= 128),
  outcome text NOT NULL CONSTRAINT placements_outcome_is_known
    CHECK (outcome IN ('reserved', 'confirmed', 'released', 'expired', 'refused')),
  tries int NOT NULL DEFAULT 1,
  node_id text COLLATE "C"
    CONSTRAINT placements_node_id_is_name CHECK (length(node_id) <= 253
      AND node_id ~ '^[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*$'),
  reservation_id uuid,
  sandbox_ids text[] COLLATE "C" NOT NULL DEFAULT '{}',
  cpu_millis bigint NOT NULL,
  memory_bytes bigint NOT NULL,
  strategy text NOT NULL,
  refusal text,
  reasons jsonb NOT NULL DEFAULT '{}',
  candidates jsonb NOT NULL DEFAULT '[]',
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT placements_refused_says_why CHECK ((outcome = 'refused') = (refusal IS NOT NULL)),
  CONSTRAINT placements_placed_has_node CHECK (outcome = 'refused' OR (node_id IS NOT NULL AND reservation_id IS NOT NULL)),
  CONSTRAINT placements_confirmed_has_sandbox CHECK (outcome <> 'confirmed' OR sandbox_ids <> '{}'),
  CONSTRAINT placements_key_has_digest CHECK ((create_key IS NULL) = (create_digest IS NULL)),
  CONSTRAINT placements_request_has_fingerprint CHECK ((request_id IS NULL) = (fingerprint IS NULL))
);
CREATE INDEX placements_created ON placements (created_at);
CREATE UNIQUE INDEX placements_request ON placements (tenant_id, request_id) WHERE request_id IS NOT NULL;
CREATE UNIQUE INDEX placements_create_key ON placements (tenant_id, create_key)
  WHERE create_key IS NOT NULL AND outcome IN ('reserved', 'confirmed');
GRANT SELECT, INSERT, UPDATE, DELETE ON placements TO berth_scheduler;

-- Holds. named: its caller knows the id. expires_at null: confirmed. Room on a node is the sum over
-- these rows and the node's own report; deleting a row is the act that gives its room back, once.
CREATE TABLE reservations (
  reservation_id uuid,
  n smallint,
  placement_id bigint,
  node_id text COLLATE "C" NOT NULL
    CONSTRAINT reservations_node_id_is_name CHECK (length(node_id) <= 253
      AND node_id ~ '^[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*$'),
  tenant_id text COLLATE "C" NOT NULL DEFAULT ''
    CONSTRAINT reservations_tenant_id_is_short CHECK (octet_length(tenant_id) <= 128),
  spread_key text COLLATE "C" NOT NULL DEFAULT ''
    CONSTRAINT reservations_spread_key_is_short CHECK (octet_length(spread_key) <= 255),
  cpu_millis bigint NOT NULL CONSTRAINT reservations_cpu_not_negative CHECK (cpu_millis >= 0),
  memory_bytes bigint NOT NULL CONSTRAINT reservations_memory_not_negative CHECK (memory_bytes >= 0),
  named boolean NOT NULL,
  sandbox_id text COLLATE "C" CONSTRAINT reservations_one_per_sandbox UNIQUE
    CONSTRAINT reservations_sandbox_id_is_label CHECK (sandbox_id ~ '^[a-z0-9]([a-z0-9-]{0,55}[a-z0-9])?$'),
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  expires_at timestamptz,
  PRIMARY KEY (reservation_id, n),
  CONSTRAINT reservations_open_expires CHECK ((sandbox_id IS NULL) = (expires_at IS NOT NULL))
) WITH (fillfactor = 90, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX reservations_node ON reservations (node_id);
CREATE INDEX reservations_tenant ON reservations (tenant_id) WHERE sandbox_id IS NULL;
CREATE INDEX reservations_expires ON reservations (expires_at) WHERE sandbox_id IS NULL;
GRANT SELECT, INSERT, UPDATE, DELETE ON reservations TO berth_scheduler;

-- Row '*' is for tenants without one; null: no limit.
CREATE TABLE tenant_quotas (
  tenant_id text COLLATE "C" PRIMARY KEY
    CONSTRAINT tenant_quotas_tenant_id_is_short CHECK (octet_length(tenant_id) BETWEEN 1 AND 128),
  max_sandboxes int CONSTRAINT tenant_quotas_sandboxes_not_negative CHECK (max_sandboxes >= 0),
  max_cpu_millis bigint CONSTRAINT tenant_quotas_cpu_not_negative CHECK (max_cpu_millis >= 0),
  max_memory_bytes bigint CONSTRAINT tenant_quotas_memory_not_negative CHECK (max_memory_bytes >= 0)
);
INSERT INTO tenant_quotas (tenant_id) VALUES ('*'), ('default');
GRANT SELECT, INSERT, UPDATE, DELETE ON tenant_quotas TO berth_scheduler;

-- +goose Down
SET lock_timeout = '50ms';
DROP TABLE tenant_quotas;
DROP TABLE reservations;
DROP TABLE placements;
