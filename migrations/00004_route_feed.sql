-- +goose Up
SET lock_timeout = '50ms';

-- Every change of a route, in the transaction that makes it. Rows are inserted and deleted, never
-- updated. Readers go by xid and snapshot; feed_id only tells rows of one transaction apart.
CREATE TABLE route_feed (
  xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
  feed_id bigint GENERATED ALWAYS AS IDENTITY,
  at timestamptz NOT NULL DEFAULT clock_timestamp(),
  kind text NOT NULL CONSTRAINT route_feed_kind_is_known CHECK (kind IN ('binding', 'node', 'peer', 'key')),
  key text COLLATE "C" NOT NULL,
  revision bigint NOT NULL,
  state text NOT NULL DEFAULT '',
  cluster_id text COLLATE "C" NOT NULL DEFAULT '',
  node_id text COLLATE "C" NOT NULL DEFAULT '',
  incarnation bigint NOT NULL DEFAULT 0,
  tenant_id text COLLATE "C" NOT NULL DEFAULT '',
  endpoint text NOT NULL DEFAULT '',
  PRIMARY KEY (xid, feed_id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000);
GRANT SELECT, INSERT, DELETE ON route_feed TO berth_scheduler;
GRANT SELECT ON route_feed TO berth_gateway;

-- epoch: renewed by whoever restores a backup or copies a disk. floor: what retention has deleted.
CREATE TABLE feed_meta (
  one boolean PRIMARY KEY DEFAULT true CONSTRAINT feed_meta_is_one_row CHECK (one),
  epoch uuid NOT NULL DEFAULT gen_random_uuid(),
  floor xid8 NOT NULL DEFAULT '0'
);
INSERT INTO feed_meta DEFAULT VALUES;
GRANT SELECT, UPDATE ON feed_meta TO berth_scheduler;
GRANT SELECT ON feed_meta TO berth_gateway;

-- Retention's memory: all transactions below a mark's horizon had ended when it was made.
CREATE TABLE feed_marks (
  at timestamptz PRIMARY KEY DEFAULT clock_timestamp(),
  horizon xid8 NOT NULL DEFAULT pg_snapshot_xmin(pg_current_snapshot())
);
GRANT SELECT, INSERT, DELETE ON feed_marks TO berth_scheduler;

-- The one way into the feed from outside bindings: an API key was made, changed or ended. Takes the
-- public id, never a hash.
CREATE FUNCTION feed_key(public_id text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
AS $$ INSERT INTO public.route_feed (kind, key, revision) VALUES ('key', public_id, nextval('public.revisions')) $$;
REVOKE EXECUTE ON FUNCTION feed_key(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION feed_key(text) TO berth_sessions;

-- +goose Down
SET lock_timeout = '50ms';
DROP FUNCTION feed_key(text);
DROP TABLE feed_marks;
DROP TABLE feed_meta;
DROP TABLE route_feed;
