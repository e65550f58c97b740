package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"berth/pkg/twirpkit"
	adminv1 "berth/rpc/admin/v1"
	"berth/services/internal/node"
)

func nodeCommand() *cobra.Command {
	return group("node", "See the nodes and how full they are, close and empty them",
		`Commands for nodes. list and get speak to a gateway (BERTH_GATEWAY_URL) with a key that may read nodes (BERTH_API_KEY);
the others speak to a scheduler (BERTH_SCHEDULER_URL) with an operator's token (BERTH_SCHEDULER_TOKEN).`,
		nodeListCommand(), nodeGetCommand(), nodeCordonCommand(), nodeUncordonCommand(), nodeDrainCommand(), nodeDrainsCommand(),
		nodeOrphansCommand())
}

// nodeDetail is what commands show of a node; the gateway's answer has more.
type nodeDetail struct {
	ID                   string `json:"id"`
	ClusterID            string `json:"clusterID"`
	Status               string `json:"status"`
	Version              string `json:"version"`
	ServiceInstanceID    string `json:"serviceInstanceID"`
	SandboxCount         int64  `json:"sandboxCount"`
	SandboxStartingCount int64  `json:"sandboxStartingCount"`
	SandboxPausedCount   int64  `json:"sandboxPausedCount"`
	CreateSuccesses      int64  `json:"createSuccesses"`
	CreateFails          int64  `json:"createFails"`
	Metrics              struct {
		AllocatedCPU         int64 `json:"allocatedCPU"`
		AllocatedMemoryBytes int64 `json:"allocatedMemoryBytes"`
		CPUPercent           int64 `json:"cpuPercent"`
		CPUCount             int64 `json:"cpuCount"`
		MemoryUsedBytes      int64 `json:"memoryUsedBytes"`
		MemoryTotalBytes     int64 `json:"memoryTotalBytes"`
	} `json:"metrics"`
}

func listNodes(cmd *cobra.Command, g *gatewayFlags) ([]json.RawMessage, []nodeDetail, error) {
	client, err := g.client(cmd)
	if err != nil {
		return nil, nil, err
	}
	text, _, err := client.call(cmd.Context(), "GET", "/nodes", nil)
	if err != nil {
		return nil, nil, err
	}
	items := []json.RawMessage{}
	if err := decode(text, &items); err != nil {
		return nil, nil, err
	}
	nodes := make([]nodeDetail, len(items))
	for i, item := range items {
		if err := decode(item, &nodes[i]); err != nil {
			return nil, nil, err
		}
	}
	return items, nodes, nil
}

func nodeListCommand() *cobra.Command {
	var (
		g   gatewayFlags
		s   schedulerFlags
		out output
	)
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List the nodes",
		Long: `Lists the nodes as a gateway knows them, to which a node that takes no creates is draining. With an operator's token
(BERTH_SCHEDULER_TOKEN) a scheduler is asked too, and tells nodes that are only cordoned from those that are drained.`,
		Example: "  berth node list\n  berth node list -o json | jq -r '.[] | select(.status == \"ready\") | .id'",
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			items, nodes, err := listNodes(cmd, &g)
			if err != nil {
				return fmt.Errorf("list nodes: %w", err)
			}
			if out.json() {
				return out.writeJSON(cmd.OutOrStdout(), items)
			}
			closed := closedNodes(cmd, &s, g.timeout)
			rows := make([][]string, 0, len(nodes))
			for _, n := range nodes {
				status := n.Status
				if word, known := closed[n.ID]; known && status == "draining" {
					status = word
				}
				rows = append(rows, []string{
					n.ID, status, strconv.FormatInt(n.SandboxCount+n.SandboxStartingCount, 10),
					strconv.FormatInt(n.SandboxPausedCount, 10),
					fmt.Sprintf("%d/%d", n.Metrics.AllocatedCPU, n.Metrics.CPUCount),
					size(n.Metrics.AllocatedMemoryBytes) + "/" + size(n.Metrics.MemoryTotalBytes), n.Version,
				})
			}
			return writeTable(cmd.OutOrStdout(), []string{"NODE", "STATUS", "SANDBOXES", "PAUSED", "CPU", "MEMORY", "VERSION"}, rows)
		},
	}
	fs := cmd.Flags()
	g.flags(fs, clientTimeout)
	s.addressFlags(fs)
	out.flags(fs)
	names := gatewayVariables()
	maps.Copy(names, schedulerVariables())
	variables(fs, names)
	return cmd
}

