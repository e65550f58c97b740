package cli

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"berth/pkg/twirpkit"
	adminv1 "berth/rpc/admin/v1"
)

// everyTenant stands for all tenants without a quota of their own.
const everyTenant = "*"

func quotaCommand() *cobra.Command {
	return group("quota", "Say what tenants may have, and see what they have",
		`Commands for quotas. A quota is a tenant's maximum of sandboxes, CPU and memory; the tenant "*" stands for all
that have none of their own. They speak to a scheduler (BERTH_SCHEDULER_URL) with an operator's token
(BERTH_SCHEDULER_TOKEN).`,
		quotaGetCommand(), quotaSetCommand(), quotaListCommand())
}

// asking is a command that asks a scheduler about quotas.
func asking(cmd *cobra.Command, ask func(ctx context.Context, quotas adminv1.Quotas, args []string) (func(out *output) error, error)) *cobra.Command {
	var (
		out output
		s   schedulerFlags
	)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		client, err := s.client(cmd)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), s.timeout)
		defer cancel()
		show, err := ask(ctx, quotasOf(client), args)
		if _, misused := errors.AsType[*usageError](err); misused {
			return err
		}
		if err != nil {
			return fmt.Errorf("%s quota: %w", cmd.Name(), explainSchedulerError(err, s.urls))
		}
		return show(&out)
	}
	out.flags(cmd.Flags())
	s.flags(cmd.Flags())
	return cmd
}

func quotasOf(client *twirpkit.Failover) adminv1.Quotas {
	return adminv1.NewQuotasProtobufClient(client.Base(), client)
}

func quotaGetCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "get TENANT",
		Short:   "Show what a tenant may have and has",
		Example: "  berth quota get default\n  berth quota get default -o json | jq .used_sandboxes",
		Args:    exactArgs("TENANT"),
	}
	return asking(cmd, func(ctx context.Context, quotas adminv1.Quotas, args []string) (func(*output) error, error) {
		answer, err := quotas.Get(ctx, &adminv1.GetQuotaRequest{TenantId: args[0]})
		return func(out *output) error { return showQuota(cmd, out, answer.GetQuota()) }, err
	})
}

// maximum is a flag for one maximum: a number, or "none" for no limit.
type maximum struct {
	value  *int64 // nil: not given
	parse  func(text string) (int64, error)
	wanted string
}

// String, Set and Type make maximum a flag.
func (m *maximum) String() string {
	if m.value == nil {
		return ""
	}
	return strconv.FormatInt(*m.value, 10)
}

// Set takes what is wanted, or none.
func (m *maximum) Set(text string) error {
	if text == "none" {
		m.value = new(int64(-1))
		return nil
	}
	value, err := m.parse(text)
	if err != nil || value < 0 {
		return fmt.Errorf("%s, or none is wanted", m.wanted)
	}
	m.value = &value
	return nil
}

// Type is what help shows.
func (m *maximum) Type() string { return "maximum" }

func parseCount(text string) (int64, error) { return strconv.ParseInt(text, 10, 32) }

// parseMillis reads thousandths of a core as 1500m, and cores as 1.5. What is finer than a thousandth is refused:
// rounded down it would be none at all.
func parseMillis(text string) (int64, error) {
	if millis, ok := strings.CutSuffix(text, "m"); ok {
		return strconv.ParseInt(millis, 10, 64)
	}
	cores, err := strconv.ParseFloat(text, 64)
	if err != nil || !(cores >= 0 && cores <= 1e12) {
		return 0, errors.New("not a number of cores")
	}
	millis := math.Round(cores * 1000)
	if math.Abs(cores*1000-millis) > 1e-6*max(millis, 1) {
		return 0, errors.New("finer than a thousandth of a core")
	}
	return int64(millis), nil
}

// parseBytes reads a number of bytes, or of a binary unit such as 16GiB.
func parseBytes(text string) (int64, error) {
	shift := 0
	for i, unit := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if number, ok := strings.CutSuffix(text, unit); ok {
			text, shift = strings.TrimSpace(number), 10*(i+1)
		}
	}
	value, err := strconv.ParseInt(text, 10, 64)
	if err != nil || value > (1<<62)>>shift {
		return 0, errors.New("not a number of bytes")
	}
	return value << shift, nil
}

