-- +goose Up
SET lock_timeout = '50ms';

-- Who calls. An API key is a row with key_sha256, the SHA-256 of the whole key, and public_id, its
-- first part, which may be shown and logged. The bootstrap key is never stored.
CREATE TABLE principals (
  principal_id text PRIMARY KEY
    CONSTRAINT principals_principal_id_is_short CHECK (octet_length(principal_id) BETWEEN 1 AND 128),
  tenant_id text CONSTRAINT principals_tenant_id_is_short CHECK (octet_length(tenant_id) BETWEEN 1 AND 128),
  peer_identity text UNIQUE,
  disabled_at timestamptz,
  key_sha256 bytea UNIQUE CONSTRAINT principals_key_is_a_hash CHECK (octet_length(key_sha256) = 32),
  public_id text UNIQUE CONSTRAINT principals_public_id_is_hex CHECK (public_id ~ '^[0-9a-f]{12}$'),
  name text,
  scopes text[] NOT NULL DEFAULT '{}',
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  expires_at timestamptz,
  last_used_on date,
  role text NOT NULL CONSTRAINT principals_role_is_known
    CHECK (role IN ('client', 'operator', 'sandbox', 'gateway', 'scheduler', 'dispatcher', 'node', 'history')),
  CONSTRAINT principals_key_has_public_id CHECK ((key_sha256 IS NULL) = (public_id IS NULL))
);
GRANT SELECT, INSERT, UPDATE, DELETE ON principals TO berth_sessions;
GRANT SELECT ON principals TO berth_dispatcher;

-- +goose Down
SET lock_timeout = '50ms';
DROP TABLE principals;
