package bindings

import (
	"context"
	"log/slog"
	"time"

	"berth/pkg/pgdb"
)

// ringGatewaysSQL names route.Channel; NOTIFY takes no parameters.
const ringGatewaysSQL = `NOTIFY route`

// Doorbell tells gateways that the feed has something to read. It rings outside the transaction that
// wrote it: commits that notify queue behind one lock of the whole server. A ring that is lost costs
// one poll.
type Doorbell struct {
	flag  chan struct{} // holds one: rings that wait are one ring
	ring  func(ctx context.Context) error
	every time.Duration
	log   *slog.Logger
}

func newDoorbell(db *pgdb.DB, every time.Duration, log *slog.Logger) *Doorbell {
	ring := func(ctx context.Context) error {
		_, err := db.Exec(ctx, ringGatewaysSQL)
		return err
	}
	return &Doorbell{flag: make(chan struct{}, 1), ring: ring, every: every, log: log}
}

// Ring asks for a ring, after the commit of what is to be read. It never waits.
func (d *Doorbell) Ring() {
	select {
	case d.flag <- struct{}{}:
	default: // one is asked for already, and will be sent after this commit
	}
}

// ringLimit ends a ring that hangs: the next one, or a poll, serves as well.
const ringLimit = 2 * time.Second

// Run rings when asked, at once and then at most once in the configured time, until ctx ends; then it
// returns nil.
func (d *Doorbell) Run(ctx context.Context) error {
	broken := false
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C: // the pause since the last ring
		}
		select {
		case <-ctx.Done():
			return nil
		case <-d.flag:
		}
		limited, cancel := context.WithTimeout(ctx, ringLimit)
		err := d.ring(limited)
		cancel()
		if err != nil && !broken && ctx.Err() == nil {
			d.log.WarnContext(ctx, "doorbell is broken, gateways poll", slog.Any("error", err))
		}
		broken = err != nil
		timer.Reset(d.every)
	}
}