func quotaSetCommand() *cobra.Command {
	var (
		sandboxes = maximum{parse: parseCount, wanted: "a number from 0"}
		cpu       = maximum{parse: parseMillis, wanted: "cores like 8, 1.5 or 1500m"}
		memory    = maximum{parse: parseBytes, wanted: "a size like 16GiB"}
		remove    bool
	)
	cmd := &cobra.Command{
		Use:   "set TENANT",
		Short: "Change what a tenant may have",
		Long: `Changes the maxima that are named; the others stay. What the tenant has above a new maximum stays too, and nothing
comes to it. Placements follow within a quarter of a second.`,
		Example: "  berth quota set default --sandboxes 50 --cpu 100 --memory 256GiB\n  berth quota set default --cpu none\n" +
			"  berth quota set '*' --sandboxes 10\n  berth quota set default --remove",
		Args: exactArgs("TENANT"),
	}
	fs := cmd.Flags()
	maximumFlag(fs, &sandboxes, "sandboxes", "most sandboxes, a `number` or none")
	maximumFlag(fs, &cpu, "cpu", "most `cores`, like 8, 1.5 or 1500m, or none")
	maximumFlag(fs, &memory, "memory", "most memory, a `size` like 16GiB, or none")
	fs.BoolVar(&remove, "remove", false, `take the tenant's own quota away: it has that of "*"`)
	return asking(cmd, func(ctx context.Context, quotas adminv1.Quotas, args []string) (func(*output) error, error) {
		named := sandboxes.value != nil || cpu.value != nil || memory.value != nil
		if named == remove {
			return nil, usagef(cmd, "name --sandboxes, --cpu or --memory, or --remove alone")
		}
		if remove && args[0] == everyTenant {
			return nil, usagef(cmd, "the quota of %[1]q stays; take its maxima away: berth quota set '%[1]s' --sandboxes none --cpu none --memory none", everyTenant)
		}
		answer, err := quotas.Set(ctx, &adminv1.SetQuotaRequest{
			TenantId: args[0], MaxSandboxes: sandboxes.value, MaxCpuMillis: cpu.value, MaxMemoryBytes: memory.value, Remove: remove,
		})
		return func(out *output) error { return showQuota(cmd, out, answer.GetQuota()) }, err
	})
}

func maximumFlag(fs *pflag.FlagSet, m *maximum, name, usage string) { fs.Var(m, name, usage) }

func quotaListCommand() *cobra.Command {
	var (
		after string
		limit uint32
	)
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List the tenants that have a quota or anything else",
		Example: "  berth quota list\n  berth quota list -o json | jq -r '.quotas[] | select(.own) | .tenant_id'",
		Args:    exactArgs(),
	}
	fs := cmd.Flags()
	fs.StringVar(&after, "after", "", "only tenants after this `id`")
	fs.Uint32Var(&limit, "limit", 0, "most tenants, up to 1000; 0: 100")
	return asking(cmd, func(ctx context.Context, quotas adminv1.Quotas, _ []string) (func(*output) error, error) {
		answer, err := quotas.List(ctx, &adminv1.ListQuotasRequest{AfterTenantId: after, Limit: limit})
		return func(out *output) error {
			if out.json() {
				return writeProto(cmd, answer)
			}
			rows := make([][]string, 0, len(answer.GetQuotas()))
			for _, q := range answer.GetQuotas() {
				rows = append(rows, append([]string{q.GetTenantId(), quotaOwner(q)}, quotaCells(q)...))
			}
			return writeTable(cmd.OutOrStdout(), []string{"TENANT", "QUOTA", "SANDBOXES", "CPU", "MEMORY"}, rows)
		}, err
	})
}

func showQuota(cmd *cobra.Command, out *output, q *adminv1.Quota) error {
	if out.json() {
		return writeProto(cmd, q)
	}
	cells := quotaCells(q)
	return writeFields(cmd.OutOrStdout(), [][2]string{
		{"Tenant", q.GetTenantId()}, {"Quota", quotaOwner(q)}, {"Sandboxes", cells[0]}, {"CPU", cells[1]}, {"Memory", cells[2]},
	})
}

func quotaOwner(q *adminv1.Quota) string {
	if q.GetOwn() {
		return "own"
	}
	return "of *"
}

// quotaCells says for sandboxes, CPU and memory how much there is of how much there may be.
func quotaCells(q *adminv1.Quota) []string {
	count := func(n int64) string { return strconv.FormatInt(n, 10) }
	millis := func(n int64) string { return strconv.FormatInt(n, 10) + "m" }
	of := func(used int64, most *int64, text func(int64) string) string {
		if most == nil {
			return text(used) + " of any"
		}
		return text(used) + " of " + text(*most)
	}
	return []string{
		of(q.GetUsedSandboxes(), q.MaxSandboxes, count), of(q.GetUsedCpuMillis(), q.MaxCpuMillis, millis),
		of(q.GetUsedMemoryBytes(), q.MaxMemoryBytes, size),
	}
}
