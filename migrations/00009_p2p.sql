-- +goose Up
SET lock_timeout = '50ms';

-- Which stores hold which bytes. A row is a hint: whoever follows it may find nothing there, so a lost one
-- costs a fetch from elsewhere. Keys are counted against the capacity, the least recently used go first.
CREATE TABLE p2p_artifacts (
  artifact_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  cluster_id text COLLATE "C" NOT NULL
    CONSTRAINT p2p_artifacts_has_cluster_id CHECK (cluster_id <> '' AND octet_length(cluster_id) <= 128),
  backend text COLLATE "C" NOT NULL
    CONSTRAINT p2p_artifacts_has_backend CHECK (backend <> '' AND octet_length(backend) <= 128),
  key text COLLATE "C" NOT NULL
    CONSTRAINT p2p_artifacts_has_key CHECK (key <> '' AND octet_length(key) <= 1024),
  used_at timestamptz NOT NULL DEFAULT clock_timestamp(),   -- recorded or looked up, to within a minute
  CONSTRAINT p2p_artifacts_name UNIQUE (cluster_id, backend, key)
);
CREATE INDEX p2p_artifacts_used_at ON p2p_artifacts (used_at);
GRANT SELECT, INSERT, UPDATE, DELETE ON p2p_artifacts TO berth_scheduler;

-- An artifact goes with its last holder, and its holders go with it.
CREATE TABLE p2p_holders (
  artifact_id bigint NOT NULL REFERENCES p2p_artifacts ON DELETE CASCADE,
  node_id text COLLATE "C" NOT NULL
    CONSTRAINT p2p_holders_has_node_id CHECK (node_id <> '' AND octet_length(node_id) <= 253),
  PRIMARY KEY (artifact_id, node_id)
);
CREATE INDEX p2p_holders_node_id ON p2p_holders (node_id);
GRANT SELECT, INSERT, DELETE ON p2p_holders TO berth_scheduler;

-- +goose Down
SET lock_timeout = '50ms';
DROP TABLE p2p_holders;
DROP TABLE p2p_artifacts;
