package placement

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
)

// Quota is what a tenant may have, beside what it has.
type Quota struct {
	Tenant         string
	Own            bool   // false: the maxima are those of EveryTenant
	MaxSandboxes   *int64 // nil: no limit
	MaxCPUMillis   *int64
	MaxMemoryBytes *int64
	Sandboxes      int64 // bound sandboxes and open holds; what EveryTenant has is nothing
	CPUMillis      int64
	MemoryBytes    int64
}

// NoLimit as a maximum takes a limit away.
const NoLimit int64 = -1

// QuotaChange is what becomes of a tenant's maxima. Nil: as it is, or no limit for a tenant without a
// quota of its own.
type QuotaChange struct {
	MaxSandboxes   *int64
	MaxCPUMillis   *int64
	MaxMemoryBytes *int64
}

func scanQuota(row pgx.CollectableRow) (q Quota, err error) {
	err = row.Scan(&q.Tenant, &q.Own, &q.MaxSandboxes, &q.MaxCPUMillis, &q.MaxMemoryBytes, &q.Sandboxes, &q.CPUMillis, &q.MemoryBytes)
	return q, err
}

const selectTenantQuotasSQL = `
SELECT  t.tenant_id, own.tenant_id IS NOT NULL AS own, q.max_sandboxes, q.max_cpu_millis, q.max_memory_bytes,
        bound.sandboxes + held.sandboxes AS sandboxes, bound.cpu_millis + held.cpu_millis AS cpu_millis,
        bound.memory_bytes + held.memory_bytes AS memory_bytes
FROM    unnest(@tenants::text[]) WITH ORDINALITY AS t (tenant_id, place)
LEFT    JOIN tenant_quotas AS own ON own.tenant_id = t.tenant_id
LEFT    JOIN tenant_quotas AS q ON q.tenant_id = COALESCE(own.tenant_id, '*')
CROSS   JOIN LATERAL (
        SELECT count(*) AS sandboxes, LEAST(COALESCE(sum(b.cpu_millis), 0), 4611686018427387904)::bigint AS cpu_millis, LEAST(COALESCE(sum(b.memory_bytes), 0), 4611686018427387904)::bigint AS memory_bytes
        FROM   bindings AS b
        WHERE  b.tenant_id = t.tenant_id AND b.tenant_id <> '' AND b.state = 'bound') AS bound
CROSS   JOIN LATERAL (
        SELECT count(*) AS sandboxes, LEAST(COALESCE(sum(r.cpu_millis), 0), 4611686018427387904)::bigint AS cpu_millis, LEAST(COALESCE(sum(r.memory_bytes), 0), 4611686018427387904)::bigint AS memory_bytes
        FROM   reservations AS r
        WHERE  r.tenant_id = t.tenant_id AND r.sandbox_id IS NULL) AS held
ORDER   BY t.place`

// querier is a pool or a transaction.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

func readQuotas(ctx context.Context, db querier, tenants []string) ([]Quota, error) {
	rows, err := db.Query(ctx, selectTenantQuotasSQL, pgx.StrictNamedArgs{"tenants": tenants})
	if err != nil {
		return nil, fmt.Errorf("read %d quotas: %w", len(tenants), err)
	}
	quotas, err := pgx.CollectRows(rows, scanQuota)
	if err != nil {
		return nil, fmt.Errorf("read %d quotas: %w", len(tenants), err)
	}
	return quotas, nil
}

// Quota returns what a tenant may have and has, whether or not anybody knows the tenant.
func (p *Placer) Quota(ctx context.Context, tenant string) (Quota, error) {
	quotas, err := readQuotas(ctx, p.db, []string{tenant})
	if err != nil {
		return Quota{}, err
	}
	if len(quotas) != 1 {
		return Quota{}, errors.New("a quota came back more than once")
	}
	return quotas[0], nil
}

const upsertQuotaSQL = `
INSERT  INTO tenant_quotas AS q (tenant_id, max_sandboxes, max_cpu_millis, max_memory_bytes)
VALUES  (@tenant, nullif(@sandboxes::int, -1), nullif(@cpu_millis::bigint, -1), nullif(@memory_bytes::bigint, -1))
ON      CONFLICT (tenant_id) DO UPDATE
SET     max_sandboxes = CASE WHEN @sandboxes IS NULL THEN q.max_sandboxes ELSE EXCLUDED.max_sandboxes END,
        max_cpu_millis = CASE WHEN @cpu_millis IS NULL THEN q.max_cpu_millis ELSE EXCLUDED.max_cpu_millis END,
        max_memory_bytes = CASE WHEN @memory_bytes IS NULL THEN q.max_memory_bytes ELSE EXCLUDED.max_memory_bytes END`

