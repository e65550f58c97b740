// Package nodeagent is a reference node: it runs isolated sandboxes on one Linux machine, serves AgentENV's node
// contract over HTTP, and tells the schedulers that it lives.
package nodeagent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"path/filepath"
	"syscall"
	"time"

	"github.com/google/uuid"

	"berth/pkg/lifecycle"
	"berth/pkg/telemetry"
	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/nodeagent/internal/heartbeat"
	"berth/services/nodeagent/internal/httpapi"
	"berth/services/nodeagent/internal/isolation"
	"berth/services/nodeagent/internal/journal"
	"berth/services/nodeagent/internal/sandboxes"
	"berth/services/nodeagent/internal/templates"
)

const serviceName = "NODEAGENT"

// capabilities are what gateways and schedulers may rely on here.
var capabilities = []string{"create_key", "route_revision"} //nolint:gochecknoglobals // a constant

// Times of the HTTP server: the side that reuses connections, the gateway, closes first.
const (
	keepAlive      = 640 * time.Second
	headTimeout    = 10 * time.Second
	maxHeadBytes   = 192 << 10 // a gateway takes 128 KiB and adds its own
	flushRevisions = time.Second
	finishTime     = 5 * time.Second
	unregisterTime = 5 * time.Second
	pauseTime      = 10 * time.Second
)

// Run runs a node agent until ctx ends. It brings back the sandboxes of the data folder before it listens or sends a heartbeat. On a clean
// stop it freezes its sandboxes, unregisters, and ends their processes; the next agent on the same data folder starts them
// anew under the same ids. Errors say what to do.
func Run(ctx context.Context, cfg Config, tel *telemetry.Telemetry, version string) (err error) {
	if err := cfg.Validate(); err != nil {
		return err
	}
	set, err := templates.Load(cfg.Templates)
	if err != nil {
		return err
	}
	data, err := filepath.Abs(cfg.Data)
	if err != nil {
		return fmt.Errorf("data folder: %w", err)
	}
	memory, err := journal.Open(filepath.Join(data, "journal"))
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("--data %s: %w: give a folder that this user may make and write", cfg.Data, err)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()

	backend, err := isolation.New(ctx, isolation.Config{
		Mode: cfg.Isolation, Bubblewrap: cfg.Bubblewrap, Dir: filepath.Join(data, "isolation"), Name: groupName(cfg.NodeID, data),
		UID: cfg.SandboxUID, GID: cfg.SandboxGID, MaxOpenFiles: cfg.MaxOpenFiles, MaxProcesses: cfg.MaxProcesses, ReadOnly: cfg.ReadOnly, Log: tel.Log,
	})
	if err != nil {
		return err
	}
	defer backend.Close()

	fences := journal.NewFences(memory, flushRevisions)
	manager := sandboxes.New(sandboxes.Deps{
		Dir: filepath.Join(data, "sandboxes"), Backend: backend, Journal: memory, Fences: fences, Templates: set,
		Limits:    sandboxes.Limits{Sandboxes: cfg.MaxSandboxes, CPUMillis: cfg.CapacityCPUMillis, MemoryBytes: cfg.CapacityMemoryMiB << 20},
		Retention: cfg.KeyRetention, Answer: httpapi.CreateAnswer(cfg.NodeID, cfg.Domain), Log: tel.Log,
	})
	scheduler, disconnect, err := connect(cfg, tel)
	if err != nil {
		return err
	}
	defer disconnect()
	reporter := heartbeat.New(heartbeat.Deps{
		Identity: identity(cfg, version), Scheduler: scheduler, Living: manager, Machine: heartbeat.NewMachine(data),
		Metrics: heartbeat.NewMetrics(tel.Registry, manager.Usage), Log: tel.Log,
	})
	api := httpapi.New(httpapi.Deps{
		NodeID: cfg.NodeID, Keys: cfg.NodeKeys, Domain: cfg.Domain, Sandboxes: manager, Fences: fences,
		Tracers: tel.Tracers, Propagator: tel.Propagator, Metrics: httpapi.NewMetrics(tel.Registry), Log: tel.Log,
	})
	health := lifecycle.NewHealth()
	health.Check("heartbeat", reporter.Ready)

	return lifecycle.Run(ctx, lifecycle.Options{Log: tel.Log, Health: health, DrainDelay: cfg.DrainDelay, StopTimeout: cfg.StopTimeout},
		lifecycle.HTTP("admin", cfg.AdminListen, tel.Admin()),
		lifecycle.HTTP("ops", cfg.OpsListen, health.Handler(tel.Metrics())),
		lifecycle.Loop("write revisions", func(ctx context.Context) error {
			fences.Run(ctx, func(err error) {
				tel.Log.ErrorContext(ctx, "revisions could not be written", slog.Any("error", err))
			})
			return nil
		}),
		lifecycle.Part{
			Name:  "sandboxes",
			Start: func(ctx context.Context, _ func(error)) error { return manager.Restore(ctx) },
			Stop:  manager.Close,
		},
		lifecycle.Loop("forget deleted sandboxes", manager.Run),
		leave(manager, reporter, tel.Log),
		serve(cfg.Listen, api, tel.Log),
		lifecycle.Loop("heartbeat", reporter.Run),
	)
}

