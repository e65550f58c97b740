package schema

import (
	"strings"
	"testing"

	"berth/migrations"
	"berth/pkg/migrate"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
)

func TestTheDatabaseRefusesByName(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	for _, version := range versions(t, db.URL) {
		loadFixture(t, db.DB, version)
	}
	binding := func(id, rest string) string {
		return "INSERT INTO bindings (sandbox_id, state, node_id, origin" + strings.Split(rest, "|")[0] + ") VALUES ('" + id + "', " + strings.Split(rest, "|")[1] + ")"
	}
	placement := func(columns, values string) string {
		return "INSERT INTO placements (cpu_millis, memory_bytes, strategy, " + columns + ") VALUES (1, 1, 'best_of_k', " + values + ")"
	}
	for name, tt := range map[string]struct{ sql, want string }{
		"a sandbox id with capitals":        {binding("S1", "|'bound', 'node-a', 'recorded'"), "bindings_sandbox_id_is_label"},
		"a sandbox id with a dot":           {binding("s.1", "|'bound', 'node-a', 'recorded'"), "bindings_sandbox_id_is_label"},
		"a sandbox id of 58 bytes":          {binding(strings.Repeat("a", 58), "|'bound', 'node-a', 'recorded'"), "bindings_sandbox_id_is_label"},
		"a sandbox id of 57 bytes":          {binding(strings.Repeat("a", 57), "|'bound', 'node-a', 'recorded'"), ""},
		"a sandbox id with a hyphen last":   {binding("s-", "|'bound', 'node-a', 'recorded'"), "bindings_sandbox_id_is_label"},
		"a sandbox id with a line feed":     {binding("s1\n", "|'bound', 'node-a', 'recorded'"), "bindings_sandbox_id_is_label"},
		"a node id that is a host name":     {binding("n1", "|'bound', 'Node-1.example.com', 'recorded'"), ""},
		"a node id with an empty label":     {binding("n2", "|'bound', 'a..b', 'recorded'"), "bindings_node_id_is_name"},
		"a node id of 254 bytes":            {binding("n3", "|'bound', '"+strings.Repeat("a.", 126)+"aa', 'recorded'"), "bindings_node_id_is_name"},
		"a node id with a label of 63":      {binding("n4", "|'bound', '"+strings.Repeat("a", 63)+".b', 'recorded'"), ""},
		"a node id with a label of 64":      {binding("n5", "|'bound', 'b."+strings.Repeat("a", 64)+"', 'recorded'"), "bindings_node_id_is_name"},
		"a node id that is one label of 64": {binding("n6", "|'bound', '"+strings.Repeat("a", 64)+"', 'recorded'"), "bindings_node_id_is_name"},
		"a node id with a hyphen last":      {binding("n7", "|'bound', 'a-.b', 'recorded'"), "bindings_node_id_is_name"},
		"a node id of nothing":              {binding("n8", "|'bound', '', 'recorded'"), "bindings_node_id_is_name"},
		"a sandbox id of nothing":           {binding("", "|'bound', 'node-a', 'recorded'"), "bindings_sandbox_id_is_label"},
		"a placement on an odd node":        {placement("outcome, node_id, reservation_id", "'reserved', 'a b', gen_random_uuid()"), "placements_node_id_is_name"},
		"a hold on an odd node":             {"INSERT INTO reservations (reservation_id, n, node_id, cpu_millis, memory_bytes, named, expires_at) VALUES (gen_random_uuid(), 0, '.a', 1, 1, true, now())", "reservations_node_id_is_name"},
		"a hold of an odd sandbox":          {"INSERT INTO reservations (reservation_id, n, node_id, cpu_millis, memory_bytes, named, sandbox_id) VALUES (gen_random_uuid(), 0, 'a', 1, 1, true, 'A')", "reservations_sandbox_id_is_label"},
		"an unknown state":                  {binding("b1", ", ended_at, ended_by|'lost', 'node-a', 'recorded', now(), 'deleted'"), "bindings_state_is_known"},
		"an ended binding without a time":   {binding("b2", ", ended_by|'gone', 'node-a', 'recorded', 'deleted'"), "bindings_ended_has_reason"},
		"a bound binding with an end":       {binding("b3", ", ended_at, ended_by|'bound', 'node-a', 'recorded', now(), 'deleted'"), "bindings_ended_has_reason"},
		"an incarnation of zero":            {binding("b4", ", incarnation|'bound', 'node-a', 'recorded', 0"), "bindings_incarnation_counts"},
		"a tenant of 129 bytes":             {binding("b5", ", tenant_id|'bound', 'node-a', 'recorded', '"+strings.Repeat("é", 65)+"'"), "bindings_tenant_id_is_short"},
		"a second live binding":             {binding("s2", "|'bound', 'node-b', 'recorded'"), "bindings_pkey"},
		"a refusal without a reason":        {placement("outcome", "'refused'"), "placements_refused_says_why"},
		"a placement without a node":        {placement("outcome", "'reserved'"), "placements_placed_has_node"},
		"a key without a digest":            {placement("outcome, refusal, create_key", "'refused', 'no', 'k'"), "placements_key_has_digest"},
		"a request without a fingerprint":   {placement("outcome, refusal, request_id", "'refused', 'no', 'r'"), "placements_request_has_fingerprint"},
		"a request id used twice":           {placement("outcome, refusal, tenant_id, request_id, fingerprint", "'refused', 'no', 't1', 'r1', '\\x01'"), "placements_request"},
		"a request id of 256 bytes":         {placement("outcome, refusal, request_id, fingerprint", "'refused', 'no', '"+strings.Repeat("r", 256)+"', '\\x01'"), "placements_request_id_is_short"},
		"a confirmed one without sandbox":   {placement("outcome, node_id, reservation_id", "'confirmed', 'node-a', gen_random_uuid()"), "placements_confirmed_has_sandbox"},
		"101 sandboxes in one":              {placement("outcome, refusal, count", "'refused', 'no', 101"), "placements_count_in_range"},
		"a hold that neither ends nor has":  {"INSERT INTO reservations (reservation_id, n, node_id, cpu_millis, memory_bytes, named) VALUES (gen_random_uuid(), 0, 'node-a', 1, 1, true)", "reservations_open_expires"},
		"a hold of less than nothing":       {"INSERT INTO reservations (reservation_id, n, node_id, cpu_millis, memory_bytes, named, expires_at) VALUES (gen_random_uuid(), 0, 'node-a', -1, 1, true, now())", "reservations_cpu_not_negative"},
		"two holds for one sandbox":         {"INSERT INTO reservations (reservation_id, n, node_id, cpu_millis, memory_bytes, named, sandbox_id) VALUES (gen_random_uuid(), 0, 'node-a', 1, 1, true, 's2')", "reservations_one_per_sandbox"},
		"a node that went without a time":   {"INSERT INTO nodes (node_id, endpoint, source, present) VALUES ('x', 'http://x', 'static', false)", "nodes_gone_has_time"},
		"a trusted node nobody listed":      {"INSERT INTO nodes (node_id, endpoint, source, trusted) VALUES ('x', 'http://x', 'registered', true)", "nodes_trusted_is_static"},
		"a lease of no node":                {"INSERT INTO node_leases (expires_at, last_seen_at, reported_at_unix_ms, facts_digest, roster_digest, node_id, service_instance_id, place) VALUES (now(), now(), 0, '', '', 'nobody', 'i', '')", "node_leases_node_id_fkey"},
		"nine retired instances":            {"UPDATE node_leases SET retired = '{1,2,3,4,5,6,7,8,9}'", "node_leases_retired_is_short"},
		"a second row of feed_meta":         {"INSERT INTO feed_meta (one) VALUES (false)", "feed_meta_is_one_row"},
		"an unknown kind in the feed":       {"INSERT INTO route_feed (kind, key, revision) VALUES ('lease', 'x', 1)", "route_feed_kind_is_known"},
		"a key that is not hashed":          {"INSERT INTO principals (principal_id, role, key_sha256, public_id) VALUES ('p', 'client', 'e2b_secret', 'aaaaaaaaaaaa')", "principals_key_is_a_hash"},
		"an unknown role":                   {"INSERT INTO principals (principal_id, role) VALUES ('p', 'root')", "principals_role_is_known"},
		"an artifact of no cluster":         {"INSERT INTO p2p_artifacts (cluster_id, backend, key) VALUES ('', 'b', 'k')", "p2p_artifacts_has_cluster_id"},
		"an artifact of no backend":         {"INSERT INTO p2p_artifacts (cluster_id, backend, key) VALUES ('c', '', 'k')", "p2p_artifacts_has_backend"},
		"an artifact without a key":         {"INSERT INTO p2p_artifacts (cluster_id, backend, key) VALUES ('c', 'b', '')", "p2p_artifacts_has_key"},
		"an artifact's key of 1,025 bytes":  {"INSERT INTO p2p_artifacts (cluster_id, backend, key) VALUES ('c', 'b', repeat('k', 1025))", "p2p_artifacts_has_key"},
		"an artifact's key of 1,024 bytes":  {"INSERT INTO p2p_artifacts (cluster_id, backend, key) VALUES ('c', 'b', repeat('k', 1024))", ""},
		"an artifact twice":                 {"INSERT INTO p2p_artifacts (cluster_id, backend, key) VALUES ('c1', 'mooncake', 'sandbox/s2/1')", "p2p_artifacts_name"},
		"a holder of no artifact":           {"INSERT INTO p2p_holders (artifact_id, node_id) VALUES (0, 'node-a')", "p2p_holders_artifact_id_fkey"},
		"a holder without a name":           {"INSERT INTO p2p_holders (artifact_id, node_id) SELECT artifact_id, '' FROM p2p_artifacts LIMIT 1", "p2p_holders_has_node_id"},
		"a second open drain":               {"INSERT INTO drains (node_id, state, mode, reason, requested_by, was_cordoned, total) VALUES ('node-a', 'closing', 'wait', '', 'o', false, 0)", "drains_one_open"},
		"an open drain with an end":         {"INSERT INTO drains (node_id, state, mode, reason, requested_by, was_cordoned, total, ended_at, left_at_end) VALUES ('node-gone', 'closing', 'wait', '', 'o', false, 0, now(), 0)", "drains_open_or_ended"},
		"a drain that ended at no time":     {"INSERT INTO drains (node_id, state, mode, reason, requested_by, was_cordoned, total) VALUES ('node-gone', 'done', 'wait', '', 'o', false, 0)", "drains_open_or_ended"},
		"a drain that ran out of no time":   {"INSERT INTO drains (node_id, state, mode, reason, requested_by, was_cordoned, total, ended_at, left_at_end) VALUES ('node-gone', 'expired', 'wait', '', 'o', false, 0, now(), 0)", "drains_expired_had_deadline"},
		"a drain that ended, left unsaid":   {"INSERT INTO drains (node_id, state, mode, reason, requested_by, was_cordoned, total, ended_at) VALUES ('node-gone', 'done', 'wait', '', 'o', false, 0, now())", "drains_ended_says_left"},
		"a drain of an unknown mode":        {"INSERT INTO drains (node_id, state, mode, reason, requested_by, was_cordoned, total) VALUES ('node-gone', 'closing', 'kill', '', 'o', false, 0)", "drains_mode_is_known"},
		"a drain of no node":                {"INSERT INTO drains (node_id, state, mode, reason, requested_by, was_cordoned, total) VALUES ('nobody', 'closing', 'wait', '', 'o', false, 0)", "drains_node_id_fkey"},
		"a quota of less than nothing":      {"INSERT INTO tenant_quotas (tenant_id, max_sandboxes) VALUES ('t9', -1)", "tenant_quotas_sandboxes_not_negative"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := db.Exec(t.Context(), tt.sql)
			if got := pgdb.Constraint(err); got != tt.want || (tt.want == "" && err != nil) {
				t.Errorf("constraint %q (%v), want %q", got, err, tt.want)
			}
		})
	}
}

