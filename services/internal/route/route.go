// Package route has what a gateway needs to forward to a sandbox, which of two answers is newer,
// and which addresses a node may have.
package route

import (
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// Channel is the doorbell of the route feed: a notification there says that there is something to
// read, and carries nothing.
const Channel = "route"

// The kinds of rows in the route feed.
const (
	KindBinding = "binding"
	KindNode    = "node"
	KindPeer    = "peer"
	KindKey     = "key"
)

// Capabilities that a node announces about itself.
const (
	CapabilityNodeAPI       = "node.v1"        // its sandboxes are managed
	CapabilityRouteRevision = "route_revision" // it refuses a stale revision
	CapabilityCreateKey     = "create_key"     // it takes the sandbox id it is given, at most once
	CapabilityListCursor    = "list_cursor"
	CapabilityH2C           = "h2c"
)

// Route is which node has a sandbox, as one revision of its binding says.
type Route struct {
	Sandbox     sandbox.ID
	Node        node.ID
	Revision    sandbox.Revision
	Incarnation sandbox.Incarnation
	Tenant      string
	State       sandbox.State
}

// Newer reports whether r says something later about its sandbox than old does.
func (r Route) Newer(old Route) bool { return r.Revision > old.Revision }

// Live reports whether requests may be forwarded by r.
func (r Route) Live() bool { return r.State == sandbox.Bound }
