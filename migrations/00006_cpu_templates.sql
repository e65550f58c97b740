-- +goose Up
SET lock_timeout = '50ms';

-- What the processors of a cluster have in common, as its nodes are told. inputs_digest: of what it was
-- computed. digest and text are empty while there is none: a node's configuration is missing or cannot be read.
CREATE TABLE cpu_templates (
  cluster_id text COLLATE "C" PRIMARY KEY
    CONSTRAINT cpu_templates_cluster_id_is_short CHECK (octet_length(cluster_id) <= 128),
  inputs_digest bytea NOT NULL,
  digest bytea NOT NULL,
  template_json text NOT NULL,
  CONSTRAINT cpu_templates_digest_is_of_text CHECK ((digest = '') = (template_json = ''))
);
GRANT SELECT, INSERT, UPDATE, DELETE ON cpu_templates TO berth_scheduler;

-- Tells configurations apart without reading them; null: none. The column computes itself, so that it is
-- right whoever writes the configuration, an older version too.
ALTER TABLE nodes ADD COLUMN cpu_config_hash bigint
  GENERATED ALWAYS AS (CASE WHEN cpu_config_json = '' THEN NULL ELSE hashtextextended(cpu_config_json, 0) END) STORED;

-- +goose Down
SET lock_timeout = '50ms';
ALTER TABLE nodes DROP COLUMN cpu_config_hash;
DROP TABLE cpu_templates;
