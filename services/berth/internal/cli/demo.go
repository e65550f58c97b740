package cli

import (
	"github.com/spf13/cobra"

	"berth/pkg/telemetry"
	"berth/services/berth/internal/demo"
	"berth/services/berth/internal/dev"
)

func demoCommand() *cobra.Command {
	var (
		o       dev.Options
		verbose bool
	)
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Play Berth's main job once on a stack that is gone afterwards",
		Long: `Start two schedulers, two gateways and two node agents with a PostgreSQL of their own, create a sandbox
through one gateway and use it through the other, kill -9 a scheduler and a gateway, and show that nothing
was lost. It takes less than two minutes, leaves nothing running, and ends with exit code 0 if all went well.`,
		Example: "  berth demo\n  berth demo --verbose",
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := applyVariables(cmd.Flags()); err != nil {
				return err
			}
			tel, err := telemetry.New(cmd.Context(), telemetry.Config{
				Service: "demo", Version: Version, LogLevel: "warn", LogFormat: "console", Output: cmd.ErrOrStderr(),
			})
			if err != nil {
				return err
			}
			defer closeTelemetry(cmd.Context(), tel)
			o.Schedulers, o.Gateways, o.Nodes = 2, 2, 2
			o.Ephemeral, o.NoRestart, o.Domain = true, true, defaultDomain
			if verbose {
				o.Log, o.Logs, o.Color = tel.Log, cmd.ErrOrStderr(), colored(cmd.ErrOrStderr())
			}
			return demo.Play(cmd.Context(), demo.Options{
				Stack: o, Out: cmd.OutOrStdout(), Color: colored(cmd.OutOrStdout()),
			})
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&o.Isolation, "isolation", "", "bubblewrap, or none on machines without namespaces")
	fs.BoolVarP(&verbose, "verbose", "v", false, "show the services' logs too")
	fs.StringVar(&o.PostgresBin, "postgres-bin", "", "`folder` with initdb and postgres for the embedded server")
	variables(fs, map[string][]string{"postgres-bin": {"BERTH_POSTGRES_BIN"}})
	return cmd
}
