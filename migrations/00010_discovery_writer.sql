-- +goose Up
SET lock_timeout = '50ms';

-- Who may write what a dynamic source of nodes says: every scheduler watches, one writes. Whoever takes the
-- lease from somebody else, or after it expired, gets the next fence; a write under an earlier one is void.
CREATE TABLE discovery_writer (
  source text PRIMARY KEY CONSTRAINT discovery_writer_source_is_known CHECK (source IN ('kubernetes')),
  holder text NOT NULL CONSTRAINT discovery_writer_has_holder CHECK (octet_length(holder) BETWEEN 1 AND 300),
  fence bigint NOT NULL DEFAULT 1 CONSTRAINT discovery_writer_fence_is_positive CHECK (fence > 0),
  expires_at timestamptz NOT NULL
);
GRANT SELECT, INSERT, UPDATE ON discovery_writer TO berth_scheduler;

-- +goose Down
SET lock_timeout = '50ms';
DROP TABLE discovery_writer;
