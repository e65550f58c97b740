// Package cli is the command line of berth, one file a command.
//
// What people asked for goes to standard output, as aligned tables or, with -o json, as JSON for
// scripts. Everything else goes to standard error; an error there begins with "berth:" and says what to
// do. The exit code is 0 for success, 1 for a failure, 2 for a command line that cannot be understood;
// commands that have more name them in their help.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"berth/pkg/flagenv"
	"berth/pkg/lifecycle"
)

// Version is the build's; the linker sets it.
var Version = "dev"

const (
	exitFailure = 1
	exitUsage   = 2
)

// Main runs the command line args and returns the exit code of the process.
func Main(args []string, stdout, stderr io.Writer) int {
	root := newRoot(stdout, stderr)
	root.SetArgs(doubleDashes(args))
	err := lifecycle.Main(func(ctx context.Context) error { return root.ExecuteContext(ctx) })
	if err == nil {
		return 0
	}
	printError(stderr, err)
	if _, ok := errors.AsType[*usageError](err); ok {
		return exitUsage
	}
	if own, ok := errors.AsType[*exitError](err); ok {
		return own.code
	}
	return exitFailure
}

// printError writes each mistake of err on a line of its own.
func printError(w io.Writer, err error) {
	text := fmt.Sprintf("%v", err)
	for line := range strings.Lines(text) {
		// A line that is indented belongs to the one above, such as the end of a log.
		if !strings.HasPrefix(line, " ") && !strings.HasPrefix(line, "\t") {
			line = "berth: " + line
		}
		fmt.Fprintln(w, strings.TrimSuffix(line, "\n"))
	}
}

func newRoot(stdout, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:   "berth",
		Short: "A control plane for agent sandboxes",
		Long: `Berth places sandboxes on nodes, remembers in PostgreSQL where each one lives, and routes
every client's HTTP traffic to it through any gateway replica.

Try it on this machine:      berth demo     plays the main job once and cleans up
Work with it on this machine: berth dev      keeps the same stack running

Flags may be given as variables, named in each command's help; a flag wins.`,
		Version:       Version,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.ArbitraryArgs,
		RunE:          groupHelp,
	}
	root.SetOut(stdout) // before the completion commands, which keep the writer they find
	root.SetErr(stderr)
	root.SetVersionTemplate("berth {{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return &usageError{command: cmd.CommandPath(), cause: err}
	})
	root.AddGroup(
		&cobra.Group{ID: "start", Title: "Start here:"},
		&cobra.Group{ID: "client", Title: "Use a running Berth:"},
		&cobra.Group{ID: "service", Title: "Run the services:"},
	)
	for id, commands := range map[string][]*cobra.Command{
		"client":  {sandboxCommand(), nodeCommand(), placementCommand(), quotaCommand(), eventsCommand()},
		"service": append(serviceCommands(), migrateCommand()),
		"start":   startCommands(),
	} {
		for _, c := range commands {
			c.GroupID = id
			root.AddCommand(c)
		}
	}
	root.AddCommand(versionCommand(), healthcheckCommand())
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" {
			c.Short = "Print the completion script of a shell"
			c.Args = cobra.ArbitraryArgs
			c.RunE = groupHelp
		}
	}
	return root
}

// usageError is a command line that cannot be understood.
type usageError struct {
	command string
	cause   error
}

func (e *usageError) Error() string {
	return fmt.Sprintf("%v; run \"%s --help\" for what it takes", e.cause, e.command)
}

func (e *usageError) Unwrap() error { return e.cause }

// usagef returns a usageError of cmd.
func usagef(cmd *cobra.Command, format string, args ...any) error {
	return &usageError{command: cmd.CommandPath(), cause: fmt.Errorf(format, args...)}
}

// group returns a command that only holds others.
func group(use, short, long string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Long: long, Args: cobra.ArbitraryArgs, RunE: groupHelp}
	cmd.AddCommand(commands...)
	return cmd
}

// groupHelp prints the help of a command that only holds others. A word it does not know is an error,
// which cobra by itself would answer with the help and exit code 0.
func groupHelp(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return cmd.Help()
	}
	hint := ""
	cmd.SuggestionsMinimumDistance = 2 // letters
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		hint = "; did you mean " + strings.Join(near, " or ") + "?"
	}
	return usagef(cmd, "unknown command %q for %q%s", args[0], cmd.CommandPath(), hint)
}

// exactArgs wants one argument for each name.
func exactArgs(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return usagef(cmd, "%s is missing", names[len(args)])
		case len(args) > len(names):
			return usagef(cmd, "unexpected argument %q", args[len(names)])
		}
		for i, arg := range args {
			if strings.TrimSpace(arg) == "" {
				return usagef(cmd, "%s is blank", names[i])
			}
		}
		return nil
	}
}

// variables makes each flag of fs read the variables that are listed for it, and no others.
func variables(fs *pflag.FlagSet, names map[string][]string) {
	fs.VisitAll(func(f *pflag.Flag) {
		flagenv.Variables(fs, f.Name, names[f.Name]...)
	})
	flagenv.Describe(fs, "")
}

// applyVariables sets the flags that the command line left alone.
func applyVariables(fs *pflag.FlagSet) error {
	return flagenv.Apply(fs, "", os.LookupEnv)
}
