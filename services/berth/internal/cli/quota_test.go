package cli_test

import (
	"context"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/twitchtv/twirp"
	"google.golang.org/protobuf/testing/protocmp"

	adminv1 "berth/rpc/admin/v1"
)

// quotas is a scheduler that knows one tenant and remembers what it was asked.
type quotas struct{ set []*adminv1.SetQuotaRequest }

func number(n int64) *int64 { return new(n) }

func (q *quotas) quota(tenant string) *adminv1.Quota {
	return &adminv1.Quota{
		TenantId: tenant, Own: tenant == "t", MaxSandboxes: number(10), MaxMemoryBytes: number(16 << 30),
		UsedSandboxes: 3, UsedCpuMillis: 1500, UsedMemoryBytes: 512 << 20,
	}
}

func (q *quotas) Get(_ context.Context, r *adminv1.GetQuotaRequest) (*adminv1.GetQuotaResponse, error) {
	if r.GetTenantId() == "broken" {
		return nil, twirp.InternalError("internal error").WithMeta("reason", "internal")
	}
	return &adminv1.GetQuotaResponse{Quota: q.quota(r.GetTenantId())}, nil
}

func (q *quotas) Set(_ context.Context, r *adminv1.SetQuotaRequest) (*adminv1.SetQuotaResponse, error) {
	q.set = append(q.set, r)
	return &adminv1.SetQuotaResponse{Quota: q.quota(r.GetTenantId())}, nil
}

func (q *quotas) List(context.Context, *adminv1.ListQuotasRequest) (*adminv1.ListQuotasResponse, error) {
	return &adminv1.ListQuotasResponse{Quotas: []*adminv1.Quota{q.quota("*"), q.quota("t")}}, nil
}

func serveQuotas(t *testing.T) (*quotas, string) {
	t.Helper()
	q := &quotas{}
	server := httptest.NewServer(adminv1.NewQuotasServer(q))
	t.Cleanup(server.Close)
	return q, server.URL
}

func TestQuotasAreShownForPeopleAndForScripts(t *testing.T) {
	t.Parallel()
	_, url := serveQuotas(t)
	tests := map[string]struct {
		args []string
		want string // how it begins
	}{
		"one":        {[]string{"get", "t"}, "Tenant      t\nQuota       own\nSandboxes   3 of 10\nCPU         1500m of any\nMemory      512 MiB of 16 GiB\n"},
		"all":        {[]string{"list"}, "TENANT   QUOTA   SANDBOXES   CPU            MEMORY\n*        of *    3 of 10     1500m of any   512 MiB of 16 GiB\nt        own     3 of 10"},
		"changed":    {[]string{"set", "u", "--sandboxes", "10"}, "Tenant      u\nQuota       of *\nSandboxes   3 of 10\n"},
		"for a file": {[]string{"get", "t", "-o", "json"}, "{\n"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, stdout, stderr := run(append(append([]string{"quota"}, tt.args...), "--scheduler-url", url)...)
			if code != 0 || !strings.HasPrefix(stdout, tt.want) || stderr != "" {
				t.Errorf("berth quota %q = %d, stderr %q, stdout:\n%s\nwant it to begin with:\n%s", tt.args, code, stderr, stdout, tt.want)
			}
		})
	}
	_, stdout, _ := run("quota", "get", "t", "-o", "json", "--scheduler-url", url)
	for _, field := range []string{`"own":`, `"max_sandboxes":`, `"used_memory_bytes":`} {
		if !strings.Contains(stdout, field) {
			t.Errorf("%s has no %s", stdout, field)
		}
	}
	if strings.Contains(stdout, "max_cpu_millis") {
		t.Errorf("%s has a maximum that there is not", stdout)
	}
}

