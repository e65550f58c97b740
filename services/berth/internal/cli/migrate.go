package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"berth/migrations"
	"berth/pkg/migrate"
	"berth/pkg/telemetry"
)

func migrateCommand() *cobra.Command {
	return group("migrate", "Bring the database's schema up to date, or look at it",
		`Commands for the schema. They need a login that may change it (BERTH_DATABASE_URL), on a direct
connection and not through a transaction pooler (BERTH_DATABASE_DIRECT_URL, if both are set).

Services never migrate by themselves: they refuse to start on an older schema.`,
		migrateUpCommand(), migrateDownCommand(), migrateStatusCommand(), migrateLoginsCommand(), migrateNewEpochCommand())
}

// databaseFlags is how a command finds the database.
type databaseFlags struct {
	url                 string
	logLevel, logFormat string
}

func (d *databaseFlags) flags(fs *pflag.FlagSet) {
	fs.StringVar(&d.url, "database-url", "", "`URL` of the database, such as postgres://user@host:5432/berth")
	fs.StringVar(&d.logLevel, "log-level", "info", "debug, info, warn or error")
	fs.StringVar(&d.logFormat, "log-format", "auto", "auto, console or json")
}

func databaseVariables() map[string][]string {
	return map[string][]string{
		"database-url": {"BERTH_DATABASE_DIRECT_URL", "BERTH_DATABASE_URL"},
		"log-level":    {"BERTH_LOG_LEVEL"}, "log-format": {"BERTH_LOG_FORMAT"},
	}
}

// open reads the variables and returns the logger of a migration.
func (d *databaseFlags) open(cmd *cobra.Command) (*telemetry.Telemetry, error) {
	if err := applyVariables(cmd.Flags()); err != nil {
		return nil, err
	}
	if d.url == "" {
		return nil, errors.New("no database: set BERTH_DATABASE_URL (or --database-url), such as postgres://user@host:5432/berth")
	}
	return telemetry.New(cmd.Context(), telemetry.Config{
		Service: "migrate", Version: Version, LogLevel: d.logLevel, LogFormat: d.logFormat, Output: cmd.ErrOrStderr(),
	})
}

// closeTelemetry sends what is left; that it could not is no failure of the command.
func closeTelemetry(ctx context.Context, tel *telemetry.Telemetry) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := tel.Close(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "berth: %v\n", err)
	}
}

func migrateUpCommand() *cobra.Command {
	var d databaseFlags
	var out output
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Apply every migration that is missing",
		Long: `Apply every migration that is missing, after making the group roles (berth_scheduler, …) that the grants
name. Any number may run at once: they wait for each other. Running it again changes nothing.`,
		Example: "  berth migrate up --database-url postgres://postgres@localhost/berth",
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			tel, err := d.open(cmd)
			if err != nil {
				return err
			}
			defer closeTelemetry(cmd.Context(), tel)
			applied, err := migrate.Up(cmd.Context(), d.url, migrations.FS, tel.Log)
			if err != nil {
				return err
			}
			if out.json() {
				if applied == nil {
					applied = []int64{}
				}
				return out.writeJSON(cmd.OutOrStdout(), map[string]any{"applied": applied})
			}
			if len(applied) == 0 {
				_, err = fmt.Fprintln(cmd.OutOrStdout(), "the schema is up to date")
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "applied %d migrations; the schema is up to date\n", len(applied))
			return err
		},
	}
	d.flags(cmd.Flags())
	out.flags(cmd.Flags())
	variables(cmd.Flags(), databaseVariables())
	return cmd
}

func migrateDownCommand() *cobra.Command {
	var (
		d     databaseFlags
		steps int
		yes   bool
	)
	cmd := &cobra.Command{
		Use:     "down",
		Short:   "Take migrations back, with their data; for development only",
		Example: "  berth migrate down --steps 1 --yes",
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if steps < 1 {
				return usagef(cmd, "--steps %d: 1 or more is wanted", steps)
			}
			if !yes {
				return usagef(cmd, "this drops tables with all their rows; repeat it with --yes if that is what you want")
			}
			tel, err := d.open(cmd)
			if err != nil {
				return err
			}
			defer closeTelemetry(cmd.Context(), tel)
			if err := migrate.Down(cmd.Context(), d.url, migrations.FS, steps, tel.Log); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "took back up to %d migrations\n", steps)
			return err
		},
	}
	d.flags(cmd.Flags())
	cmd.Flags().IntVar(&steps, "steps", 1, "how many")
	cmd.Flags().BoolVar(&yes, "yes", false, "yes, drop the data")
	variables(cmd.Flags(), databaseVariables())
	return cmd
}

func migrateStatusCommand() *cobra.Command {
	var (
		d   databaseFlags
		out output
	)
	cmd := &cobra.Command{
		Use:     "status",
		Short:   "Show which migrations were applied and when",
		Long:    `Show which migrations were applied and when. It changes nothing. The exit code is 1 while any is missing.`,
		Example: "  berth migrate status\n  berth migrate status -o json",
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			tel, err := d.open(cmd)
			if err != nil {
				return err
			}
			defer closeTelemetry(cmd.Context(), tel)
			entries, err := migrate.Status(cmd.Context(), d.url, migrations.FS)
			if err != nil {
				return err
			}
			missing := 0
			rows := make([][]string, 0, len(entries))
			for _, e := range entries {
				state, at := "missing", "-"
				if e.Applied {
					state, at = "applied", e.AppliedAt.Local().Format(time.DateTime)
				} else {
					missing++
				}
				rows = append(rows, []string{strconv.FormatInt(e.Version, 10), e.Name, state, at})
			}
			if out.json() {
				err = out.writeJSON(cmd.OutOrStdout(), entries)
			} else {
				err = writeTable(cmd.OutOrStdout(), []string{"VERSION", "FILE", "STATE", "AT"}, rows)
			}
			if err == nil && missing > 0 {
				return fmt.Errorf("%d migrations are missing; run \"berth migrate up\"", missing)
			}
			return err
		},
	}
	d.flags(cmd.Flags())
	out.flags(cmd.Flags())
	variables(cmd.Flags(), databaseVariables())
	return cmd
}

func migrateNewEpochCommand() *cobra.Command {
	var d databaseFlags
	cmd := &cobra.Command{
		Use:   "new-epoch",
		Short: "Tell every gateway that the database was restored or copied",
		Long: `Give the route feed a new epoch. Run it once after restoring a backup or copying a disk, before the
services start: every gateway then forgets what it knew and reads all routes again.`,
		Example: "  berth migrate new-epoch",
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			tel, err := d.open(cmd)
			if err != nil {
				return err
			}
			defer closeTelemetry(cmd.Context(), tel)
			if err := migrate.NewEpoch(cmd.Context(), d.url); err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), "the route feed has a new epoch")
			return err
		},
	}
	d.flags(cmd.Flags())
	variables(cmd.Flags(), databaseVariables())
	return cmd
}
