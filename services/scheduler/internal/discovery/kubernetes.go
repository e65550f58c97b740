package discovery

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"os"
	"sync"
	"time"

	"k8s.io/client-go/rest"

	"berth/services/internal/node"
	"berth/services/scheduler/internal/nodes"
)

const (
	syncLimit  = 30 * time.Second
	renewEvery = 5 * time.Second
	// deafLimit is how long the writer may hear nothing before it lets a replica write that does.
	deafLimit = 10 * time.Second
	// A deployment changes slices in bursts; a change waits for the rest of its burst, but not long.
	burstGap   = 100 * time.Millisecond
	burstLimit = time.Second
	// doubtLimit is for all questions about single Pods that one list asks: the lease goes on meanwhile, and
	// an answer that is missing is asked for again.
	doubtLimit = 2 * time.Second

	storeLimit   = 10 * time.Second // below the writer's lease
	releaseLimit = 2 * time.Second
)

// pace is how long things take; tests take less.
type pace struct {
	syncLimit, retryMin, retryMax    time.Duration
	renewEvery, burstGap, burstLimit time.Duration
	deafLimit, doubtLimit            time.Duration
}

func usualPace() pace {
	return pace{
		syncLimit: syncLimit, retryMin: time.Second, retryMax: 30 * time.Second,
		renewEvery: renewEvery, burstGap: burstGap, burstLimit: burstLimit, deafLimit: deafLimit, doubtLimit: doubtLimit,
	}
}

// store is where lists become rows.
type store interface {
	ClaimWriter(ctx context.Context, holder string) (nodes.Writer, error)
	ReleaseWriter(ctx context.Context, w nodes.Writer) error
	ApplyDiscovered(ctx context.Context, w nodes.Writer, listed []nodes.DiscoveredNode) ([]nodes.Unfit, error)
}

// Kubernetes follows one Service.
type Kubernetes struct {
	cfg     Config
	rest    func() (*rest.Config, error)
	store   store
	log     *slog.Logger
	metrics *Metrics
	pace    pace
	holder  string

	writer  nodes.Writer // the zero value: another replica writes
	unfit   map[node.ID]string
	guessed bool // the last list was made without knowing which of two Pods is the newer
	failing bool // of the store, so that it is told once

	mu   sync.Mutex
	mute map[string]bool // kinds of objects that cannot be had
}

// NewKubernetes returns a follower of the Service that cfg names. It starts nothing: Run is the caller's
// to run.
func NewKubernetes(cfg Config, known *nodes.Nodes, log *slog.Logger, metrics *Metrics) *Kubernetes {
	return newKubernetes(cfg, known, log, metrics)
}

func newKubernetes(cfg Config, s store, log *slog.Logger, metrics *Metrics) *Kubernetes {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return &Kubernetes{
		cfg: cfg, rest: func() (*rest.Config, error) { return restConfig(cfg.kubeconfig) }, store: s,
		log: log.With(slog.String("source", sourceKubernetes)), metrics: metrics, pace: usualPace(),
		holder: host + "/" + rand.Text()[:8], unfit: map[node.ID]string{}, mute: map[string]bool{},
	}
}

// Run follows the Service until ctx ends, then returns nil. Outside a cluster it says so once and has no
// nodes. What goes wrong is tried again: after a second at first, then after up to half a minute.
func (k *Kubernetes) Run(ctx context.Context) error {
	pause := k.pace.retryMin
	for {
		err := k.follow(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the end of ctx is a clean stop
		}
		if errors.Is(err, rest.ErrNotInCluster) {
			k.log.WarnContext(ctx, "this process runs outside a cluster: Kubernetes lists no nodes; name a file with --discovery-kubernetes-kubeconfig to ask a cluster from here")
			<-ctx.Done()
			return nil
		}
		k.metrics.fail(sourceKubernetes)
		k.log.WarnContext(ctx, "nodes cannot be listed; what is known stays", slog.Any("error", err), slog.Duration("retry", pause))
		if sleep(ctx, pause) != nil {
			return nil //nolint:nilerr // as above
		}
		pause = min(2*pause, k.pace.retryMax)
	}
}

// sleep returns nil after d, or an error when ctx ends before.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// follow watches until ctx ends, or the first view is not whole in time.
func (k *Kubernetes) follow(ctx context.Context) error {
	cfg, err := k.rest()
	if err != nil {
		return err
	}
	cl, err := connect(cfg, k.cfg.namespace)
	if err != nil {
		return err
	}
	defer cl.close()
	w := newWatches(k.cfg, cl, k.pace, k.log, func(kind string, err error) { k.say(ctx, kind, err) })
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { w.run(ctx, k.log) })
	defer running.Wait()
	defer cancel()
	if err := w.sync(ctx, k.pace.syncLimit); err != nil {
		return err
	}
	k.log.InfoContext(ctx, "everything is listed; changes are followed", slog.String("service", k.cfg.service))
	k.write(ctx, w)
	return nil
}

// say tells once when one kind of object cannot be had, and once when it can again.
func (k *Kubernetes) say(ctx context.Context, kind string, err error) {
	if errors.Is(err, context.Canceled) || ctx.Err() != nil {
		return
	}
	k.mu.Lock()
	was := k.mute[kind]
	k.mute[kind] = err != nil
	any := false
	for _, mute := range k.mute {
		any = any || mute
	}
	k.mu.Unlock()
	switch {
	case err != nil:
		k.metrics.fail(sourceKubernetes)
		if !was {
			k.log.WarnContext(ctx, "the API server does not answer; what is known stays", slog.String("kind", kind), slog.Any("error", err))
		}
	case was:
		k.log.InfoContext(ctx, "the API server answers again", slog.String("kind", kind))
	}
	if !any {
		k.metrics.heal(sourceKubernetes)
	}
}

