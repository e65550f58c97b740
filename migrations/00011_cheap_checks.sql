-- +goose Up
SET lock_timeout = '50ms';

-- The same rules for ids, at a fifth of their cost: a bounded repetition like {0,61} makes a pattern large,
-- and checks are asked for every row that is written, whichever column changes. Rows of before have passed
-- the former checks, so nothing is scanned while the table is locked.
ALTER TABLE placements
  DROP CONSTRAINT placements_node_id_is_name,
  ADD CONSTRAINT placements_node_id_is_name CHECK (CASE WHEN length(node_id) <= 63
    THEN node_id ~ '^[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?)*$'
    ELSE length(node_id) <= 253
      AND node_id ~ '^[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*$' END) NOT VALID;
ALTER TABLE reservations
  DROP CONSTRAINT reservations_node_id_is_name,
  ADD CONSTRAINT reservations_node_id_is_name CHECK (CASE WHEN length(node_id) <= 63
    THEN node_id ~ '^[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?)*$'
    ELSE length(node_id) <= 253
      AND node_id ~ '^[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*$' END) NOT VALID,
  DROP CONSTRAINT reservations_sandbox_id_is_label,
  ADD CONSTRAINT reservations_sandbox_id_is_label
    CHECK (length(sandbox_id) <= 57 AND sandbox_id ~ '^[a-z0-9]([a-z0-9-]*[a-z0-9])?$') NOT VALID;
ALTER TABLE bindings
  DROP CONSTRAINT bindings_node_id_is_name,
  ADD CONSTRAINT bindings_node_id_is_name CHECK (CASE WHEN length(node_id) <= 63
    THEN node_id ~ '^[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?)*$'
    ELSE length(node_id) <= 253
      AND node_id ~ '^[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*$' END) NOT VALID,
  DROP CONSTRAINT bindings_sandbox_id_is_label,
  ADD CONSTRAINT bindings_sandbox_id_is_label
    CHECK (length(sandbox_id) <= 57 AND sandbox_id ~ '^[a-z0-9]([a-z0-9-]*[a-z0-9])?$') NOT VALID;

-- +goose Down
SET lock_timeout = '50ms';
ALTER TABLE bindings
  DROP CONSTRAINT bindings_node_id_is_name,
  ADD CONSTRAINT bindings_node_id_is_name CHECK (length(node_id) <= 253
    AND node_id ~ '^[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*$'),
  DROP CONSTRAINT bindings_sandbox_id_is_label,
  ADD CONSTRAINT bindings_sandbox_id_is_label CHECK (sandbox_id ~ '^[a-z0-9]([a-z0-9-]{0,55}[a-z0-9])?$');
ALTER TABLE reservations
  DROP CONSTRAINT reservations_node_id_is_name,
  ADD CONSTRAINT reservations_node_id_is_name CHECK (length(node_id) <= 253
    AND node_id ~ '^[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*$'),
  DROP CONSTRAINT reservations_sandbox_id_is_label,
  ADD CONSTRAINT reservations_sandbox_id_is_label CHECK (sandbox_id ~ '^[a-z0-9]([a-z0-9-]{0,55}[a-z0-9])?$');
ALTER TABLE placements
  DROP CONSTRAINT placements_node_id_is_name,
  ADD CONSTRAINT placements_node_id_is_name CHECK (length(node_id) <= 253
    AND node_id ~ '^[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*$');
