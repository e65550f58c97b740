package placement

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
)

// selectQuotasSQL reads all rows: one without limits still keeps its tenant from those of '*'.
const selectQuotasSQL = `
SELECT  tenant_id, max_sandboxes, max_cpu_millis, max_memory_bytes
FROM    tenant_quotas`

// everyTenant is the row for tenants that have none.
const everyTenant = "*"

// quota is what a tenant may have at most; nil: no limit.
type quota struct {
	TenantID       string
	MaxSandboxes   *int64
	MaxCPUMillis   *int64 `db:"max_cpu_millis"`
	MaxMemoryBytes *int64
}

// quotas are the rows by tenant.
type quotas map[string]quota

// of returns the limits of a tenant, and whether there are any. AgentENV's callers have no tenant.
func (all quotas) of(tenant string) (quota, bool) {
	if tenant == "" {
		return quota{}, false
	}
	q, ok := all[tenant]
	if !ok {
		q = all[everyTenant]
	}
	return q, q.MaxSandboxes != nil || q.MaxCPUMillis != nil || q.MaxMemoryBytes != nil
}

func scanQuotas(rows pgx.Rows) (quotas, error) {
	read, err := pgx.CollectRows(rows, pgx.RowToStructByName[quota])
	if err != nil {
		return nil, err
	}
	all := make(quotas, len(read))
	for _, q := range read {
		all[q.TenantID] = q
	}
	return all, nil
}

// usage is what a tenant has: bound sandboxes and open holds.
type usage struct {
	TenantID    string
	Sandboxes   int64
	CPUMillis   int64 `db:"cpu_millis"`
	MemoryBytes int64
}

func (u usage) add(r *Request) usage {
	count := int64(r.Count)
	u.Sandboxes += count
	u.CPUMillis = saturated(u.CPUMillis, r.Size.CPUMillis, count)
	u.MemoryBytes = saturated(u.MemoryBytes, r.Size.MemoryBytes, count)
	return u
}

// exceededBy names the resource that r would take above q, and "" if there is none.
func (q quota) exceededBy(u usage, r *Request) string {
	count := int64(r.Count)
	switch {
	case q.MaxSandboxes != nil && total(u.Sandboxes, count).exceeds(uint64(*q.MaxSandboxes), 1):
		return "sandboxes"
	case q.MaxCPUMillis != nil && plus(total(u.CPUMillis), total(r.Size.CPUMillis).times(count)).exceeds(uint64(*q.MaxCPUMillis), 1):
		return "cpu_millis"
	case q.MaxMemoryBytes != nil && plus(total(u.MemoryBytes), total(r.Size.MemoryBytes).times(count)).exceeds(uint64(*q.MaxMemoryBytes), 1):
		return "memory_bytes"
	}
	return ""
}

// selectUsageSQL is read under the tenants' locks, in a later statement. Sums stop at 2^62, so that two
// of them still add up.
const selectUsageSQL = `
SELECT  t.tenant_id, bound.sandboxes + held.sandboxes AS sandboxes, bound.cpu_millis + held.cpu_millis AS cpu_millis,
        bound.memory_bytes + held.memory_bytes AS memory_bytes
FROM    unnest(@tenants::text[]) AS t (tenant_id)
CROSS   JOIN LATERAL (
        SELECT count(*) AS sandboxes, LEAST(COALESCE(sum(b.cpu_millis), 0), 4611686018427387904)::bigint AS cpu_millis, LEAST(COALESCE(sum(b.memory_bytes), 0), 4611686018427387904)::bigint AS memory_bytes
        FROM   bindings AS b
        WHERE  b.tenant_id = t.tenant_id AND b.tenant_id <> '' AND b.state = 'bound') AS bound
CROSS   JOIN LATERAL (
        SELECT count(*) AS sandboxes, LEAST(COALESCE(sum(r.cpu_millis), 0), 4611686018427387904)::bigint AS cpu_millis, LEAST(COALESCE(sum(r.memory_bytes), 0), 4611686018427387904)::bigint AS memory_bytes
        FROM   reservations AS r
        WHERE  r.tenant_id = t.tenant_id AND r.sandbox_id IS NULL) AS held`

func scanUsage(rows pgx.Rows) (map[string]usage, error) {
	read, err := pgx.CollectRows(rows, pgx.RowToStructByName[usage])
	if err != nil {
		return nil, err
	}
	used := make(map[string]usage, len(read))
	for _, u := range read {
		used[u.TenantID] = u
	}
	return used, nil
}

func readUsage(ctx context.Context, db *pgdb.DB, tenant string) (usage, error) {
	rows, err := db.Query(ctx, selectUsageSQL, pgx.StrictNamedArgs{"tenants": []string{tenant}})
	if err != nil {
		return usage{}, fmt.Errorf("read the usage of a tenant: %w", err)
	}
	used, err := scanUsage(rows)
	if err != nil {
		return usage{}, fmt.Errorf("read the usage of a tenant: %w", err)
	}
	return used[tenant], nil
}