// write makes the list rows while this replica has the lease, until ctx ends.
func (k *Kubernetes) write(ctx context.Context, w *watches) {
	defer k.letGo(ctx)
	list := k.list(ctx, w)
	renew := time.NewTicker(k.pace.renewEvery)
	defer renew.Stop()
	k.renew(ctx, w, list)
	for {
		select {
		case <-ctx.Done():
			return
		case <-renew.C:
			if k.guessed {
				list = k.list(ctx, w)
			}
			k.renew(ctx, w, list)
		case <-w.changed:
			k.awaitBurst(ctx, w)
			list = k.list(ctx, w)
			if k.writer != (nodes.Writer{}) {
				k.apply(ctx, list)
			}
		}
	}
}

// awaitBurst returns when a while has passed without a change, or the limit.
func (k *Kubernetes) awaitBurst(ctx context.Context, w *watches) {
	limit := time.NewTimer(k.pace.burstLimit)
	defer limit.Stop()
	for {
		gap := time.NewTimer(k.pace.burstGap)
		select {
		case <-w.changed:
			gap.Stop()
			continue
		case <-gap.C:
		case <-limit.C:
		case <-ctx.Done():
		}
		gap.Stop()
		return
	}
}

func (k *Kubernetes) list(ctx context.Context, w *watches) []nodes.DiscoveredNode {
	list, doubts := k.cfg.List(w.view(ctx, nil))
	if len(doubts) > 0 {
		limited, cancel := context.WithTimeout(ctx, k.pace.doubtLimit)
		list, doubts = k.cfg.List(w.view(limited, doubts))
		cancel()
	}
	k.guessed = len(doubts) > 0
	k.metrics.listed(sourceKubernetes, len(list))
	return list
}

// renew claims or renews the lease, and compares all rows with the list where it has it.
func (k *Kubernetes) renew(ctx context.Context, w *watches, list []nodes.DiscoveredNode) {
	if w.deafFor() > k.pace.deafLimit {
		if k.writer != (nodes.Writer{}) {
			k.log.WarnContext(ctx, "this replica hears nothing of Kubernetes: another one may write", slog.Any("error", w.failure()))
		}
		k.letGo(ctx)
		return
	}
	limited, cancel := context.WithTimeout(ctx, storeLimit)
	defer cancel()
	claimed, err := k.store.ClaimWriter(limited, k.holder)
	if err != nil {
		k.lost(ctx, err)
		return
	}
	if k.writer != claimed {
		k.log.InfoContext(ctx, "this replica writes what Kubernetes lists", slog.Int64("fence", claimed.Fence))
	}
	k.writer = claimed
	k.metrics.writer.Set(1)
	k.apply(ctx, list)
}

// lost is an answer of the store that is not the lease.
func (k *Kubernetes) lost(ctx context.Context, err error) {
	if errors.Is(err, nodes.ErrNotWriter) {
		if k.writer != (nodes.Writer{}) {
			k.log.InfoContext(ctx, "another replica writes what Kubernetes lists now")
		}
		k.writer, k.failing = nodes.Writer{}, false
		k.metrics.writer.Set(0)
		return
	}
	// The lease may well be held: the next answer tells.
	if ctx.Err() == nil && !k.failing {
		k.failing = true
		k.log.WarnContext(ctx, "what Kubernetes lists cannot be written; it is tried again", slog.Any("error", err))
	}
}

func (k *Kubernetes) apply(ctx context.Context, list []nodes.DiscoveredNode) {
	limited, cancel := context.WithTimeout(ctx, storeLimit)
	defer cancel()
	unfit, err := k.store.ApplyDiscovered(limited, k.writer, list)
	if err != nil {
		k.lost(ctx, err)
		return
	}
	if k.failing {
		k.log.InfoContext(ctx, "what Kubernetes lists is written again")
	}
	k.failing = false
	k.leftOut(ctx, unfit)
}

// leftOut tells once about each node that is left out.
func (k *Kubernetes) leftOut(ctx context.Context, unfit []nodes.Unfit) {
	now := make(map[node.ID]string, len(unfit))
	for _, u := range unfit {
		now[u.ID] = u.Endpoint
		if k.unfit[u.ID] != u.Endpoint {
			k.log.WarnContext(ctx, "a node of Kubernetes is left out", slog.Any("node", u.ID), slog.String("endpoint", u.Endpoint), slog.Any("error", u.Why))
		}
	}
	k.unfit = now
	k.metrics.leftOut.WithLabelValues(sourceKubernetes).Set(float64(len(now)))
}

// letGo gives the lease back, also after ctx has ended.
func (k *Kubernetes) letGo(ctx context.Context) {
	if k.writer == (nodes.Writer{}) {
		return
	}
	cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseLimit)
	defer cancel()
	if err := k.store.ReleaseWriter(cleanup, k.writer); err != nil {
		k.log.DebugContext(ctx, "the lease ends by itself", slog.Any("error", err))
	}
	k.writer = nodes.Writer{}
	k.metrics.writer.Set(0)
}
