package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	adminv1 "berth/rpc/admin/v1"
	"berth/services/internal/node"
)

// nodesOrder is what a command does with the scheduler's service Nodes; ctx ends with --request-timeout.
type nodesOrder func(ctx context.Context, nodes adminv1.Nodes) error

// nodesCommand gives cmd the flags of commands that speak to a scheduler, and returns what calls it.
func nodesCommand(cmd *cobra.Command) func(what string, order nodesOrder) error {
	var s schedulerFlags
	s.flags(cmd.Flags())
	return func(what string, order nodesOrder) error {
		client, err := s.client(cmd)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), s.timeout)
		defer cancel()
		if err := order(ctx, adminv1.NewNodesProtobufClient(client.Base(), client)); err != nil {
			return fmt.Errorf("%s: %w", what, explainSchedulerError(err, s.urls))
		}
		return nil
	}
}

// checkNode refuses what no node can be named, before anything is asked.
func checkNode(id string) error {
	if _, err := node.ParseID(id); err != nil {
		return fmt.Errorf("node %q: %w", cut(id, 80), err)
	}
	return nil
}

func nodeCordonCommand() *cobra.Command {
	var (
		out    output
		reason string
	)
	cmd := &cobra.Command{
		Use:   "cordon NODE",
		Short: "Let no new sandbox onto a node",
		Long: `Lets no new sandbox onto a node. Once this has answered, no create is placed there. What runs there stays and is
reached as before.`,
		Example: "  berth node cordon node-1 --reason 'disk fails'",
		Args:    exactArgs("NODE"),
	}
	call := nodesCommand(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := checkNode(args[0]); err != nil {
			return err
		}
		return call("cordon "+args[0], func(ctx context.Context, nodes adminv1.Nodes) error {
			answer, err := nodes.CordonNode(ctx, &adminv1.CordonNodeRequest{NodeId: args[0], Reason: reason})
			if err != nil {
				return err
			}
			if out.json() {
				return writeProto(cmd, answer.GetNode())
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is cordoned: no create goes there, and its %s.\n",
				args[0], plural(answer.GetNode().GetBoundSandboxes(), "sandbox stays", "sandboxes stay"))
			return err
		})
	}
	out.flags(cmd.Flags())
	cmd.Flags().StringVar(&reason, "reason", "", "why, for whoever looks at the node")
	return cmd
}

func nodeUncordonCommand() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:     "uncordon NODE",
		Short:   "Let new sandboxes onto a node again",
		Long:    "Lets new sandboxes onto a node again. What a drain parked there comes back with the node's next heartbeat.",
		Example: "  berth node uncordon node-1",
		Args:    exactArgs("NODE"),
	}
	call := nodesCommand(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := checkNode(args[0]); err != nil {
			return err
		}
		return call("uncordon "+args[0], func(ctx context.Context, nodes adminv1.Nodes) error {
			answer, err := nodes.UncordonNode(ctx, &adminv1.UncordonNodeRequest{NodeId: args[0]})
			if err != nil {
				return hintDrain(err, args[0])
			}
			if out.json() {
				return writeProto(cmd, answer.GetNode())
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s takes creates again; it is %s.\n", args[0], oneLine(answer.GetNode().GetStatus()))
			return err
		})
	}
	out.flags(cmd.Flags())
	return cmd
}

// plural says how many there are of a thing.
func plural[N int | uint32](n N, one, many string) string {
	if n == 1 {
		return fmt.Sprintf("%d %s", n, one)
	}
	return fmt.Sprintf("%d %s", n, many)
}
