package cli

import "github.com/spf13/cobra"

// startCommands are for the first minutes with Berth.
func startCommands() []*cobra.Command { return []*cobra.Command{demoCommand(), devCommand()} }
