package cli

import (
	"context"
	"strconv"

	"github.com/spf13/cobra"

	"berth/pkg/twirpkit"
	adminv1 "berth/rpc/admin/v1"
)

func eventsCommand() *cobra.Command {
	var out output
	ask := &adminv1.ListEventsRequest{}
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Show what happened to sandboxes and nodes",
		Long: `Shows the log of what happened to sandboxes and nodes, the newest first. It speaks to a scheduler (BERTH_SCHEDULER_URL)
with an operator's token (BERTH_SCHEDULER_TOKEN).`,
		Example: `  berth events --node node-1
  berth events --sandbox 019a7c2e-3b5d-7f10-8a44-0c2d9e6f1b23
  berth events --kind node_drain -o json | jq -r '.events[] | .effect + " " + .node_id'`,
		Args: exactArgs(),
	}
	call := nodesCommand(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return call("list events", func(ctx context.Context, nodes adminv1.Nodes) error {
			answer, err := nodes.ListEvents(twirpkit.Repeatable(ctx), ask)
			if err != nil {
				return err
			}
			if out.json() {
				return writeProto(cmd, answer)
			}
			rows := make([][]string, 0, len(answer.GetEvents()))
			for _, e := range answer.GetEvents() {
				rows = append(rows, []string{
					timeOf(e.GetAtUnixMs()), e.GetSource(), e.GetKind(), e.GetEffect(), e.GetNodeId(), e.GetSandboxId(), cut(e.GetDetailJson(), 120),
				})
			}
			return writeTable(cmd.OutOrStdout(), []string{"AT", "SOURCE", "KIND", "EFFECT", "NODE", "SANDBOX", "DETAIL"}, rows)
		})
	}
	fs := cmd.Flags()
	out.flags(fs)
	fs.StringVar(&ask.SandboxId, "sandbox", "", "only of this sandbox")
	fs.StringVar(&ask.NodeId, "node", "", "only of this node")
	fs.StringVar(&ask.Kind, "kind", "", "only of this kind")
	fs.Uint32Var(&ask.Limit, "limit", 50, "how many, at most 1000")
	fs.StringVar(&ask.Before, "before", "", "go on from the next of an earlier -o json")
	return cmd
}

func nodeOrphansCommand() *cobra.Command {
	var (
		out   output
		limit uint32
	)
	cmd := &cobra.Command{
		Use:     "orphans [NODE]",
		Short:   "Show sandboxes that nodes run and may not serve",
		Example: "  berth node orphans\n  berth node orphans node-1 -o json",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef(cmd, "unexpected argument %q", args[1])
			}
			return nil
		},
	}
	call := nodesCommand(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ask := &adminv1.ListOrphansRequest{Limit: limit}
		if len(args) == 1 {
			if err := checkNode(args[0]); err != nil {
				return err
			}
			ask.NodeId = args[0]
		}
		return call("list orphans", func(ctx context.Context, nodes adminv1.Nodes) error {
			answer, err := nodes.ListOrphans(twirpkit.Repeatable(ctx), ask)
			if err != nil {
				return err
			}
			if out.json() {
				return writeProto(cmd, answer)
			}
			rows := make([][]string, 0, len(answer.GetOrphans()))
			for _, o := range answer.GetOrphans() {
				rows = append(rows, []string{
					o.GetNodeId(), o.GetSandboxId(), o.GetReason(), o.GetHolderNodeId(), timeOf(o.GetFirstSeenUnixMs()), timeOf(o.GetLastSeenUnixMs()),
				})
			}
			return writeTable(cmd.OutOrStdout(), []string{"NODE", "SANDBOX", "WHY", "HELD BY", "FIRST SEEN", "LAST SEEN"}, rows)
		})
	}
	out.flags(cmd.Flags())
	cmd.Flags().Uint32Var(&limit, "limit", 100, "how many, at most "+strconv.Itoa(1000))
	return cmd
}