// closedNodes asks a scheduler, where there is a token for it, which nodes take no creates and why. What
// it cannot tell is a warning, for the list is not about that.
func closedNodes(cmd *cobra.Command, s *schedulerFlags, timeout time.Duration) map[string]string {
	if s.token == "" {
		return nil
	}
	client, err := twirpkit.NewFailover(s.urls, twirpkit.FailoverOptions{Token: s.token})
	var answer *adminv1.ListNodesResponse
	if err == nil {
		ctx, cancel := context.WithTimeout(twirpkit.Repeatable(cmd.Context()), timeout)
		defer cancel()
		answer, err = adminv1.NewNodesProtobufClient(client.Base(), client).ListNodes(ctx, &adminv1.ListNodesRequest{})
	}
	if err != nil {
		fmt.Fprintf(cmd.ErrOrStderr(), "Which nodes are cordoned and which are drained is not known: %v\n", explainSchedulerError(err, s.urls))
		return nil
	}
	closed := map[string]string{}
	for _, n := range answer.GetNodes() {
		switch {
		case n.GetDrainId() != 0:
			closed[n.GetNodeId()] = "draining"
		case n.GetCordoned():
			closed[n.GetNodeId()] = "cordoned"
		}
	}
	return closed
}

func nodeGetCommand() *cobra.Command {
	var (
		g   gatewayFlags
		out output
	)
	cmd := &cobra.Command{
		Use:     "get NODE",
		Short:   "Show one node",
		Example: "  berth node get node-1\n  berth node get node-1 -o json | jq .metrics",
		Args:    exactArgs("NODE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := node.ParseID(args[0]); err != nil {
				return fmt.Errorf("node %q: %w", cut(args[0], 80), err)
			}
			items, nodes, err := listNodes(cmd, &g)
			if err != nil {
				return fmt.Errorf("node %s: %w", args[0], err)
			}
			for i, n := range nodes {
				if n.ID == args[0] {
					return out.show(cmd, items[i], func() ([][2]string, error) { return nodeFields(n), nil })
				}
			}
			return fmt.Errorf("node %s: %w; \"berth node list\" shows those there are", args[0], node.ErrNotObserved)
		},
	}
	fs := cmd.Flags()
	g.flags(fs, clientTimeout)
	out.flags(fs)
	variables(fs, gatewayVariables())
	return cmd
}

func nodeFields(n nodeDetail) [][2]string {
	return [][2]string{
		{"Node", n.ID},
		{"Cluster", n.ClusterID},
		{"Status", n.Status},
		{"Version", n.Version},
		{"Instance", n.ServiceInstanceID},
		{"Sandboxes", fmt.Sprintf("%d running, %d starting, %d paused", n.SandboxCount, n.SandboxStartingCount, n.SandboxPausedCount)},
		{"Creates", fmt.Sprintf("%d succeeded, %d failed", n.CreateSuccesses, n.CreateFails)},
		{"CPU", fmt.Sprintf("%d of %d allocated, %d %% used", n.Metrics.AllocatedCPU, n.Metrics.CPUCount, n.Metrics.CPUPercent)},
		{"Memory", fmt.Sprintf("%s of %s allocated, %s used",
			size(n.Metrics.AllocatedMemoryBytes), size(n.Metrics.MemoryTotalBytes), size(n.Metrics.MemoryUsedBytes))},
	}
}

// timeOf is a time on the wire in milliseconds.
func timeOf(ms int64) string {
	if ms == 0 {
		return ""
	}
	return time.UnixMilli(ms).Local().Format(time.DateTime)
}
