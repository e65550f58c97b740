package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"berth/pkg/telemetry"
	"berth/services/berth/internal/dev"
)

// stopLimit is far above what stopping takes; each part has a shorter limit of its own.
const stopLimit = 2 * time.Minute

func devCommand() *cobra.Command {
	var (
		o                   dev.Options
		logLevel, logFormat string
	)
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run a whole Berth on this machine, with its own PostgreSQL",
		Long: `Run a whole Berth on this machine: an embedded PostgreSQL, schedulers, gateways and node agents, each a
process of its own on free loopback ports. It prints addresses, the API key and what to try, then the
services' logs. Ctrl-C stops everything in order; a service that dies is started again.

Keys, ports, the database and the sandboxes' folders stay in the data folder, so that a restart finds
everything as it was. With --database-url a server you have is used; its login must be able to create roles.`,
		Example: `  berth dev
  berth dev --ephemeral --schedulers 1 --gateways 1 --nodes 3
  berth dev --database-url postgres://postgres@localhost:5432/berth
  berth dev --ephemeral --ready-file ready.json & until [ -e ready.json ]; do sleep 0.1; done`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Ephemeral && cmd.Flags().Changed("data") {
				return usagef(cmd, "--ephemeral and --data exclude each other")
			}
			if cmd.Flags().Changed("database-url") && o.DatabaseURL == "" {
				return usagef(cmd, "--database-url is empty; leave it out for the embedded PostgreSQL")
			}
			if err := applyVariables(cmd.Flags()); err != nil {
				return err
			}
			tel, err := telemetry.New(cmd.Context(), telemetry.Config{
				Service: "dev", Version: Version, LogLevel: logLevel, LogFormat: logFormat, Output: cmd.ErrOrStderr(),
			})
			if err != nil {
				return err
			}
			defer closeTelemetry(cmd.Context(), tel)
			o.LogLevel, o.Log, o.Logs, o.Color = logLevel, tel.Log, cmd.ErrOrStderr(), colored(cmd.ErrOrStderr())
			return runDev(cmd, o)
		},
	}
	fs := cmd.Flags()
	stackFlags(fs, &o)
	fs.StringVar(&o.Data, "data", ".berth", "`folder` for everything that is kept")
	fs.BoolVar(&o.Ephemeral, "ephemeral", false, "use a temporary folder and delete it at the end")
	fs.StringVar(&o.DatabaseURL, "database-url", "", "use the PostgreSQL at this `URL` in place of an embedded one")
	fs.StringVar(&o.PostgresBin, "postgres-bin", "", "`folder` with initdb and postgres for the embedded server")
	fs.StringVar(&o.ReadyFile, "ready-file", "", "write addresses, key and process ids to this `file` as JSON once everything is ready")
	fs.BoolVar(&o.NoRestart, "no-restart", false, "leave a service that dies dead")
	fs.StringVar(&logLevel, "log-level", "info", "debug, info, warn or error, of all services")
	fs.StringVar(&logFormat, "log-format", "console", "auto, console or json, of this command's own lines")
	variables(fs, map[string][]string{"log-level": {"BERTH_LOG_LEVEL"}, "postgres-bin": {"BERTH_POSTGRES_BIN"}})
	return cmd
}

// stackFlags are the flags that say what a stack is made of.
func stackFlags(fs *pflag.FlagSet, o *dev.Options) {
	fs.IntVar(&o.Schedulers, "schedulers", 2, "how many schedulers")
	fs.IntVar(&o.Gateways, "gateways", 2, "how many gateways")
	fs.IntVar(&o.Nodes, "nodes", 2, "how many node agents")
	fs.StringVar(&o.Domain, "domain", defaultDomain, "sandboxes answer at {port}-{sandbox}.`domain`")
	fs.StringVar(&o.Templates, "templates", "", "YAML `file` with templates for the nodes, beside the built-in ones")
	fs.StringVar(&o.Isolation, "isolation", "", "bubblewrap, or none on machines without namespaces")
}

func runDev(cmd *cobra.Command, o dev.Options) error {
	ctx := cmd.Context()
	stack, err := dev.Start(ctx, o)
	if errors.Is(err, context.Canceled) {
		return errors.New("interrupted before everything was ready; nothing is left running")
	}
	if err != nil {
		return err
	}
	_, printErr := fmt.Fprintln(cmd.OutOrStdout(), stack.Banner(programName(), colored(cmd.OutOrStdout())))
	waitErr := printErr
	if printErr == nil {
		waitErr = stack.Wait(ctx)
	}
	o.Log.InfoContext(ctx, "stopping everything in order")
	stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
	defer cancel()
	if err := errors.Join(waitErr, stack.Stop(stopCtx)); err != nil {
		return err
	}
	o.Log.InfoContext(ctx, "stopped; nothing is left running")
	return nil
}

// programName is how the reader can call this program again.
func programName() string {
	name := os.Args[0]
	if filepath.Base(name) == name {
		return name // found on PATH
	}
	if wd, err := os.Getwd(); err == nil {
		if short, err := filepath.Rel(wd, name); err == nil && filepath.IsLocal(short) && filepath.Dir(short) != "." {
			return short
		}
	}
	return name
}

// colored reports whether colours may be written to w: a terminal, and nobody said NO_COLOR.
func colored(w any) bool {
	if value, ok := os.LookupEnv("NO_COLOR"); ok && value != "" {
		return false
	}
	file, ok := w.(*os.File)
	return ok && telemetry.IsTerminal(file)
}
