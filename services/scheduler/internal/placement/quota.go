package placement

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
)

// selectQuotasSQL reads all rows: one without limits still keeps its tenant from those of '*'.
const selectQuotasSQL = `
SELECT  tenant_id, max_sandboxes, max_cpu_millis, max_memory_bytes
FROM    tenant_quotas`

// EveryTenant is the row for tenants that have none.
const EveryTenant = "*"

// quota is what a tenant may have at most; nil: no limit.
type quota struct {
	TenantID       string
	MaxSandboxes   *int64
	MaxCPUMillis   *int64 `db:"max_cpu_millis"`
	MaxMemoryBytes *int64
}

// quotas are the rows by tenant.
type quotas map[string]quota

// limit reports whether a tenant has any maximum. AgentENV's callers have no tenant.
func (all quotas) limit(tenant string) bool {
	if tenant == "" {
		return false
	}
	q, ok := all[tenant]
	if !ok {
		q = all[EveryTenant]
	}
	return q.MaxSandboxes != nil || q.MaxCPUMillis != nil || q.MaxMemoryBytes != nil
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

// usage is what a tenant has, bound sandboxes and open holds, beside what it may have.
type usage struct {
	quota
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

// overQuota is the first maximum that a request would exceed, or the zero one.
type overQuota struct {
	resource string
	limit    int64
	used     int64 // without the request
	asked    sum   // with it
}

// exceededBy says which maximum of q r would exceed beside u.
func (q quota) exceededBy(u usage, r *Request) overQuota {
	count := int64(r.Count)
	for _, of := range []struct {
		resource string
		most     *int64
		used     int64
		asked    sum
	}{
		{"sandboxes", q.MaxSandboxes, u.Sandboxes, total(u.Sandboxes, count)},
		{"cpu_millis", q.MaxCPUMillis, u.CPUMillis, plus(total(u.CPUMillis), total(r.Size.CPUMillis).times(count))},
		{"memory_bytes", q.MaxMemoryBytes, u.MemoryBytes, plus(total(u.MemoryBytes), total(r.Size.MemoryBytes).times(count))},
	} {
		if of.most != nil && of.asked.exceeds(uint64(*of.most), 1) {
			return overQuota{of.resource, *of.most, of.used, of.asked}
		}
	}
	return overQuota{}
}

// candidate is how the row of a refused placement tells it.
func (o overQuota) candidate() Candidate {
	return Candidate{Verdict: VerdictRefused, Reason: Reason("quota_" + o.resource), Value: o.asked.float(), Limit: float64(o.limit)}
}

// tell adds it to what the caller is told.
func (o overQuota) tell(told *node.Refused) *node.Refused {
	told.Resource, told.Limit, told.Used = o.resource, o.limit, o.used
	return told
}

// selectUsageSQL is read under the tenants' locks, in a later statement; the maxima with it, for those in
// a view may be of a quarter of a second ago. Sums stop at 2^62, so that two
// of them still add up.
const selectUsageSQL = `
SELECT  t.tenant_id, bound.sandboxes + held.sandboxes AS sandboxes, bound.cpu_millis + held.cpu_millis AS cpu_millis,
        bound.memory_bytes + held.memory_bytes AS memory_bytes, q.max_sandboxes, q.max_cpu_millis, q.max_memory_bytes
FROM    unnest(@tenants::text[]) AS t (tenant_id)
LEFT    JOIN tenant_quotas AS own ON own.tenant_id = t.tenant_id
LEFT    JOIN tenant_quotas AS q ON q.tenant_id = COALESCE(own.tenant_id, '*')
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
