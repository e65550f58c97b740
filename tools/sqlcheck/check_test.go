package main

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// TestCheckRefusesBrokenStatements has its controls in the same table: what passes differs in one
// word from what does not.
func TestCheckRefusesBrokenStatements(t *testing.T) {
	t.Parallel()
	database, drop, err := migrated(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := drop(); err != nil {
			t.Error(err)
		}
	})

	const nodes = "berth/services/scheduler/internal/nodes"
	for name, tt := range map[string]struct {
		from, sql string
		want      string // part of the finding; "": none
	}{
		"a good read":               {nodes, `SELECT node_id FROM nodes WHERE node_id = @node`, ""},
		"a misspelled column":       {nodes, `SELECT node_ids FROM nodes WHERE node_id = @node`, "does not prepare: column \"node_ids\" does not exist (42703) at \"node_ids"},
		"a misspelled table":        {nodes, `SELECT node_id FROM node`, "42P01"},
		"a wrong type":              {nodes, `SELECT node_id FROM nodes WHERE present = @x::bigint`, "42883"},
		"a syntax error":            {nodes, `SELECT node_id FORM nodes`, "42601"},
		"a name used twice is one":  {nodes, `SELECT node_id FROM nodes WHERE node_id > @a AND node_id < @a`, ""},
		"two statements in one":     {nodes, `SELECT 1; SELECT 2`, "42601"},
		"all columns":               {nodes, `SELECT * FROM nodes`, "selects *"},
		"a write by the owner":      {nodes, `DELETE FROM node_leases WHERE node_id = @node`, ""},
		"a write by a reader":       {"berth/services/gateway/internal/routecache", `DELETE FROM node_leases WHERE node_id = @node`, "only scheduler/internal/nodes may"},
		"a read by a reader":        {"berth/services/gateway/internal/routecache", `SELECT expires_at FROM node_leases`, ""},
		"a read by a stranger":      {"berth/services/gateway/internal/proxy", `SELECT expires_at FROM node_leases`, "without being a declared reader"},
		"an at sign that is a text": {nodes, `SELECT node_id FROM nodes WHERE endpoint LIKE 'x@y'`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn, err := pgx.Connect(t.Context(), database)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close(t.Context())
			findings, err := check(t.Context(), conn, []Statement{{tt.from, "xSQL", "x.go:1", tt.sql}}, owners)
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case tt.want == "" && len(findings) > 0:
				t.Errorf("%s: %v, want no finding", tt.sql, findings)
			case tt.want != "" && (len(findings) != 1 || !strings.Contains(findings[0].What, tt.want)):
				t.Errorf("%s: %v, want one finding with %q", tt.sql, findings, tt.want)
			}
		})
	}
}

func TestATableWithoutAnOwnerIsAFinding(t *testing.T) {
	t.Parallel()
	database, drop, err := migrated(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := drop(); err != nil {
			t.Error(err)
		}
	})
	conn, err := pgx.Connect(t.Context(), database)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())

	if findings, err := check(t.Context(), conn, nil, owners); err != nil || len(findings) > 0 {
		t.Errorf("check of the schema: %v, %v; want nothing", findings, err)
	}
	if _, err := conn.Exec(t.Context(), "CREATE TABLE strays (id bigint)"); err != nil {
		t.Fatal(err)
	}
	findings, err := check(t.Context(), conn, nil, owners)
	if err != nil {
		t.Fatal(err)
	}
	if len(findings) != 1 || !strings.Contains(findings[0].What, "strays") {
		t.Errorf("check with a table nobody owns: %v, want one finding that names it", findings)
	}
}
