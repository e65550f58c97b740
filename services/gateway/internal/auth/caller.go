package auth

import (
	"slices"
	"strings"
)

// Scopes that this build checks. A key has some of them; Admin stands for all.
const (
	SandboxesRead  = "sandboxes:read"
	SandboxesWrite = "sandboxes:write"
	NodesRead      = "nodes:read"
	Admin          = "cluster:admin"
)

// DefaultTenant is the bootstrap key's.
const DefaultTenant = "default"

// Caller is who sent a request.
type Caller struct {
	Tenant string   // "" for an operator's key without one
	Key    string   // the key's public id, or "bootstrap"; may be logged
	Scopes []string // sorted
}

// Allows reports whether the caller has scope: by name, as the write that includes a read, or
// because it may do everything.
func (c Caller) Allows(scope string) bool {
	if c.has(Admin) || c.has(scope) {
		return true
	}
	family, isRead := strings.CutSuffix(scope, ":read")
	return isRead && c.has(family+":write")
}

// Sees reports whether a sandbox of tenant exists for the caller. What has no tenant, such as a
// sandbox a node brought along, is for cluster:admin alone.
func (c Caller) Sees(tenant string) bool {
	return c.SeesAll() || tenant != "" && tenant == c.Tenant
}

// SeesAll reports whether every tenant's sandboxes exist for the caller.
func (c Caller) SeesAll() bool { return c.has(Admin) }

func (c Caller) has(scope string) bool {
	_, found := slices.BinarySearch(c.Scopes, scope)
	return found
}
