package scheduler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/pflag"

	"berth/pkg/lifecycle"
	"berth/pkg/pgdb"
	"berth/pkg/telemetry"
	"berth/services/scheduler/internal/api"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/standby"
)

// The bound of staleness may be from a few round trips up to the time for which a failover is waited out.
const (
	defaultMaxStaleness = time.Second
	leastMaxStaleness   = 200 * time.Millisecond
	mostMaxStaleness    = 15 * time.Minute
)

// QueryOnly is a replica that answers LookupNode and nothing else.
type QueryOnly struct {
	On           bool
	DatabaseURL  string        // a standby to look up on; "": the primary answers
	MaxStaleness time.Duration // no answer of the standby lacks a change that was acknowledged longer ago
}

// queryFlags registers the settings of a query-only replica.
func (c *Config) queryFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&c.Query.On, "query-only", c.Query.On, "answer LookupNode and nothing else; discovery, limits and strategy are not read")
	fs.StringVar(&c.Query.DatabaseURL, "query-database-url", c.Query.DatabaseURL, "with --query-only: a standby of --database-url to look up on; what it does not have, or cannot prove to be younger than --query-max-staleness, is asked of the primary")
	fs.DurationVar(&c.Query.MaxStaleness, "query-max-staleness", c.Query.MaxStaleness, "no answer of the standby lacks a change that was acknowledged longer ago")
}

// checkQuery checks the settings of a query-only replica.
func (c *Config) checkQuery() error {
	var errs []error
	if c.Query.DatabaseURL != "" && !c.Query.On {
		errs = append(errs, errors.New("--query-database-url is for --query-only: placements and heartbeats are never read from a standby"))
	}
	if c.Query.DatabaseURL != "" {
		if _, err := pgdb.ParseURL(c.Query.DatabaseURL); err != nil {
			errs = append(errs, fmt.Errorf("--query-database-url: %w", err))
		}
	}
	if d := c.Query.MaxStaleness; d < leastMaxStaleness || d > mostMaxStaleness {
		errs = append(errs, fmt.Errorf("--query-max-staleness is %q: choose a duration from %s to %s, such as %s",
			d.String(), leastMaxStaleness, mostMaxStaleness, defaultMaxStaleness))
	}
	return errors.Join(errs...)
}

// buildQueryOnly is build for a replica that answers look-ups only. It runs no loop that writes, so it may
// be of another version than the schedulers, and none needs to be there.
func buildQueryOnly(ctx context.Context, cfg Config, tel *telemetry.Telemetry, health *lifecycle.Health) ([]lifecycle.Part, *api.GRPC, error) {
	db, err := open(ctx, cfg, tel, "berth-scheduler query", cfg.Pool)
	if err != nil {
		return nil, nil, err
	}
	primary := bindings.New(db, bindings.DefaultConfig(), tel.Log, tel.Registry)
	deps := api.Deps{
		QueryOnly: primary, Tokens: api.NewTokens(cfg.Tokens),
		Log: tel.Log, Registry: tel.Registry, Tracers: tel.Tracers, Propagator: tel.Propagator,
	}
	parts := []lifecycle.Part{
		lifecycle.Closer("database", func(context.Context) error { db.Close(); return nil }),
		lifecycle.Loop("look up nodes", primary.LookupLoop),
	}
	if cfg.Query.DatabaseURL == "" {
		health.Check("database", reached(db))
	} else {
		reader := standby.New(db, primary, standby.Config{
			Open: func(ctx context.Context) (*pgdb.DB, error) { return openStandby(ctx, cfg, tel) }, MaxStaleness: cfg.Query.MaxStaleness,
		}, tel.Log, tel.Registry)
		deps.QueryOnly = reader
		health.Check("staleness", reader.Ready)
		parts = append(parts,
			lifecycle.Closer("standby", func(context.Context) error { reader.Close(); return nil }),
			lifecycle.Loop("mark the primary", reader.MarkLoop),
			lifecycle.Loop("probe the standby", reader.ProbeLoop))
		tel.Log.InfoContext(ctx, "look-ups go to a standby", slog.Duration("max_staleness", cfg.Query.MaxStaleness))
		if at := pgdb.Describe(cfg.Query.DatabaseURL); at == pgdb.Describe(cfg.DatabaseURL) {
			tel.Log.WarnContext(ctx, "--query-database-url leads where --database-url does: look-ups spare the primary nothing", slog.String("at", at))
		}
	}
	server := api.New(deps)
	grpc := server.GRPC(cfg.checked.tls)
	parts = append(parts, lifecycle.Loop("follow readiness", func(ctx context.Context) error { return grpc.Watch(ctx, health.Ready) }))
	return listen(parts, cfg, tel, health, grpc, server.Twirp()), grpc, nil
}

// openStandby opens the pool of the standby, whose schema is the primary's as far as it has come.
func openStandby(ctx context.Context, cfg Config, tel *telemetry.Telemetry) (*pgdb.DB, error) {
	ctx, cancel := context.WithTimeout(ctx, openLimit)
	defer cancel()
	return pgdb.Open(ctx, pgdb.Config{
		URL: cfg.Query.DatabaseURL, Name: "berth-scheduler query standby", MaxConns: int32(cfg.Pool),
		CheckTimeouts: &pgdb.WriteTimeouts, Tracers: tel.Tracers,
	})
}
