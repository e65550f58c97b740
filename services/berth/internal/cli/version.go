package cli

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"
)

func versionCommand() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print the version of this build",
		Example: "  berth version\n  berth version -o json",
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if out.json() {
				return out.writeJSON(cmd.OutOrStdout(), map[string]string{
					"version": Version, "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH,
				})
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "berth %s (%s, %s/%s)\n", Version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return err
		},
	}
	out.flags(cmd.Flags())
	return cmd
}
