package cli

import "github.com/spf13/cobra"

// serviceCommands are the long-lived processes of this binary.
func serviceCommands() []*cobra.Command {
	return []*cobra.Command{schedulerCommand(), gatewayCommand(), nodeagentCommand()}
}