const deleteQuotaSQL = `
DELETE  FROM tenant_quotas
WHERE   tenant_id = @tenant AND tenant_id <> '*'`

// SetQuota changes a tenant's maxima and returns what holds now. What the tenant has above a new maximum
// stays, and nothing comes to it. Placements that were decided under the old maxima are in the answer.
// All replicas judge by the new ones within the age of their view, a quarter of a second. It may repeat.
func (p *Placer) SetQuota(ctx context.Context, tenant string, to QuotaChange) (Quota, error) {
	return p.changeQuota(ctx, tenant, upsertQuotaSQL, pgx.StrictNamedArgs{
		"tenant": tenant, "sandboxes": to.MaxSandboxes, "cpu_millis": to.MaxCPUMillis, "memory_bytes": to.MaxMemoryBytes,
	})
}

// RemoveQuota takes a tenant's own maxima away, so that those of EveryTenant hold. It may repeat.
func (p *Placer) RemoveQuota(ctx context.Context, tenant string) (Quota, error) {
	return p.changeQuota(ctx, tenant, deleteQuotaSQL, pgx.StrictNamedArgs{"tenant": tenant})
}

func (p *Placer) changeQuota(ctx context.Context, tenant, sql string, args pgx.StrictNamedArgs) (Quota, error) {
	var changed Quota
	err := p.db.Tx(ctx, func(tx pgx.Tx) error {
		if err := pgdb.Lock(ctx, tx, advisory.Tenant(tenant)); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, sql, args); err != nil {
			return err
		}
		quotas, err := readQuotas(ctx, tx, []string{tenant})
		if err == nil && len(quotas) == 1 {
			changed = quotas[0]
		}
		return err
	})
	if err != nil {
		return Quota{}, fmt.Errorf("change the quota of a tenant: %w", err)
	}
	return changed, nil
}

// listTenantsSQL walks the indexes from one tenant to the next, so that a tenant with many sandboxes
// costs as much as one with a few.
const listTenantsSQL = `
WITH    RECURSIVE bound (tenant_id, place) AS (
        SELECT (SELECT min(b.tenant_id) FROM bindings AS b WHERE b.state = 'bound' AND b.tenant_id <> '' AND b.tenant_id > @after::text), 1
        UNION  ALL
        SELECT (SELECT min(b.tenant_id) FROM bindings AS b WHERE b.state = 'bound' AND b.tenant_id <> '' AND b.tenant_id > bound.tenant_id), bound.place + 1
        FROM   bound
        WHERE  bound.tenant_id IS NOT NULL AND bound.place < @most::bigint),
        held (tenant_id, place) AS (
        SELECT (SELECT min(r.tenant_id) FROM reservations AS r WHERE r.sandbox_id IS NULL AND r.tenant_id > @after), 1
        UNION  ALL
        SELECT (SELECT min(r.tenant_id) FROM reservations AS r WHERE r.sandbox_id IS NULL AND r.tenant_id > held.tenant_id), held.place + 1
        FROM   held
        WHERE  held.tenant_id IS NOT NULL AND held.place < @most)
SELECT  tenant_id
FROM    (SELECT tenant_id FROM bound
        UNION
        SELECT tenant_id FROM held
        UNION
        SELECT tenant_id FROM tenant_quotas WHERE tenant_id > @after) AS known
WHERE   tenant_id IS NOT NULL
ORDER   BY tenant_id
LIMIT   @most`

// ListQuotas returns at most limit tenants after the given one, by id, that have a quota or anything else.
func (p *Placer) ListQuotas(ctx context.Context, after string, limit int) ([]Quota, error) {
	rows, err := p.db.Query(ctx, listTenantsSQL, pgx.StrictNamedArgs{"after": after, "most": limit})
	if err != nil {
		return nil, fmt.Errorf("list tenants: %w", err)
	}
	tenants, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("list tenants: %w", err)
	}
	return readQuotas(ctx, p.db, tenants)
}
