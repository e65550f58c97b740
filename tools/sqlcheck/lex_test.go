package main

import (
	"slices"
	"testing"
)

func TestTablesAreFoundWithWhatIsDoneToThem(t *testing.T) {
	t.Parallel()
	known := map[string]bool{"nodes": true, "node_leases": true, "bindings": true, "tasks": true, "task_results": true}
	for name, tt := range map[string]struct {
		sql  string
		want []Use
	}{
		"a read":                           {`SELECT node_id FROM nodes`, []Use{{"nodes", false}}},
		"a join":                           {`SELECT 1 FROM nodes AS n JOIN node_leases AS l ON l.node_id = n.node_id`, []Use{{"nodes", false}, {"node_leases", false}}},
		"a list of tables":                 {`SELECT 1 FROM nodes n, bindings b`, []Use{{"nodes", false}, {"bindings", false}}},
		"an insert":                        {`INSERT INTO nodes (node_id) VALUES (@id)`, []Use{{"nodes", true}}},
		"an update":                        {`UPDATE nodes AS n SET endpoint = @e`, []Use{{"nodes", true}}},
		"an update of only the parent":     {`UPDATE ONLY nodes SET endpoint = @e`, []Use{{"nodes", true}}},
		"a delete":                         {`DELETE FROM nodes WHERE node_id = @id`, []Use{{"nodes", true}}},
		"a delete of only the parent":      {`DELETE FROM ONLY nodes`, []Use{{"nodes", true}}},
		"a truncate":                       {`TRUNCATE nodes`, []Use{{"nodes", true}}},
		"a merge":                          {`MERGE INTO nodes AS n USING bindings AS b ON true WHEN MATCHED THEN DO NOTHING`, []Use{{"nodes", true}, {"bindings", false}}},
		"with the schema":                  {`DELETE FROM public.nodes`, []Use{{"nodes", true}}},
		"quoted":                           {`SELECT 1 FROM "nodes"`, []Use{{"nodes", false}}},
		"a row lock is a read":             {`SELECT 1 FROM nodes AS n FOR UPDATE OF n`, []Use{{"nodes", false}}},
		"read, then written":               {`WITH a AS (SELECT 1 FROM nodes) DELETE FROM nodes`, []Use{{"nodes", true}}},
		"upsert":                           {`INSERT INTO nodes (node_id) VALUES (@n) ON CONFLICT (node_id) DO UPDATE SET endpoint = ''`, []Use{{"nodes", true}}},
		"a move":                           {`WITH done AS (DELETE FROM tasks RETURNING id) INSERT INTO task_results (id) SELECT id FROM done`, []Use{{"tasks", true}, {"task_results", true}}},
		"a parameter":                      {`SELECT 1 WHERE @nodes`, nil},
		"a text":                           {`SELECT 'nodes', $$ nodes $$, $x$nodes$x$, 'it''s nodes'`, nil},
		"a comment":                        {"SELECT 1 -- FROM nodes\n/* FROM nodes */", nil},
		"a column":                         {`SELECT x.nodes FROM generate_series(1, 2) AS x (i)`, nil},
		"an alias":                         {`SELECT count(1) AS nodes`, nil},
		"a name that WITH introduces":      {`WITH nodes AS (SELECT 1) SELECT 1 FROM nodes`, nil},
		"such a name hides no real schema": {`WITH nodes AS (SELECT 1 FROM public.nodes) SELECT 1 FROM nodes`, []Use{{"nodes", false}}},
		"a materialized one":               {`WITH a AS (SELECT 1), tasks AS MATERIALIZED (SELECT 1) SELECT 1 FROM tasks`, nil},
		"in capitals":                      {`SELECT 1 FROM NODES`, []Use{{"nodes", false}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := uses(tt.sql, known); !slices.Equal(got, tt.want) {
				t.Errorf("uses(%q) = %v, want %v", tt.sql, got, tt.want)
			}
		})
	}
}

func TestAStarIsFoundWhereItMeansAllColumns(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]bool{
		`SELECT * FROM nodes`:                         true,
		`SELECT n.* FROM nodes AS n`:                  true,
		`SELECT DISTINCT * FROM nodes`:                true,
		`WITH a AS (SELECT 1 AS b) SELECT a.* FROM a`: false,
		`WITH a AS (SELECT 1 AS b) SELECT c.* FROM c`: true,
		`WITH a AS (SELECT 1 AS b) SELECT * FROM a`:   true,
		`SELECT 1, * FROM nodes`:                      true,
		`DELETE FROM nodes RETURNING *`:               true,
		`SELECT count(*) FROM nodes`:                  false,
		`SELECT 2 * 3`:                                false,
		`SELECT a * b FROM nodes`:                     false,
		`SELECT a.* FROM unnest(@x::int[]) AS a (b)`:  false,
		`SELECT a.* FROM nodes AS a`:                  true,
		"SELECT 1 -- SELECT *":                        false,
		`SELECT '*'`:                                  false,
		`SELECT count(*) FILTER (WHERE a) FROM b`:     false,
	} {
		if got := selectsAll(sql); got != want {
			t.Errorf("selectsAll(%q) = %t, want %t", sql, got, want)
		}
	}
}
