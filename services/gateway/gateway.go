// Package gateway is one gateway replica: the only address a client needs. It answers the API, has new
// sandboxes placed by a scheduler, and moves bytes between clients and the nodes that hold their
// sandboxes. It owns nothing: any number of replicas serve any request, and one that is killed takes
// only the exchanges open on it along.
package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"time"

	"berth/migrations"
	"berth/pkg/lifecycle"
	"berth/pkg/pgdb"
	"berth/pkg/telemetry"
	"berth/pkg/twirpkit"
	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/gateway/internal/auth"
	"berth/services/gateway/internal/httpapi"
	"berth/services/gateway/internal/launch"
	"berth/services/gateway/internal/listing"
	"berth/services/gateway/internal/proxy"
	"berth/services/gateway/internal/routecache"
	"berth/services/gateway/internal/routefeed"
)

const (
	// openLimit is how long the databases may take to answer at the start.
	openLimit = 15 * time.Second
	// stopLimit is what the parts behind the public listener get to stop.
	stopLimit = 15 * time.Second
)

// Run serves one replica until ctx ends, then drains and stops. cfg has passed Validate. A database that
// cannot be reached, one whose schema is older than this build, and having no API key at all end it at
// once with an error that says what to do. Later a lost database does not: what is known is served.
func Run(ctx context.Context, cfg Config, tel *telemetry.Telemetry, version string) error {
	relaxCollector(os.LookupEnv) //nolint:forbidigo // the runtime reads it from there too
	health := lifecycle.NewHealth()
	parts, err := build(ctx, cfg, tel, health)
	if err != nil {
		return err
	}
	if len(cfg.checked.ignored) > 0 {
		tel.Log.WarnContext(ctx, "schedulers are asked over Twirp, by --scheduler-url", slog.Any("ignored", cfg.checked.ignored))
	}
	tel.Log.InfoContext(ctx, "gateway starts", slog.String("version", version), slog.String("listen", cfg.Listen))
	return lifecycle.Run(ctx, lifecycle.Options{
		Log: tel.Log, Health: health, DrainDelay: cfg.DrainDelay, StopTimeout: cfg.StreamGrace + stopLimit,
	}, parts...)
}

// relaxedGC is the growth of the heap, in percent, between two collections. A gateway holds little and
// makes much garbage, so memory is the cheaper side; GOMEMLIMIT, if it is set, still bounds the heap.
const relaxedGC = 400

// relaxCollector lets the collector run less often, unless the operator has decided by GOGC.
func relaxCollector(lookup func(string) (string, bool)) {
	if value, set := lookup("GOGC"); !set || value == "" {
		debug.SetGCPercent(relaxedGC)
	}
}

// build connects to the databases and returns the parts, which run nothing yet.
func build(ctx context.Context, cfg Config, tel *telemetry.Telemetry, health *lifecycle.Health) ([]lifecycle.Part, error) {
	routesDB, sessionsDB, err := open(ctx, cfg, tel)
	if err != nil {
		return nil, err
	}
	parts, err := assemble(ctx, cfg, tel, health, databases{routesDB, sessionsDB})
	if err != nil {
		sessionsDB.Close()
		routesDB.Close()
	}
	return parts, err
}

// databases are the two pools: a flood of look-ups does not starve keys, nor the reverse.
type databases struct{ routes, sessions *pgdb.DB }

func (d databases) close(context.Context) error {
	d.sessions.Close()
	d.routes.Close()
	return nil
}

