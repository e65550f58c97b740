package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"
)

// defaultStopTimeout is how long all parts together may take to stop when Options says nothing.
const defaultStopTimeout = 30 * time.Second

// Part is one long-lived piece of a process.
//
// Start returns once the part works and must not block for the part's life; its ctx ends when the part
// has been stopped. The part calls fail at most once, and only if it ends by itself before Stop.
// Stop ends it within ctx; it is called once, and only after a successful Start. Either may be nil.
type Part struct {
	Name  string
	Start func(ctx context.Context, fail func(error)) error
	Stop  func(ctx context.Context) error
}

// Options says how Run reports and how long stopping may take.
type Options struct {
	Log         *slog.Logger  // nil: nothing is logged
	Health      *Health       // nil: nobody asks
	DrainDelay  time.Duration // from "not ready" to the first Stop; zero: none
	StopTimeout time.Duration // for all parts together; zero: 30 s
}

// Run starts parts in order, logs "ready" and waits until ctx ends or a part fails. It then marks
// o.Health as draining, waits o.DrainDelay (not after a failure), and stops the parts in reverse.
// It returns nil after a clean stop, else what failed first, joined with what failed while stopping.
func Run(ctx context.Context, o Options, parts ...Part) error {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Health == nil {
		o.Health = NewHealth()
	}
	if o.StopTimeout <= 0 {
		o.StopTimeout = defaultStopTimeout
	}
	r := runner{Options: o, failed: make(chan error, 1)}
	o.Health.starting.Store(true)

	err := r.start(ctx, parts)
	if err == nil {
		o.Health.starting.Store(false)
		o.Log.InfoContext(ctx, "ready", slog.Int("parts", len(parts)))
		err = r.wait(ctx)
	}
	o.Health.Drain()
	if stopErr := r.stop(ctx); stopErr != nil {
		err = errors.Join(err, stopErr)
	}
	o.Log.InfoContext(ctx, "stopped")
	return err
}

type runner struct {
	Options
	failed  chan error // holds the first failure; later ones only follow from it
	started []startedPart
}

type startedPart struct {
	Part
	end context.CancelFunc
}

// start starts parts until one fails or ctx ends, and remembers which ones must be stopped.
func (r *runner) start(ctx context.Context, parts []Part) error {
	for _, p := range parts {
		// Parts outlive ctx: it says when to begin stopping, and each part works until its turn.
		partCtx, end := context.WithCancel(context.WithoutCancel(ctx))
		if p.Start != nil {
			if err := p.Start(partCtx, r.failure(p.Name)); err != nil {
				end()
				return fmt.Errorf("start %s: %w", p.Name, err)
			}
		}
		r.started = append(r.started, startedPart{Part: p, end: end})
		r.Log.DebugContext(ctx, "part started", slog.String("part", p.Name))
		select {
		case <-ctx.Done():
			return nil // asked to end while starting; wait sees it too
		default:
		}
	}
	return nil
}

func (r *runner) failure(name string) func(error) {
	var once sync.Once
	return func(err error) {
		once.Do(func() {
			if err == nil {
				err = errEnded
			}
			select {
			case r.failed <- fmt.Errorf("%s: %w", name, err):
			default:
			}
		})
	}
}

// errEnded stands for a part that ended by itself without saying why.
var errEnded = errors.New("ended by itself")

// wait blocks until ctx ends, and then for the drain delay, or until a part fails.
func (r *runner) wait(ctx context.Context) error {
	select {
	case err := <-r.failed:
		return err
	case <-ctx.Done():
	}
	r.Log.InfoContext(ctx, "stopping", slog.Duration("drain_delay", r.DrainDelay))
	r.Health.Drain()
	if r.DrainDelay <= 0 {
		return nil
	}
	delay := time.NewTimer(r.DrainDelay)
	defer delay.Stop()
	select {
	case err := <-r.failed:
		return err
	case <-delay.C:
		return nil
	}
}

// stop stops what was started, last first. One slow part does not keep the others from being asked.
func (r *runner) stop(ctx context.Context) error {
	stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.StopTimeout)
	defer cancel()
	var errs []error
	for _, p := range slices.Backward(r.started) {
		if p.Stop != nil {
			if err := p.Stop(stopCtx); err != nil {
				errs = append(errs, fmt.Errorf("stop %s: %w", p.Name, err))
			}
		}
		p.end()
		r.Log.DebugContext(ctx, "part stopped", slog.String("part", p.Name))
	}
	return errors.Join(errs...)
}

// Main calls run with a context that ends at the first SIGINT or SIGTERM and returns what run returns.
// From then on the signals have their usual effect again, so a second one ends the process at once.
func Main(run func(ctx context.Context) error) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	defer context.AfterFunc(ctx, stop)()
	return run(ctx)
}