// serve is the node's HTTP API. A stop gives open exchanges a moment and then cuts them: an event stream may never end by itself, and
// what comes after needs time too.
func serve(listen string, api http.Handler, log *slog.Logger) lifecycle.Part {
	part := lifecycle.HTTP("node API", listen, api, func(s *http.Server) {
		s.ReadHeaderTimeout, s.IdleTimeout, s.MaxHeaderBytes = headTimeout, keepAlive, maxHeadBytes
		s.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	})
	stop := part.Stop
	part.Stop = func(ctx context.Context) error {
		finishing, cancel := context.WithTimeout(ctx, finishTime)
		defer cancel()
		if err := stop(finishing); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		return nil
	}
	return part
}

// leave is what a clean stop does when heartbeats have ended and the API is closed: freeze, then say goodbye.
func leave(manager *sandboxes.Manager, reporter *heartbeat.Reporter, log *slog.Logger) lifecycle.Part {
	return lifecycle.Closer("leave", func(ctx context.Context) error {
		ctx = context.WithoutCancel(ctx) // each step has its own limit, so that no step costs the next its turn
		pausing, cancel := context.WithTimeout(ctx, pauseTime)
		defer cancel()
		if err := manager.PauseAll(pausing); err != nil {
			log.WarnContext(ctx, "not every sandbox could be frozen before the stop", slog.Any("error", err))
		}
		leaving, cancel := context.WithTimeout(ctx, unregisterTime)
		defer cancel()
		if err := reporter.Unregister(leaving); err != nil {
			log.WarnContext(ctx, "the schedulers were not told; they find out when the lease ends", slog.Any("error", err))
		}
		return nil
	})
}

func connect(cfg Config, tel *telemetry.Telemetry) (heartbeat.Scheduler, func(), error) {
	remote := heartbeat.Remote{Addresses: cfg.SchedulerGRPC, Token: cfg.SchedulerToken, Tracers: tel.Tracers, Propagator: tel.Propagator}
	if cfg.Transport == TransportTwirp {
		remote.Addresses = cfg.SchedulerURLs
		return heartbeat.NewTwirp(remote)
	}
	return heartbeat.NewGRPC(remote)
}

func identity(cfg Config, version string) heartbeat.Identity {
	id := heartbeat.Identity{
		NodeID: cfg.NodeID, ClusterID: cfg.ClusterID, InstanceID: uuid.NewString(), Version: version, Endpoint: cfg.Endpoint,
		Labels: cfg.Labels, Capabilities: capabilities,
		Capacity: &schedulerv1.Capacity{
			Sandboxes: uint32(cfg.MaxSandboxes), CpuMillis: cfg.CapacityCPUMillis, MemoryBytes: cfg.CapacityMemoryMiB << 20,
		},
	}
	if cfg.P2PBackend != "" {
		id.P2P = &schedulerv1.P2PEndpoint{Backend: cfg.P2PBackend, Address: cfg.P2PAddress}
	}
	return id
}

// groupName names the cgroups of this agent so that no other agent on this machine has the same.
func groupName(nodeID, data string) string {
	sum := sha256.Sum256([]byte(data))
	return "berth-" + nodeID + "-" + hex.EncodeToString(sum[:4])
}
