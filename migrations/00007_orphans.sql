-- +goose Up
SET lock_timeout = '50ms';

-- Sandboxes that a node's roster lists and that may not be bound there: what operators are shown, and
-- what is not seen for ten minutes is forgotten. deleted, superseded: the node must end it. held_elsewhere:
-- another node that is alive has it, and nothing is done until one of the two lets go.
CREATE TABLE orphans (
  node_id text COLLATE "C" NOT NULL REFERENCES nodes,
  sandbox_id text COLLATE "C" NOT NULL
    CONSTRAINT orphans_sandbox_id_is_label CHECK (sandbox_id ~ '^[a-z0-9]([a-z0-9-]{0,55}[a-z0-9])?$'),
  reason text NOT NULL CONSTRAINT orphans_reason_is_known CHECK (reason IN ('deleted', 'superseded', 'held_elsewhere')),
  holder_node_id text COLLATE "C",
  first_seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  last_seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (node_id, sandbox_id),
  CONSTRAINT orphans_held_has_holder CHECK (reason <> 'held_elsewhere' OR holder_node_id IS NOT NULL)
);
GRANT SELECT, INSERT, UPDATE, DELETE ON orphans TO berth_scheduler;

-- +goose Down
SET lock_timeout = '50ms';
DROP TABLE orphans;
