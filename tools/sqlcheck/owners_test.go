package main

import "testing"

func TestOnlyTheOwnerWritesAndOnlyDeclaredReadersRead(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		from  string
		use   Use
		fails bool
	}{
		"the owner writes":                     {"berth/services/scheduler/internal/nodes", Use{"node_leases", true}, false},
		"the owner reads":                      {"berth/services/scheduler/internal/nodes", Use{"node_leases", false}, false},
		"a package below the owner writes":     {"berth/services/scheduler/internal/nodes/x", Use{"node_leases", true}, false},
		"a declared reader reads":              {"berth/services/gateway/internal/routecache", Use{"bindings", false}, false},
		"a declared reader writes":             {"berth/services/gateway/internal/routecache", Use{"bindings", true}, true},
		"a stranger reads":                     {"berth/services/gateway/internal/auth", Use{"bindings", false}, true},
		"a stranger writes":                    {"berth/services/gateway/internal/launch", Use{"bindings", true}, true},
		"a kit reads":                          {"berth/pkg/pgdb", Use{"bindings", false}, true},
		"a kit reads what every service may":   {"berth/pkg/pgdb", Use{"processes", false}, true},
		"a service reads what every one may":   {"berth/services/gateway", Use{"processes", false}, false},
		"a service writes what every may read": {"berth/services/gateway", Use{"processes", true}, true},
		"migrations renew the epoch":           {"berth/pkg/migrate", Use{"feed_meta", true}, false},
		"migrations write nothing else":        {"berth/pkg/migrate", Use{"bindings", true}, true},
		"a page reads":                         {docsPackage, Use{"bindings", false}, false},
		"a page tells people to write":         {docsPackage, Use{"bindings", true}, true},
		"a name that only begins alike":        {"berth/services/scheduler/internal/nodesandmore", Use{"nodes", true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			owner, ok := owners[tt.use.Table]
			if !ok {
				t.Fatalf("table %s has no owner", tt.use.Table)
			}
			if why := owner.may(tt.from, tt.use); (why != "") != tt.fails {
				t.Errorf("%s, %+v: %q, want a refusal: %t", tt.from, tt.use, why, tt.fails)
			}
		})
	}
}