func TestEachTenantHasAQuotaRowToFallBackTo(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	var unlimited int
	const quotasSQL = `
SELECT count(*) FROM tenant_quotas
WHERE  tenant_id IN ('*', 'default') AND max_sandboxes IS NULL AND max_cpu_millis IS NULL AND max_memory_bytes IS NULL`
	if err := db.QueryRow(t.Context(), quotasSQL).Scan(&unlimited); err != nil {
		t.Fatal(err)
	}
	if unlimited != 2 {
		t.Errorf("%d unlimited rows of '*' and 'default', want both", unlimited)
	}
}

func TestANewEpochMovesRevisionsAhead(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	read := func() (epoch string, revision int64) {
		t.Helper()
		const sql = `SELECT (SELECT epoch::text FROM feed_meta), nextval('revisions')`
		if err := db.QueryRow(t.Context(), sql).Scan(&epoch, &revision); err != nil {
			t.Fatal(err)
		}
		return epoch, revision
	}
	epoch, revision := read()
	if err := migrate.NewEpoch(t.Context(), db.URL); err != nil {
		t.Fatal(err)
	}
	epochAfter, revisionAfter := read()
	if epochAfter == epoch {
		t.Errorf("the epoch is still %s", epoch)
	}
	if revisionAfter < revision+1000000 {
		t.Errorf("revisions went from %d to %d, want a million more", revision, revisionAfter)
	}
}

func TestLockKeysOfOneClassLieTogether(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	const sql = `SELECT lock_key(4, 'node-a') >> 56, lock_key(5, '') > lock_key(4, 'zzz'), lock_key(127, 'berth') > 0`
	var class int
	var ordered, positive bool
	if err := db.QueryRow(t.Context(), sql).Scan(&class, &ordered, &positive); err != nil {
		t.Fatal(err)
	}
	if class != 4 || !ordered || !positive {
		t.Errorf("class %d, ordered %v, positive %v; want 4, true, true", class, ordered, positive)
	}
}
