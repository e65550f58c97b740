// Package scheduler is one scheduler replica: which node takes a sandbox, which node has one, which
// nodes are alive, who serves which bytes. It keeps caches only; any number of replicas answer from one database.
package scheduler

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"berth/migrations"
	"berth/pkg/lifecycle"
	"berth/pkg/pgdb"
	"berth/pkg/telemetry"
	"berth/services/scheduler/internal/adminapi"
	"berth/services/scheduler/internal/api"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/nodes"
	"berth/services/scheduler/internal/p2p"
	"berth/services/scheduler/internal/placement"
)

const (
	// openLimit is how long the database may take to answer at the start.
	openLimit = 15 * time.Second

	// drainLimit is what open calls get to finish; the parts behind them stop within stopLimit.
	drainLimit = 10 * time.Second
	stopLimit  = 20 * time.Second

	// A storm of creates must not expire nodes, so heartbeats have connections of their own: one for
	// the batch, one for each slow path and each transaction of events, one for the loops.
	spareConnections = 2

	readHeaderLimit = 10 * time.Second
)

// Run serves one replica until ctx ends, then drains and stops. cfg has passed Validate. A database that
// cannot be reached, or whose schema is older than this build, ends it at once with an error that says
// what to do: whoever supervises the process starts it again.
func Run(ctx context.Context, cfg Config, tel *telemetry.Telemetry, version string) error {
	tel.Log.InfoContext(ctx, "scheduler starts", slog.String("version", version), slog.String("strategy", cfg.Strategy))
	health := lifecycle.NewHealth()
	assemble := build
	if cfg.Query.On {
		assemble = buildQueryOnly
	}
	parts, server, err := assemble(ctx, cfg, tel, health)
	if err != nil {
		return err
	}
	// Watchers of gRPC health leave before the listener does.
	defer context.AfterFunc(ctx, server.Drain)()
	return lifecycle.Run(ctx, lifecycle.Options{
		Log: tel.Log, Health: health, DrainDelay: cfg.DrainDelay, StopTimeout: stopLimit,
	}, parts...)
}

// build connects to the database and returns the parts, which run nothing yet.
func build(ctx context.Context, cfg Config, tel *telemetry.Telemetry, health *lifecycle.Health) ([]lifecycle.Part, *api.GRPC, error) {
	members := nodes.DefaultConfig()
	members.LeaseTTL, members.HeartbeatEvery, members.Batch = cfg.ReportTTL, cfg.HeartbeatEvery, cfg.HeartbeatBatch
	members.FullReconcile, members.RegisteredTTL, members.Grace = cfg.FullReconcile, cfg.RegisteredTTL, cfg.BindingGrace

	db, err := open(ctx, cfg, tel, "berth-scheduler", cfg.Pool)
	if err != nil {
		return nil, nil, err
	}
	beats, err := open(ctx, cfg, tel, "berth-scheduler heartbeats", members.SlowPaths+members.Tellings+spareConnections)
	if err != nil {
		db.Close()
		return nil, nil, err
	}
	close := func(context.Context) error {
		beats.Close()
		db.Close()
		return nil
	}
	health.Check("database", reached(db))

	bind := bindings.DefaultConfig()
	bind.KeyGrace = 2 * cfg.HeartbeatEvery
	bind.Grace, bind.TombstoneGrace, bind.TombstoneRetention = cfg.BindingGrace, cfg.TombstoneGrace, cfg.TombstoneRetention
	bind.LostGrace, bind.ParkedTTL, bind.LeaseTTL, bind.Limits = cfg.LostGrace, cfg.ParkedTTL, cfg.ReportTTL, cfg.Limits
	bind.EventRetention = cfg.EventRetention

	placer := placement.New(db, placement.Config{
		Strategy: cfg.checked.strategy, Draws: cfg.SampleSize, Weights: cfg.Weights, Limits: cfg.Limits,
		Batch: cfg.PlaceBatch, ReservationTTL: cfg.ReservationTTL, KeyRetention: cfg.KeyRetention, KeyGrace: 2 * cfg.HeartbeatEvery,
	}, tel.Log, tel.Registry)
	routes := bindings.New(db, bind, tel.Log, tel.Registry)
	known := nodes.New(beats, routes, members, cfg.checked.guard, tel.Log, tel.Registry)
	stores := p2p.New(db, p2p.Config{
		Capacity: cfg.ArtifactStoreCapacity, LookupLimit: cfg.ArtifactLookupNodeLimit, Touch: cfg.ArtifactTouch,
	}, tel.Log, tel.Registry)
	// An empty list is applied too: what an earlier list named is not there any more.
	if err := known.ApplyStatic(ctx, cfg.checked.static); err != nil {
		_ = close(ctx)
		return nil, nil, fmt.Errorf("apply the static list of nodes: %w", err)
	}
	server := api.New(api.Deps{
		Placer: placer, Bindings: routes, Nodes: known, P2P: stores, Tokens: api.NewTokens(cfg.Tokens),
		DefaultSize: cfg.defaultSize(), Register: cfg.Register,
		Log: tel.Log, Registry: tel.Registry, Tracers: tel.Tracers, Propagator: tel.Propagator,
	})
	grpc := server.GRPC(cfg.checked.tls)
	prefix, admin := adminapi.New(placer).Twirp(server.Interceptor())
	nodesPrefix, nodesAdmin := adminapi.NewNodes(known, routes, placer).Twirp(server.Interceptor())

	parts := []lifecycle.Part{ // started in this order, stopped in reverse
		lifecycle.Closer("database", close),
		lifecycle.Loop("place creates", placer.Run),
		lifecycle.Loop("record assignments", routes.RecordLoop),
		lifecycle.Loop("look up nodes", routes.LookupLoop),
		lifecycle.Loop("renew leases", known.Batcher().Run),
		lifecycle.Loop("ring doorbell", routes.Doorbell().Run),
		lifecycle.Loop("expire reservations", placer.ExpireLoop),
		lifecycle.Loop("settle create keys", routes.ClaimLoop),
		lifecycle.Loop("forget placements", placer.RetentionLoop),
		lifecycle.Loop("park bindings", routes.ParkLoop),
		lifecycle.Loop("forget bindings", routes.RetentionLoop),
		lifecycle.Loop("count bindings", routes.StateLoop),
		lifecycle.Loop("keep events", routes.EventLoop),
		lifecycle.Loop("make nodes due", known.DueLoop),
		lifecycle.Loop("expire nodes", known.ExpireLoop),
		lifecycle.Loop("drain nodes", known.DrainsLoop),
		lifecycle.Loop("count nodes", known.StatusLoop),
		lifecycle.Loop("trim artifacts", stores.CapacityLoop),
		lifecycle.Loop("follow readiness", func(ctx context.Context) error { return grpc.Watch(ctx, health.Ready) }),
	}
	parts = append(parts, sources(cfg, known, tel)...)
	quotasPrefix, quotas := adminapi.NewQuotas(placer).Twirp(server.Interceptor())
	twirp := server.Twirp(api.Mount{Prefix: prefix, Handler: admin}, api.Mount{Prefix: nodesPrefix, Handler: nodesAdmin},
		api.Mount{Prefix: quotasPrefix, Handler: quotas})
	return listen(parts, cfg, tel, health, grpc, twirp), grpc, nil
}

