package bindings

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/pkg/pgdb"
	"berth/services/internal/sandbox"
)

var errPending = errors.New("pending")

// Doorbell rings gateways after commits.
type Doorbell struct{}

func newDoorbell(*pgdb.DB, time.Duration, *slog.Logger) *Doorbell { return &Doorbell{} }

func (d *Doorbell) Ring()                        {}
func (d *Doorbell) Run(ctx context.Context) error { return errPending }

type metrics struct{}

func newMetrics(prometheus.Registerer) metrics { return metrics{} }

// Record: errors are node.ErrNotListed, node.ErrReservationOver, sandbox.ErrChanged, sandbox.ErrInUse.
func (b *Bindings) Record(ctx context.Context, a Assignment) ([]Assigned, error) {
	return nil, errPending
}

// Lookup: errors are sandbox.ErrNotFound.
func (b *Bindings) Lookup(ctx context.Context, id sandbox.ID) (Found, error) { return Found{}, errPending }

// Release ends a binding because its sandbox was deleted; revision 0: any. Errors: sandbox.ErrChanged.
func (b *Bindings) Release(ctx context.Context, id sandbox.ID, revision sandbox.Revision) (sandbox.Revision, error) {
	return 0, errPending
}

// ParkLoop, RetentionLoop and StateLoop run until ctx ends.
func (b *Bindings) ParkLoop(ctx context.Context) error      { return errPending }
func (b *Bindings) RetentionLoop(ctx context.Context) error { return errPending }
func (b *Bindings) StateLoop(ctx context.Context) error     { return errPending }
