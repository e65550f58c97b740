package cli

import (
	"context"
	"errors"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"berth/pkg/flagenv"
	"berth/pkg/telemetry"
)

// config is what each service's Config can do.
type config interface {
	Flags(fs *pflag.FlagSet)
	Validate() error
}

// service is one service as the command line sees it.
type service[C any] struct {
	name, short, long, example string

	config  C
	methods func(*C) config
	run     func(ctx context.Context, cfg C, tel *telemetry.Telemetry, version string) error
}

// serve returns "berth NAME serve" in its group.
func serve[C any](s service[C]) *cobra.Command {
	cfg := s.config
	methods := s.methods(&cfg)
	cmd := &cobra.Command{
		Use:     "serve",
		Short:   "Run one " + s.name + " replica in the foreground",
		Long:    s.long + "\n\nIt stops cleanly at SIGINT or SIGTERM; a second signal ends it at once.",
		Example: s.example,
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			fs := cmd.Flags()
			variablesErr := flagenv.Apply(fs, s.name, os.LookupEnv)
			if err := errors.Join(variablesErr, methods.Validate()); err != nil {
				return err
			}
			tel, err := telemetry.New(cmd.Context(), telemetry.Config{
				Service: s.name, Version: Version, Output: cmd.ErrOrStderr(),
				LogLevel: text(fs, "log-level"), LogFormat: text(fs, "log-format"),
			})
			if err != nil {
				return err
			}
			defer closeTelemetry(cmd.Context(), tel)
			return s.run(cmd.Context(), cfg, tel, Version)
		},
	}
	methods.Flags(cmd.Flags())
	flagenv.Describe(cmd.Flags(), s.name)
	return group(s.name, s.short, s.long, cmd)
}

// text is the value of a flag that may not exist.
func text(fs *pflag.FlagSet, name string) string {
	if f := fs.Lookup(name); f != nil {
		return f.Value.String()
	}
	return ""
}

// configured adapts a pointer to a Config, whose methods cannot be named in a type parameter.
func configured[C any, P interface {
	*C
	config
}](c *C) config {
	return P(c)
}
