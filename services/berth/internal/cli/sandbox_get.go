package cli

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

func sandboxGetCommand() *cobra.Command {
	var (
		g   gatewayFlags
		out output
	)
	cmd := &cobra.Command{
		Use:     "get SANDBOX",
		Short:   "Show one sandbox",
		Example: "  berth sandbox get 019a7c2e-3b5d-7f10-8a44-0c2d9e6f1b23\n  berth sandbox get ID -o json | jq .state",
		Args:    exactArgs("SANDBOX"),
		RunE: func(cmd *cobra.Command, args []string) error {
			path, err := sandboxPath(args[0])
			if err != nil {
				return err
			}
			client, err := g.client(cmd)
			if err != nil {
				return err
			}
			text, _, err := client.call(cmd.Context(), "GET", path, nil)
			if err != nil {
				return fmt.Errorf("sandbox %s: %w", args[0], err)
			}
			return out.show(cmd, text, func() ([][2]string, error) {
				var s sandboxDetail
				if err := decode(text, &s); err != nil {
					return nil, err
				}
				return [][2]string{
					{"Sandbox", s.SandboxID},
					{"Template", s.TemplateID},
					{"Alias", s.Alias},
					{"State", s.State},
					{"Started", s.StartedAt.Local().Format(time.DateTime) + " (" + age(s.StartedAt, time.Now()) + " ago)"},
					{"Ends", s.EndAt.Local().Format(time.DateTime)},
					{"CPU, memory", fmt.Sprintf("%d, %s", s.CPUCount, size(s.MemoryMB<<20))},
					{"Metadata", joinPairs(s.Metadata)},
					{"Domain", s.Domain},
				}, nil
			})
		},
	}
	fs := cmd.Flags()
	g.flags(fs, clientTimeout)
	out.flags(fs)
	variables(fs, gatewayVariables())
	return cmd
}
