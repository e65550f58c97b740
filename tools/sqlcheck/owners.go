package main

import (
	"fmt"
	"slices"
	"strings"
)

// Owner says who may write a table, and who may read it beside the writer.
type Owner struct {
	Writer  string   // a package below berth/services
	Readers []string // packages below berth/services; a reader covers what is below it
}

// everyService may read a table that all processes need.
const everyService = "*"

// owners is the table "who owns which table" of the architecture as Go: one writer for each table,
// for who may write a row must keep its invariant. A table without a line here fails.
var owners = table(
	group{
		"scheduler/internal/nodes",
		"nodes node_leases peer_endpoints drains cpu_templates discovery_writer",
		[]string{
			"scheduler/internal/placement", "scheduler/internal/p2p", "scheduler/internal/bindings", "scheduler/internal/phases",
			"gateway/internal/routecache", "gateway/internal/routefeed", "gateway/internal/listing",
		},
	},
	group{
		"scheduler/internal/placement",
		"placements reservations tenant_quotas",
		[]string{"scheduler/internal/bindings"},
	},
	group{
		"scheduler/internal/bindings",
		"bindings revisions route_feed feed_meta feed_marks sandbox_events orphans",
		[]string{
			"scheduler/internal/placement", "scheduler/internal/phases",
			"gateway/internal/routecache", "gateway/internal/routefeed", "gateway/internal/listing", "gateway/internal/sessions",
		},
	},
	group{"scheduler/internal/p2p", "p2p_artifacts p2p_holders", []string{"scheduler/internal/placement"}},
	group{
		"scheduler/internal/sandboxes",
		"sandboxes sandbox_edges incarnations sandbox_activity lifecycle_log",
		[]string{
			"scheduler/internal/bindings", "scheduler/internal/phases",
			"gateway/internal/routecache", "gateway/internal/sessions", "gateway/internal/listing",
		},
	},
	group{"scheduler/internal/phases", "snapshots wake_events", []string{"scheduler/internal/sandboxes"}},
	group{"scheduler/internal/rollout", "processes rollout_gates", []string{everyService}},
	group{
		"gateway/internal/sessions",
		"sessions commands command_attempts operations route_records",
		[]string{"gateway/internal/history", "scheduler/internal/phases"},
	},
	group{
		"gateway/internal/history",
		"session_events retention_holds",
		[]string{"gateway/internal/sessions", "scheduler/internal/phases"},
	},
	group{"gateway/internal/auth", "principals role_verbs", []string{"dispatcher/internal/policies"}},
	group{"gateway/internal/limits", "rate_buckets", nil},
	group{
		"dispatcher/internal/deployments", "deployments",
		[]string{"dispatcher/internal/queue", "dispatcher/internal/consumers"},
	},
	group{
		"dispatcher/internal/queue",
		"tasks task_results task_keys task_families task_attempts fair_keys",
		[]string{"dispatcher/internal/deployments", "dispatcher/internal/schedules"},
	},
	group{"dispatcher/internal/consumers", "dispatchers consumers", []string{"dispatcher/internal/queue"}},
	group{"dispatcher/internal/schedules", "schedules", []string{"dispatcher/internal/queue"}},
	group{"dispatcher/internal/policies", "policy_heads policy_versions policy_denies", []string{"dispatcher/internal/queue"}},
)

// exceptions are packages outside the services that write a table, each with the moment it is for.
var exceptions = map[string]string{
	"berth/pkg/migrate": "feed_meta", // a restored database gets a new epoch before any service runs
}

// group is one line of the table in the architecture.
type group struct {
	writer  string
	tables  string // names with spaces between them
	readers []string
}

func table(groups ...group) map[string]Owner {
	owned := map[string]Owner{}
	for _, g := range groups {
		for name := range strings.FieldsSeq(g.tables) {
			owned[name] = Owner{g.writer, g.readers}
		}
	}
	return owned
}

// may says why the package may not use the table like this; "" passes.
func (o Owner) may(importPath string, u Use) string {
	if exceptions[importPath] == u.Table || importPath == docsPackage && !u.Write {
		return ""
	}
	user, inServices := strings.CutPrefix(importPath, "berth/services/")
	if inServices && below(user, o.Writer) {
		return ""
	}
	if u.Write {
		return fmt.Sprintf("writes %s, and only %s may, for it keeps the table's invariants", u.Table, o.Writer)
	}
	if inServices && slices.ContainsFunc(o.Readers, func(r string) bool { return r == everyService || below(user, r) }) {
		return ""
	}
	return fmt.Sprintf("reads %s without being a declared reader; it belongs to %s", u.Table, o.Writer)
}

func below(name, root string) bool { return name == root || strings.HasPrefix(name, root+"/") }
