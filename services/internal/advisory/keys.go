// Package advisory names what Berth's advisory locks protect. Keys sort by class first, and that
// is the order in which they are taken: Request, Tenant, Template, Node, Sandbox.
package advisory

import (
	"berth/pkg/pgdb"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// The classes of lock_key. Their order is the lock order; the numbers never change.
const (
	classRequest  = 1
	classTenant   = 2
	classTemplate = 3
	classNode     = 4
	classSandbox  = 5
	classLoop     = 64
)

// separator stands between tenant and key: no tenant has a control character in its id.
const separator = "\x1f"

// Request is the lock of one request id, or of one create key.
func Request(tenant, key string) pgdb.Key {
	return pgdb.Key{Class: classRequest, ID: tenant + separator + key}
}

// Tenant is the lock under which a tenant's quota is judged.
func Tenant(tenant string) pgdb.Key { return pgdb.Key{Class: classTenant, ID: tenant} }

// Template is the lock under which a cluster's CPU template is computed.
func Template(cluster string) pgdb.Key { return pgdb.Key{Class: classTemplate, ID: cluster} }

// Node is the lock of whoever changes a node's room or the right to place on it.
func Node(id node.ID) pgdb.Key { return pgdb.Key{Class: classNode, ID: string(id)} }

// Sandbox is the lock of one sandbox's lifecycle.
func Sandbox(id sandbox.ID) pgdb.Key { return pgdb.Key{Class: classSandbox, ID: string(id)} }

// Loop is the lock of one pass of a loop; it is only tried.
func Loop(name string) pgdb.Key { return pgdb.Key{Class: classLoop, ID: name} }
