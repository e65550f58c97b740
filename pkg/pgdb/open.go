package pgdb

import (
	"context"
	"fmt"
	"time"

	"github.com/exaring/otelpgx"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/trace"
)

const (
	defaultMaxConns = 16
	minConns        = 2
	connLifetime    = time.Hour
	connJitter      = 10 * time.Minute
	connIdle        = 30 * time.Minute
	connectTimeout  = 5 * time.Second

	// driverConnectTimeout is what pgx takes when the URL says nothing; far too long for a service
	// that could answer "unavailable" instead.
	driverConnectTimeout = 2 * time.Minute
)

// Config says which database to open and how.
type Config struct {
	URL      string // postgres://user:password@host:port/database?…, or key=value words
	Name     string // application_name: who this is in pg_stat_activity
	MaxConns int32  // most connections; 0: the URL's pool_max_conns, or 16
	MinConns int32  // kept open; 0: two, negative: none

	// CheckTimeouts are the longest timeouts this role may have; nil: they are not looked at.
	CheckTimeouts *Timeouts

	// Tracers makes a span for each statement, without its arguments; nil: no spans.
	Tracers trace.TracerProvider

	// Role, where set, is what each connection becomes by SET ROLE. For tests and tools; a service
	// logs in as itself.
	Role string
}

// DB is a pool of connections to one database. All methods may be called at once.
type DB struct{ *pgxpool.Pool }

// Open returns a pool that has reached its database once. The error names host, port, database and
// user, never the password, and says what to do. Close ends the pool.
func Open(ctx context.Context, cfg Config) (*DB, error) {
	poolConfig, err := parse(cfg)
	if err != nil {
		return nil, err
	}
	target := describe(poolConfig.ConnConfig)
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		return nil, fmt.Errorf("open a pool for %s: %w", target, err)
	}
	db := &DB{Pool: pool}
	if err := db.Ping(ctx); err != nil {
		pool.Close()
		return nil, explain(target, err)
	}
	if cfg.CheckTimeouts != nil {
		if err := db.checkTimeouts(ctx, *cfg.CheckTimeouts); err != nil {
			pool.Close()
			return nil, err
		}
	}
	return db, nil
}

func parse(cfg Config) (*pgxpool.Config, error) {
	poolConfig, err := pgxpool.ParseConfig(cfg.URL)
	if err != nil || cfg.URL == "" { // the driver would take an empty one for its defaults
		return nil, badURL(cfg.URL, err)
	}
	if cfg.MaxConns > 0 {
		poolConfig.MaxConns = cfg.MaxConns
	} else if !hasSetting(cfg.URL, "pool_max_conns") {
		poolConfig.MaxConns = defaultMaxConns
	}
	switch {
	case cfg.MinConns > 0:
		poolConfig.MinConns = min(cfg.MinConns, poolConfig.MaxConns)
	case cfg.MinConns == 0:
		poolConfig.MinConns = min(minConns, poolConfig.MaxConns)
	}
	poolConfig.MaxConnLifetime = connLifetime
	poolConfig.MaxConnLifetimeJitter = connJitter
	poolConfig.MaxConnIdleTime = connIdle

	conn := poolConfig.ConnConfig
	if conn.ConnectTimeout == driverConnectTimeout {
		conn.ConnectTimeout = connectTimeout
	}
	if cfg.Name != "" {
		conn.RuntimeParams["application_name"] = cfg.Name
	}
	if cfg.Tracers != nil {
		conn.Tracer = otelpgx.NewTracer(otelpgx.WithTracerProvider(cfg.Tracers))
	}
	conn.DialFunc = newDialer().dial
	poolConfig.AfterConnect = afterConnect(cfg.Role)
	return poolConfig, nil
}