// listen returns parts and, behind them, what this replica serves.
func listen(parts []lifecycle.Part, cfg Config, tel *telemetry.Telemetry, health *lifecycle.Health, grpc *api.GRPC, twirp http.Handler) []lifecycle.Part {
	if cfg.OpsListen != "" {
		parts = append(parts, lifecycle.HTTP("ops", cfg.OpsListen, ops(health, tel)))
	}
	if cfg.AdminListen != "" {
		parts = append(parts, lifecycle.HTTP("admin", cfg.AdminListen, tel.Admin()))
	}
	return append(parts,
		lifecycle.Listener("grpc", cfg.GRPCListen, grpc.Serve, limited(grpc.Shut)),
		serve("twirp", cfg.TwirpListen, twirp, cfg.checked.tls),
	)
}

// reached is a check of readiness.
func reached(db *pgdb.DB) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := db.Ping(ctx); err != nil {
			return errors.New("the database does not answer") // the probe's readers get no addresses
		}
		return nil
	}
}

func open(ctx context.Context, cfg Config, tel *telemetry.Telemetry, name string, connections int) (*pgdb.DB, error) {
	ctx, cancel := context.WithTimeout(ctx, openLimit)
	defer cancel()
	db, err := pgdb.Open(ctx, pgdb.Config{
		URL: cfg.DatabaseURL, Name: name, MaxConns: int32(connections), CheckTimeouts: &pgdb.WriteTimeouts, Tracers: tel.Tracers,
	})
	if err != nil {
		return nil, err
	}
	if err := pgdb.Gate(ctx, db, migrations.Versions()); err != nil {
		db.Close()
		return nil, err
	}
	return db, nil
}

// ops serves health and, under every other path, the metrics, as AgentENV's scheduler does.
func ops(health *lifecycle.Health, tel *telemetry.Telemetry) http.Handler {
	metrics := tel.Metrics()
	checks := health.Handler(metrics)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/healthz", "/readyz":
			checks.ServeHTTP(w, r)
		default:
			metrics.ServeHTTP(w, r)
		}
	})
}

// limited gives stop the time that open calls may take.
func limited(stop func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, drainLimit)
		defer cancel()
		return stop(ctx)
	}
}

// serve is lifecycle.HTTP with TLS where that is configured.
func serve(name, addr string, h http.Handler, secure *tls.Config) lifecycle.Part {
	server := &http.Server{Handler: h, ReadHeaderTimeout: readHeaderLimit}
	return lifecycle.Listener(name, addr, func(l net.Listener) error {
		if secure != nil {
			l = tls.NewListener(l, secure)
		}
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	}, limited(func(ctx context.Context) error {
		if server.Shutdown(ctx) != nil {
			return server.Close() // the rest is cut
		}
		return nil
	}))
}
