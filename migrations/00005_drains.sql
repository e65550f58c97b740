-- +goose Up
SET lock_timeout = '50ms';

-- Emptying a node: closing while holds made before may still become sandboxes, draining while the ones
-- that live there leave, then done, expired or canceled. The row says where a drain is; how much is left is
-- counted in bindings and reservations until the end, when left_at_end keeps it. total is what there was to
-- leave, raised when more turned up. While a drain is open, nodes.drain_id names it and the node is cordoned.
CREATE TABLE drains (
  drain_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  node_id text COLLATE "C" NOT NULL REFERENCES nodes,
  state text NOT NULL CONSTRAINT drains_state_is_known
    CHECK (state IN ('closing', 'draining', 'done', 'canceled', 'expired')),
  mode text NOT NULL CONSTRAINT drains_mode_is_known CHECK (mode IN ('wait', 'move', 'park')),
  reason text NOT NULL CONSTRAINT drains_reason_is_short CHECK (octet_length(reason) <= 1024),
  requested_by text NOT NULL CONSTRAINT drains_requester_is_short CHECK (octet_length(requested_by) <= 255),
  was_cordoned boolean NOT NULL,
  total int NOT NULL CONSTRAINT drains_total_not_negative CHECK (total >= 0),
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  deadline_at timestamptz,
  ended_at timestamptz,
  left_at_end int CONSTRAINT drains_left_not_negative CHECK (left_at_end >= 0),   -- sandboxes and open holds
  CONSTRAINT drains_open_or_ended CHECK ((state IN ('closing', 'draining')) = (ended_at IS NULL)),
  CONSTRAINT drains_ended_says_left CHECK ((ended_at IS NULL) = (left_at_end IS NULL)),
  CONSTRAINT drains_expired_had_deadline CHECK (state <> 'expired' OR deadline_at IS NOT NULL)
);
CREATE UNIQUE INDEX drains_one_open ON drains (node_id) WHERE ended_at IS NULL;
GRANT SELECT, INSERT, UPDATE, DELETE ON drains TO berth_scheduler;

-- +goose Down
SET lock_timeout = '50ms';
DROP TABLE drains;