func TestWhatIsSetIsWhatWasNamed(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		args []string
		want *adminv1.SetQuotaRequest
	}{
		"one":            {[]string{"--sandboxes", "7"}, &adminv1.SetQuotaRequest{MaxSandboxes: number(7)}},
		"none at all":    {[]string{"--sandboxes", "0"}, &adminv1.SetQuotaRequest{MaxSandboxes: number(0)}},
		"as many as any": {[]string{"--sandboxes", "none", "--memory", "none"}, &adminv1.SetQuotaRequest{MaxSandboxes: number(-1), MaxMemoryBytes: number(-1)}},
		"a tenth":        {[]string{"--cpu", "0.1"}, &adminv1.SetQuotaRequest{MaxCpuMillis: number(100)}},
		"cores":          {[]string{"--cpu", "1.5"}, &adminv1.SetQuotaRequest{MaxCpuMillis: number(1500)}},
		"their parts":    {[]string{"--cpu", "250m"}, &adminv1.SetQuotaRequest{MaxCpuMillis: number(250)}},
		"bytes":          {[]string{"--memory", "123"}, &adminv1.SetQuotaRequest{MaxMemoryBytes: number(123)}},
		"a unit":         {[]string{"--memory", "16GiB"}, &adminv1.SetQuotaRequest{MaxMemoryBytes: number(16 << 30)}},
		"no longer":      {[]string{"--remove"}, &adminv1.SetQuotaRequest{Remove: true}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			q, url := serveQuotas(t)
			if code, _, stderr := run(append([]string{"quota", "set", "t", "--scheduler-url", url}, tt.args...)...); code != 0 {
				t.Fatalf("berth quota set %q = %d, %s", tt.args, code, stderr)
			}
			tt.want.TenantId = "t"
			if diff := cmp.Diff([]*adminv1.SetQuotaRequest{tt.want}, q.set, protocmp.Transform()); diff != "" {
				t.Errorf("asked for (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAMisusedQuotaCommandAsksNobody(t *testing.T) {
	t.Parallel()
	q, url := serveQuotas(t)
	tests := map[string]struct {
		args []string
		want string
	}{
		"nothing to set":      {nil, "name --sandboxes, --cpu or --memory, or --remove alone"},
		"both":                {[]string{"--remove", "--cpu", "1"}, "name --sandboxes, --cpu or --memory, or --remove alone"},
		"a negative number":   {[]string{"--sandboxes=-1"}, "a number from 0, or none is wanted"},
		"no number":           {[]string{"--cpu", "many"}, "cores like 8, 1.5 or 1500m, or none is wanted"},
		"no number of cores":  {[]string{"--cpu", "NaN"}, "cores like 8, 1.5 or 1500m, or none is wanted"},
		"more than there is":  {[]string{"--memory", "9999999999TiB"}, "a size like 16GiB, or none is wanted"},
		"what would be none":  {[]string{"--cpu", "0.0001"}, "cores like 8, 1.5 or 1500m, or none is wanted"},
		"a unit of ten":       {[]string{"--memory", "1GB"}, "a size like 16GiB, or none is wanted"},
		"too many to be kept": {[]string{"--sandboxes", "2147483648"}, "a number from 0, or none is wanted"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			code, _, stderr := run(append([]string{"quota", "set", "t", "--scheduler-url", url}, tt.args...)...)
			if code != 2 || !strings.Contains(stderr, tt.want) {
				t.Errorf("berth quota set t %q = %d, %q, want 2, %q", tt.args, code, stderr, tt.want)
			}
		})
	}
	if code, _, stderr := run("quota", "set", "*", "--remove", "--scheduler-url", url); code != 2 || !strings.Contains(stderr, "berth quota set '*' --sandboxes none") {
		t.Errorf("removing what stands for all: %d, %q", code, stderr)
	}
	if len(q.set) != 0 {
		t.Errorf("the scheduler was asked %v", q.set)
	}
	if code, _, stderr := run("quota", "get", "broken", "--scheduler-url", url); code != 1 || !strings.Contains(stderr, "get quota: internal error") {
		t.Errorf("a scheduler that fails: %d, %q", code, stderr)
	}
}