func assemble(ctx context.Context, cfg Config, tel *telemetry.Telemetry, health *lifecycle.Health, db databases) ([]lifecycle.Part, error) {
	keys := auth.New(db.sessions, cfg.checked.bootstrap, auth.Config{})
	if err := keys.Check(ctx); err != nil {
		return nil, err
	}
	client, err := twirpkit.NewFailover(cfg.SchedulerURLs, twirpkit.FailoverOptions{
		Token: cfg.SchedulerToken, Tracers: tel.Tracers, Propagator: tel.Propagator,
	})
	if err != nil {
		return nil, fmt.Errorf("--scheduler-url: %w", err)
	}
	cursor, err := listing.NewCursor(cfg.ClusterSecrets)
	if err != nil {
		return nil, fmt.Errorf("--cluster-secret: %w", err)
	}

	cacheConfig := routecache.DefaultConfig()
	cacheConfig.StaleLimit = cfg.StaleLimit
	cache := routecache.New(db.routes, cacheConfig, tel.Log, tel.Registry)
	feed := routefeed.New(routefeed.DefaultConfig(cfg.directURL()), db.routes, cache, keys.Drop, tel.Log, tel.Registry)

	proxyConfig := proxy.DefaultConfig()
	proxyConfig.Limits, proxyConfig.TrustedProxies = cfg.limits(), cfg.checked.trusted
	proxyConfig.UnknownStatus, proxyConfig.Debug, proxyConfig.KeepPrefix = cfg.UnknownSandboxStatus, cfg.Debug, cfg.ProxyPrefix == prefixKeep
	forwarder := proxy.New(proxy.Deps{
		Routes: cache, Guard: cfg.checked.guard, NodeKeys: cfg.nodeKeys(), IsKey: keys.IsKey, Log: tel.Log, Registry: tel.Registry,
	}, proxyConfig)

	scheduler := launch.NewScheduler(schedulerv1.NewSchedulerProtobufClient(client.Base(), client),
		schedulerv1.NewPlacementsProtobufClient(client.Base(), client), tel.Registry)
	launcher := launch.New(launch.Deps{
		Scheduler: scheduler, Nodes: forwarder, Routes: cache, Log: tel.Log, Registry: tel.Registry,
	}, launch.Config{AnswerLimit: cfg.ResponseLimit, KeepOrphans: cfg.OrphanedCreate == orphanKeep})
	nodes := listing.NewStore(db.routes)
	access := httpapi.NewAccessLog(cfg.checked.access, cfg.AccessOutput, tel.Registry)
	api := httpapi.New(httpapi.Deps{
		Keys: keys, Routes: cache, Forwarder: forwarder, Launcher: launcher, Scheduler: scheduler, Nodes: nodes,
		Lister: listing.New(listing.Deps{
			Store: nodes, Nodes: httpapi.ListNodes{Routes: cache, Forwarder: forwarder}, Cursor: cursor, Log: tel.Log, Registry: tel.Registry,
		}),
		Health: health, Access: access, Log: tel.Log, Tracers: tel.Tracers, Propagator: tel.Propagator,
	}, httpapi.Config{
		Domains: cfg.checked.domains, Origins: cfg.CORSOrigins, MaxTimeout: cfg.MaxTimeout, IdleTimeout: cfg.limits().Idle, TrustedProxies: cfg.checked.trusted,
	})
	checkReadiness(health, cache, feed)

	parts := []lifecycle.Part{ // started in this order, stopped in reverse
		lifecycle.Closer("databases", db.close),
		lifecycle.Closer("scheduler connections", func(context.Context) error { client.CloseIdleConnections(); return nil }),
		lifecycle.Loop("look up routes", cache.Run),
		lifecycle.Loop("write access log", access.Run),
		lifecycle.Loop("limit silence", forwarder.Run),
	}
	if cfg.OpsListen != "" {
		parts = append(parts, lifecycle.HTTP("ops", cfg.OpsListen, health.Handler(tel.Metrics())))
	}
	if cfg.AdminListen != "" {
		parts = append(parts, lifecycle.HTTP("admin", cfg.AdminListen, tel.Admin()))
	}
	return append(parts, follow(feed), public(cfg, api, forwarder, tel.Log)), nil
}

// open opens both pools, and refuses a schema that is older than this build.
func open(ctx context.Context, cfg Config, tel *telemetry.Telemetry) (routes, sessions *pgdb.DB, err error) {
	ctx, cancel := context.WithTimeout(ctx, openLimit)
	defer cancel()
	routes, err = pgdb.Open(ctx, pgdb.Config{
		URL: cfg.DatabaseURL, Name: "berth-gateway", MaxConns: int32(cfg.Pool), CheckTimeouts: &pgdb.ReadTimeouts, Tracers: tel.Tracers,
	})
	if err != nil {
		return nil, nil, err
	}
	if err := pgdb.Gate(ctx, routes, migrations.Versions()); err != nil {
		routes.Close()
		return nil, nil, err
	}
	sessions, err = pgdb.Open(ctx, pgdb.Config{
		URL: cfg.sessionsURL(), Name: "berth-gateway sessions", MaxConns: int32(cfg.SessionsPool),
		CheckTimeouts: &pgdb.WriteTimeouts, Tracers: tel.Tracers,
	})
	if err != nil {
		routes.Close()
		return nil, nil, err
	}
	return routes, sessions, nil
}

// checkReadiness: a replica wants requests once it has read the feed to its end, and as long as it may
// serve what it knows. A lost database does not make a warm one unready, for all would leave together.
func checkReadiness(health *lifecycle.Health, cache *routecache.Cache, feed *routefeed.Follower) {
	health.Check("routes", func(context.Context) error {
		switch {
		case !feed.Ready():
			return errors.New("the route feed has not been read to its end yet")
		case cache.PastStaleLimit():
			return errors.New("the database has been away for longer than the stale limit")
		}
		return nil
	})
}

// firstRead is how long the feed may take before the replica listens all the same, unready.
const firstRead = 10 * time.Second

// follow follows the feed, and waits for its first read, so that a replica that listens is a warm one.
func follow(feed *routefeed.Follower) lifecycle.Part {
	part := lifecycle.Loop("follow the route feed", feed.Run)
	start := part.Start
	part.Start = func(ctx context.Context, fail func(error)) error {
		if err := start(ctx, fail); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, firstRead)
		defer cancel()
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for !feed.Ready() {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return nil
			}
		}
		return nil
	}
	return part
}

// public serves clients. Stopping it gives open exchanges, tunnels and creates the grace to end, and
// then cuts them.
func public(cfg Config, api http.Handler, forwarder *proxy.Forwarder, log *slog.Logger) lifecycle.Part {
	server := &http.Server{
		Handler:  api,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug), // of strangers' handshakes and heads
	}
	proxy.Configure(server, cfg.MaxHeaderBytes)
	return lifecycle.Listener("public", cfg.Listen, func(l net.Listener) error {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	}, func(ctx context.Context) error {
		grace, cancel := context.WithTimeout(ctx, cfg.StreamGrace)
		defer cancel()
		err := server.Shutdown(grace)
		// Tunnels are not the server's any more; they are waited for, and cut, here.
		if closeErr := forwarder.Close(grace); closeErr != nil {
			return closeErr
		}
		if err != nil {
			return server.Close()
		}
		return nil
	})
}
