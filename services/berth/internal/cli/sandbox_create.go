package cli

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

// createTimeout is above the time a gateway gives a node to start a sandbox.
const createTimeout = 130 * time.Second

func sandboxCreateCommand() *cobra.Command {
	var (
		g             gatewayFlags
		out           output
		life          time.Duration
		metadata, env []string
	)
	cmd := &cobra.Command{
		Use:   "create TEMPLATE",
		Short: "Create a sandbox from a template and print its id",
		Long: `Create a sandbox. When the command returns, the sandbox is bound: every gateway routes to it.

TEMPLATE is a name that the nodes know; every Berth node has echo, files and shell.`,
		Example: `  berth sandbox create echo
  berth sandbox create files --timeout 1h --metadata owner=ann
  id=$(berth sandbox create echo -o json | jq -r .sandboxID)`,
		Args: exactArgs("TEMPLATE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if life < time.Second || life != life.Truncate(time.Second) {
				return usagef(cmd, "--timeout %v: whole seconds from 1s are wanted", life)
			}
			body := map[string]any{"templateID": args[0], "timeout": int64(life.Seconds())}
			for name, texts := range map[string][]string{"metadata": metadata, "env": env} {
				read, err := pairs(cmd, name, texts)
				if err != nil {
					return err
				}
				if read != nil {
					body[map[string]string{"metadata": "metadata", "env": "envVars"}[name]] = read
				}
			}
			client, err := g.client(cmd)
			if err != nil {
				return err
			}
			text, _, err := client.call(cmd.Context(), "POST", "/sandboxes", body)
			if err != nil {
				return fmt.Errorf("create a sandbox from %q: %w", cut(args[0], 80), err)
			}
			return out.show(cmd, text, func() ([][2]string, error) {
				var made sandboxDetail
				if err := decode(text, &made); err != nil {
					return nil, err
				}
				return [][2]string{
					{"Sandbox", made.SandboxID},
					{"Template", made.TemplateID},
					{"Ends in", life.String()},
					{"Next", "berth sandbox url " + made.SandboxID},
				}, nil
			})
		},
	}
	fs := cmd.Flags()
	g.flags(fs, createTimeout)
	out.flags(fs)
	fs.DurationVar(&life, "timeout", 5*time.Minute, "how long the sandbox lives")
	fs.StringArrayVar(&metadata, "metadata", nil, "`name=value` to store with it; may be repeated")
	fs.StringArrayVar(&env, "env", nil, "`NAME=value` for its processes; may be repeated")
	variables(fs, gatewayVariables())
	return cmd
}
