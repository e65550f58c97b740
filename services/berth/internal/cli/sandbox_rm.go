package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
)

func sandboxRmCommand() *cobra.Command {
	var (
		g   gatewayFlags
		out output
	)
	cmd := &cobra.Command{
		Use:     "rm SANDBOX...",
		Aliases: []string{"delete", "kill"},
		Short:   "Delete sandboxes",
		Long:    `Delete sandboxes. All are tried; the exit code is not 0 if any could not be deleted, one that is not there included.`,
		Example: "  berth sandbox rm ID\n  berth sandbox rm $(berth sandbox list -o json | jq -r '.[].sandboxID')",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef(cmd, "SANDBOX is missing")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.client(cmd)
			if err != nil {
				return err
			}
			deleted, errs := []string{}, []error{}
			for _, id := range args {
				path, err := sandboxPath(id)
				if err == nil {
					_, _, err = client.call(cmd.Context(), "DELETE", path, nil)
					if err != nil {
						err = fmt.Errorf("delete %s: %w", id, err)
					}
				}
				if err != nil {
					errs = append(errs, err)
					continue
				}
				deleted = append(deleted, id)
				if !out.json() {
					fmt.Fprintln(cmd.OutOrStdout(), id)
				}
			}
			if out.json() {
				errs = append(errs, out.writeJSON(cmd.OutOrStdout(), map[string]any{"deleted": deleted}))
			}
			return errors.Join(errs...)
		},
	}
	fs := cmd.Flags()
	g.flags(fs, clientTimeout)
	out.flags(fs)
	variables(fs, gatewayVariables())
	return cmd
}
