package adminapi

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"berth/migrations"
	"berth/pkg/pgtest"
	adminv1 "berth/rpc/admin/v1"
	"berth/services/internal/rpcerr"
	"berth/services/scheduler/internal/placement"
)

func newQuotas(t *testing.T) (*Quotas, *pgtest.Database) {
	t.Helper()
	db := pgtest.New(t, migrations.FS)
	return NewQuotas(placement.New(db.As(t, "berth_scheduler"), placement.DefaultConfig(), slog.New(slog.DiscardHandler), nil)), db
}

func TestAQuotaIsSetChangedAndRemoved(t *testing.T) {
	t.Parallel()
	service, db := newQuotas(t)
	for _, row := range []string{
		`INSERT INTO bindings (sandbox_id, state, node_id, origin, tenant_id, cpu_millis, memory_bytes) VALUES ('bound', 'bound', 'n', 'recorded', 't', 500, 1000)`,
		`INSERT INTO bindings (sandbox_id, state, node_id, origin, tenant_id, cpu_millis, memory_bytes, ended_at, ended_by)
		 VALUES ('gone', 'gone', 'n', 'recorded', 't', 500, 1000, now(), 'deleted')`,
		`INSERT INTO reservations (reservation_id, n, node_id, tenant_id, cpu_millis, memory_bytes, named, expires_at)
		 VALUES (gen_random_uuid(), 1, 'n', 't', 30, 40, true, now())`,
		`INSERT INTO reservations (reservation_id, n, node_id, tenant_id, cpu_millis, memory_bytes, named, sandbox_id)
		 VALUES (gen_random_uuid(), 1, 'n', 't', 500, 1000, true, 'bound')`,
		`UPDATE tenant_quotas SET max_sandboxes = 3 WHERE tenant_id = '*'`,
	} {
		if _, err := db.Exec(t.Context(), row); err != nil {
			t.Fatalf("%s: %v", row, err)
		}
	}
	number := func(n int64) *int64 { return &n }
	// Usage is the same throughout: what is gone counts no more, and what is bound counts once.
	used := func(q *adminv1.Quota) *adminv1.Quota {
		q.TenantId, q.UsedSandboxes, q.UsedCpuMillis, q.UsedMemoryBytes = "t", 2, 530, 1040
		return q
	}
	steps := []struct {
		name string
		set  *adminv1.SetQuotaRequest // nil: Get
		want *adminv1.Quota
	}{
		{"at first the tenant has what all have", nil, &adminv1.Quota{MaxSandboxes: number(3)}},
		{"one maximum of its own", &adminv1.SetQuotaRequest{MaxCpuMillis: number(4000)}, &adminv1.Quota{Own: true, MaxCpuMillis: number(4000)}},
		{"the same again", &adminv1.SetQuotaRequest{MaxCpuMillis: number(4000)}, &adminv1.Quota{Own: true, MaxCpuMillis: number(4000)}},
		{"another beside it", &adminv1.SetQuotaRequest{MaxSandboxes: number(0), MaxMemoryBytes: number(7)}, &adminv1.Quota{Own: true, MaxSandboxes: number(0), MaxCpuMillis: number(4000), MaxMemoryBytes: number(7)}},
		{"a limit less", &adminv1.SetQuotaRequest{MaxSandboxes: number(-1)}, &adminv1.Quota{Own: true, MaxCpuMillis: number(4000), MaxMemoryBytes: number(7)}},
		{"as it was", nil, &adminv1.Quota{Own: true, MaxCpuMillis: number(4000), MaxMemoryBytes: number(7)}},
		{"what all have", &adminv1.SetQuotaRequest{Remove: true}, &adminv1.Quota{MaxSandboxes: number(3)}},
		{"removed again", &adminv1.SetQuotaRequest{Remove: true}, &adminv1.Quota{MaxSandboxes: number(3)}},
	}
	for _, step := range steps {
		var got *adminv1.Quota
		if step.set == nil {
			answer, err := service.Get(t.Context(), &adminv1.GetQuotaRequest{TenantId: "t"})
			if err != nil {
				t.Fatalf("%s: Get = %v", step.name, err)
			}
			got = answer.GetQuota()
		} else {
			step.set.TenantId = "t"
			answer, err := service.Set(t.Context(), step.set)
			if err != nil {
				t.Fatalf("%s: Set = %v", step.name, err)
			}
			got = answer.GetQuota()
		}
		if diff := cmp.Diff(used(step.want), got, protocmp.Transform()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, diff)
		}
	}
}

