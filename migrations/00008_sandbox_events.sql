-- +goose Up
SET lock_timeout = '50ms';

-- What happened to sandboxes and nodes: told by nodes, or done by the scheduler. Rows are inserted and
-- read, never changed, and go with the day they are of. One partition a UTC day, made a week ahead;
-- what no day has a partition for, because nobody made it or a clock was wrong, is in the default one.
CREATE TABLE sandbox_events (
  event_id bigint GENERATED ALWAYS AS IDENTITY,
  at timestamptz NOT NULL DEFAULT clock_timestamp(),
  source text NOT NULL CONSTRAINT sandbox_events_source_is_known CHECK (source IN ('node', 'scheduler')),
  kind text NOT NULL CONSTRAINT sandbox_events_kind_is_word CHECK (kind ~ '^[a-z][a-z_]{0,62}$'),
  effect text NOT NULL DEFAULT '' CONSTRAINT sandbox_events_effect_is_word CHECK (effect ~ '^[a-z_]{0,63}$'),
  cluster_id text NOT NULL DEFAULT ''
    CONSTRAINT sandbox_events_cluster_id_is_short CHECK (octet_length(cluster_id) <= 128),
  node_id text COLLATE "C" NOT NULL DEFAULT ''
    CONSTRAINT sandbox_events_node_id_is_short CHECK (octet_length(node_id) <= 253),
  service_instance_id text NOT NULL DEFAULT ''
    CONSTRAINT sandbox_events_instance_is_short CHECK (octet_length(service_instance_id) <= 128),
  sandbox_id text COLLATE "C" NOT NULL DEFAULT ''
    CONSTRAINT sandbox_events_sandbox_id_is_label CHECK (sandbox_id = '' OR sandbox_id ~ '^[a-z0-9]([a-z0-9-]{0,55}[a-z0-9])?$'),
  cpu_millis bigint,
  memory_bytes bigint,
  disk_bytes bigint,
  detail jsonb,
  PRIMARY KEY (at, event_id)
) PARTITION BY RANGE (at);
CREATE INDEX sandbox_events_sandbox ON sandbox_events (sandbox_id, at);
CREATE INDEX sandbox_events_node ON sandbox_events (node_id, at);
CREATE TABLE sandbox_events_default PARTITION OF sandbox_events DEFAULT;
GRANT SELECT, INSERT ON sandbox_events TO berth_scheduler;

-- Makes the partition of one UTC day: made, exists, or late where the default one has too many rows of
-- that day to move them now; those stay there until they are old. Inserts into other days go on meanwhile:
-- ATTACH does not stop them, and it alone is used for that. It waits for no lock longer than 50 ms.
-- +goose StatementBegin
CREATE FUNCTION sandbox_events_make(day date) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp SET lock_timeout = '50ms' SET timezone = 'UTC'
AS $$
DECLARE
  most CONSTANT int := 10000;
  part text := 'sandbox_events_' || to_char(day, 'YYYYMMDD');
  low timestamptz := day;
  high timestamptz := day + 1;
BEGIN
  IF day NOT BETWEEN current_date - 1 AND current_date + 14 THEN
    RAISE EXCEPTION 'sandbox_events has partitions of days about now, not of %', day USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF to_regclass('public.' || part) IS NOT NULL THEN
    RETURN 'exists';
  END IF;
  LOCK TABLE ONLY public.sandbox_events IN SHARE UPDATE EXCLUSIVE MODE;
  LOCK TABLE public.sandbox_events_default IN ACCESS EXCLUSIVE MODE;
  IF (SELECT count(*) FROM (SELECT FROM public.sandbox_events_default WHERE at >= low AND at < high LIMIT most + 1) AS late) > most THEN
    RETURN 'late';
  END IF;
  EXECUTE format('CREATE TABLE public.%I (LIKE public.sandbox_events INCLUDING ALL EXCLUDING IDENTITY)', part);
  EXECUTE format('WITH moved AS (DELETE FROM public.sandbox_events_default WHERE at >= %L AND at < %L RETURNING *) '
    'INSERT INTO public.%I SELECT * FROM moved', low, high, part);
  EXECUTE format('ALTER TABLE public.sandbox_events ATTACH PARTITION public.%I FOR VALUES FROM (%L) TO (%L)', part, low, high);
  RETURN 'made';
END $$;
-- +goose StatementEnd

-- Drops the oldest partition that is all older than keep, or else deletes some such rows of the default
-- one, and returns how many it did; 0: nothing is left to do. A drop stops inserts while it waits, so it
-- waits for no lock longer than 50 ms. Less than a day is refused: nobody may empty the log.
-- +goose StatementBegin
CREATE FUNCTION sandbox_events_drop(keep interval) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp SET lock_timeout = '50ms' SET timezone = 'UTC'
AS $$
DECLARE
  oldest text;
  deleted bigint;
BEGIN
  IF keep IS NULL OR keep < interval '1 day' THEN
    RAISE EXCEPTION 'sandbox_events are kept for a day at least, not for %', keep USING ERRCODE = 'invalid_parameter_value';
  END IF;
  SELECT c.relname INTO oldest
  FROM   pg_inherits AS i
  JOIN   pg_class AS c ON c.oid = i.inhrelid
  WHERE  i.inhparent = 'public.sandbox_events'::regclass AND c.relname ~ '^sandbox_events_[0-9]{8}$'
  AND    to_date(right(c.relname, 8), 'YYYYMMDD') + 1 <= clock_timestamp() - keep
  ORDER  BY c.relname
  LIMIT  1;
  IF oldest IS NOT NULL THEN
    EXECUTE format('DROP TABLE public.%I', oldest);
    RETURN 1;
  END IF;
  WITH old AS MATERIALIZED (
       SELECT at, event_id FROM public.sandbox_events_default
       WHERE  at < clock_timestamp() - keep ORDER BY at, event_id LIMIT 5000)
  DELETE FROM public.sandbox_events_default AS e USING old WHERE e.at = old.at AND e.event_id = old.event_id;
  GET DIAGNOSTICS deleted = ROW_COUNT;
  RETURN deleted;
END $$;
-- +goose StatementEnd

REVOKE EXECUTE ON FUNCTION sandbox_events_make(date), sandbox_events_drop(interval) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION sandbox_events_make(date), sandbox_events_drop(interval) TO berth_scheduler;

-- +goose Down
SET lock_timeout = '50ms';
DROP FUNCTION sandbox_events_drop(interval);
DROP FUNCTION sandbox_events_make(date);
DROP TABLE sandbox_events;
