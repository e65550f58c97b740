package nodes

import (
	"context"
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"berth/services/internal/node"
)

var errPending = errors.New("pending")

type conflictLog struct{}

func newConflictLog() *conflictLog { return &conflictLog{} }

type metrics struct{ batchSize prometheus.Observer }

func newMetrics(prometheus.Registerer) metrics { return metrics{} }

// Batcher renews the leases of many heartbeats in one statement.
type Batcher struct{}

func newBatcher(int, any, prometheus.Observer) *Batcher { return &Batcher{} }

// Run renews what waits until ctx ends, then returns nil.
func (b *Batcher) Run(ctx context.Context) error { return nil }

func (n *Nodes) renew() {}

// Heartbeat: errors are node.ErrNotListed, node.ErrBadEndpoint or route.ErrNotAllowed, node.ErrIDInUse, node.ErrSuperseded.
func (n *Nodes) Heartbeat(ctx context.Context, beat Beat) (Answer, error) { return Answer{}, errPending }

// Unregister: errors are node.ErrInstanceMismatch.
func (n *Nodes) Unregister(ctx context.Context, id node.ID, instance string) error { return errPending }

// Get returns one observed node; cluster "": any. Errors: node.ErrNotObserved.
func (n *Nodes) Get(ctx context.Context, id node.ID, cluster string) (Observed, error) {
	return Observed{}, errPending
}

// ListObserved returns the observed nodes by id; cluster "": all.
func (n *Nodes) ListObserved(ctx context.Context, cluster string) ([]Observed, error) {
	return nil, errPending
}

// ListPresent returns all present nodes by id; cluster "": all.
func (n *Nodes) ListPresent(ctx context.Context, cluster string) ([]Member, error) {
	return nil, errPending
}

// ApplyStatic makes the static nodes those listed, in one transaction. Called once at start.
func (n *Nodes) ApplyStatic(ctx context.Context, listed []StaticNode) error { return errPending }

// DueLoop, ExpireLoop and StatusLoop run until ctx ends.
func (n *Nodes) DueLoop(ctx context.Context) error    { return errPending }
func (n *Nodes) ExpireLoop(ctx context.Context) error { return errPending }
func (n *Nodes) StatusLoop(ctx context.Context) error { return errPending }