func TestQuotasAreListedInPages(t *testing.T) {
	t.Parallel()
	service, db := newQuotas(t)
	for _, row := range []string{
		`INSERT INTO bindings (sandbox_id, state, node_id, origin, tenant_id) SELECT 'b' || i, 'bound', 'n', 'recorded', 'bound-' || i % 3 FROM generate_series(1, 12) AS i`,
		`INSERT INTO reservations (reservation_id, n, node_id, tenant_id, cpu_millis, memory_bytes, named, expires_at)
		 SELECT gen_random_uuid(), 1, 'n', 'held-' || i % 2, 1, 1, true, now() FROM generate_series(1, 6) AS i`,
		`INSERT INTO tenant_quotas (tenant_id, max_sandboxes) VALUES ('bound-1', 9)`,
	} {
		if _, err := db.Exec(t.Context(), row); err != nil {
			t.Fatalf("%s: %v", row, err)
		}
	}
	want := []string{"* 0 true", "bound-0 4 false", "bound-1 4 true", "bound-2 4 false", "default 0 true", "held-0 3 false", "held-1 3 false"}
	for _, limit := range []uint32{0, 1, 2, 7, 8} {
		var got []string
		after := ""
		for page := 0; page <= len(want); page++ {
			answer, err := service.List(t.Context(), &adminv1.ListQuotasRequest{AfterTenantId: after, Limit: limit})
			if err != nil {
				t.Fatalf("List = %v", err)
			}
			if limit > 0 && len(answer.GetQuotas()) > int(limit) {
				t.Errorf("a page of %d has %d", limit, len(answer.GetQuotas()))
			}
			if len(answer.GetQuotas()) == 0 {
				break
			}
			for _, q := range answer.GetQuotas() {
				after = q.GetTenantId()
				got = append(got, line(q))
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("in pages of %d (-want +got):\n%s", limit, diff)
		}
	}
}

func line(q *adminv1.Quota) string {
	own := " false"
	if q.GetOwn() {
		own = " true"
	}
	return q.GetTenantId() + " " + string(rune('0'+q.GetUsedSandboxes())) + own
}

func TestWhatIsNoQuota(t *testing.T) {
	t.Parallel()
	service, _ := newQuotas(t)
	number := func(n int64) *int64 { return &n }
	tests := map[string]struct {
		call func() error
		want string
	}{
		"of nobody": {func() error { _, err := service.Get(t.Context(), &adminv1.GetQuotaRequest{TenantId: " "}); return err }, "tenant_id is required"},
		"of an oversized id": {func() error {
			_, err := service.Get(t.Context(), &adminv1.GetQuotaRequest{TenantId: strings.Repeat("t", 129)})
			return err
		}, "field is not valid"},
		"after a control byte": {func() error {
			_, err := service.List(t.Context(), &adminv1.ListQuotasRequest{AfterTenantId: "\x00"})
			return err
		}, "field is not valid"},
		"below no limit": {func() error {
			_, err := service.Set(t.Context(), &adminv1.SetQuotaRequest{TenantId: "t", MaxSandboxes: number(-2)})
			return err
		}, "max_sandboxes must be -1, for no limit, or a number from 0"},
		"more than can be stored": {func() error {
			_, err := service.Set(t.Context(), &adminv1.SetQuotaRequest{TenantId: "t", MaxSandboxes: number(1 << 31)})
			return err
		}, "max_sandboxes must be -1, for no limit, or a number from 0"},
		"set and removed": {func() error {
			_, err := service.Set(t.Context(), &adminv1.SetQuotaRequest{TenantId: "t", MaxCpuMillis: number(1), Remove: true})
			return err
		}, "max_cpu_millis and remove exclude each other"},
		"no more for all": {func() error {
			_, err := service.Set(t.Context(), &adminv1.SetQuotaRequest{TenantId: "*", Remove: true})
			return err
		}, `the quota of "*" cannot be removed; set its maxima to -1`},
		"a page without bounds": {func() error { _, err := service.List(t.Context(), &adminv1.ListQuotasRequest{Limit: 1001}); return err }, "limit must be 1 to 1000"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := rpcerr.Twirp(tt.call())
			if got == nil || got.Code() != "invalid_argument" || got.Msg() != tt.want {
				t.Errorf("%v, want invalid_argument %q", got, tt.want)
			}
		})
	}
}
