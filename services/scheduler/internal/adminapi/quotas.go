package adminapi

import (
	"context"
	"math"
	"net/http"
	"strings"

	"github.com/twitchtv/twirp"

	adminv1 "berth/rpc/admin/v1"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
	"berth/services/scheduler/internal/placement"
)

// Quotas is the service of that name.
type Quotas struct{ placer *placement.Placer }

// NewQuotas returns the service.
func NewQuotas(placer *placement.Placer) *Quotas { return &Quotas{placer} }

// Twirp returns the service's path and its handler behind intercept.
func (s *Quotas) Twirp(intercept twirp.Interceptor) (prefix string, handler http.Handler) {
	server := adminv1.NewQuotasServer(s, twirp.WithServerInterceptors(intercept))
	return server.PathPrefix(), server
}

// Get returns what a tenant may have and has. Called by operators; it changes nothing.
func (s *Quotas) Get(ctx context.Context, r *adminv1.GetQuotaRequest) (*adminv1.GetQuotaResponse, error) {
	tenant, err := quotaTenant(r.GetTenantId())
	if err != nil {
		return nil, err
	}
	quota, err := s.placer.Quota(ctx, tenant)
	if err != nil {
		return nil, err
	}
	return &adminv1.GetQuotaResponse{Quota: quotaToWire(&quota)}, nil
}

// Set changes a tenant's maxima. Called by operators; the same call again changes nothing.
func (s *Quotas) Set(ctx context.Context, r *adminv1.SetQuotaRequest) (*adminv1.SetQuotaResponse, error) {
	tenant, err := quotaTenant(r.GetTenantId())
	if err != nil {
		return nil, err
	}
	for _, of := range []struct {
		field string
		value *int64
		most  int64
	}{
		{"max_sandboxes", r.MaxSandboxes, math.MaxInt32},
		{"max_cpu_millis", r.MaxCpuMillis, math.MaxInt64},
		{"max_memory_bytes", r.MaxMemoryBytes, math.MaxInt64},
	} {
		switch {
		case of.value == nil:
		case r.GetRemove():
			return nil, &rpcerr.Invalid{Text: of.field + " and remove exclude each other"}
		case *of.value < placement.NoLimit || *of.value > of.most:
			return nil, &rpcerr.Invalid{Text: of.field + " must be -1, for no limit, or a number from 0"}
		}
	}
	var quota placement.Quota
	switch {
	case r.GetRemove() && tenant == placement.EveryTenant:
		return nil, &rpcerr.Invalid{Text: `the quota of "*" cannot be removed; set its maxima to -1`}
	case r.GetRemove():
		quota, err = s.placer.RemoveQuota(ctx, tenant)
	default:
		quota, err = s.placer.SetQuota(ctx, tenant, placement.QuotaChange{
			MaxSandboxes: r.MaxSandboxes, MaxCPUMillis: r.MaxCpuMillis, MaxMemoryBytes: r.MaxMemoryBytes,
		})
	}
	if err != nil {
		return nil, err
	}
	return &adminv1.SetQuotaResponse{Quota: quotaToWire(&quota)}, nil
}

// List returns the tenants that have a quota or anything else. Called by operators; it changes nothing.
func (s *Quotas) List(ctx context.Context, r *adminv1.ListQuotasRequest) (*adminv1.ListQuotasResponse, error) {
	limit, err := pageOf(r.GetLimit())
	if err != nil {
		return nil, err
	}
	if err := node.CheckTag("after_tenant_id", r.GetAfterTenantId()); err != nil {
		return nil, err
	}
	quotas, err := s.placer.ListQuotas(ctx, r.GetAfterTenantId(), limit)
	if err != nil {
		return nil, err
	}
	out := &adminv1.ListQuotasResponse{Quotas: make([]*adminv1.Quota, len(quotas))}
	for i := range quotas {
		out.Quotas[i] = quotaToWire(&quotas[i])
	}
	return out, nil
}

func quotaTenant(id string) (string, error) {
	if strings.TrimSpace(id) == "" {
		return "", &rpcerr.Invalid{Text: "tenant_id is required"}
	}
	return id, node.CheckTag("tenant_id", id)
}

func quotaToWire(q *placement.Quota) *adminv1.Quota {
	return &adminv1.Quota{
		TenantId: q.Tenant, Own: q.Own, MaxSandboxes: q.MaxSandboxes, MaxCpuMillis: q.MaxCPUMillis, MaxMemoryBytes: q.MaxMemoryBytes,
		UsedSandboxes: q.Sandboxes, UsedCpuMillis: q.CPUMillis, UsedMemoryBytes: q.MemoryBytes,
	}
}
