package journal

import (
	"context"
	"errors"
	"fmt"
	"time"

	"berth/services/internal/sandbox"
)

// StaleError is the refusal of a request that came by an old route.
type StaleError struct {
	Revision sandbox.Revision // the highest this node has seen
}

func (e *StaleError) Error() string {
	return fmt.Sprintf("route is stale: revision %d is known", e.Revision)
}

// Fences knows the highest revision of each sandbox. Raises by data-plane requests are kept in memory and written by
// Run and Flush; a mutating call is written before it acts. It is safe for concurrent use.
type Fences struct {
	journal *Journal
	every   time.Duration
	seen    *revisions
}

// NewFences returns the fences of the journal's sandboxes.
func NewFences(j *Journal, flushEvery time.Duration) *Fences {
	f := &Fences{journal: j, every: flushEvery, seen: newRevisions()}
	for _, r := range j.All() {
		f.seen.raise(r.ID, r.Revision)
	}
	return f
}

// Pass lets a request that reads or carries bytes through unless its revision is below the highest seen: then the error is a
// *StaleError. Revision 0 is a caller that knows none, and passes.
func (f *Fences) Pass(id sandbox.ID, revision sandbox.Revision) error {
	if revision == 0 {
		return nil
	}
	if highest := f.seen.raise(id, revision); highest > revision {
		return &StaleError{Revision: highest}
	}
	return nil
}

// PassMutation is Pass for a call that changes the sandbox: the revision is on disk before it returns nil, so that no restart
// makes the node forget that an older route must not change anything any more.
func (f *Fences) PassMutation(id sandbox.ID, revision sandbox.Revision) error {
	if err := f.Pass(id, revision); err != nil || revision == 0 {
		return err
	}
	return f.write(id)
}

var errNothing = errors.New("nothing to write")

func (f *Fences) write(id sandbox.ID) error {
	err := f.journal.Update(id, func(r *Record) error {
		highest := f.seen.get(id)
		if r.State == nil && r.Deleted == nil || highest <= r.Revision {
			return errNothing // not a sandbox of ours, or known already
		}
		r.Revision = highest
		return nil
	})
	if errors.Is(err, errNothing) {
		return nil
	}
	return err
}

// Flush writes what was raised in memory only.
func (f *Fences) Flush() error {
	var errs []error
	for _, r := range f.journal.All() {
		if f.seen.get(r.ID) > r.Revision {
			errs = append(errs, f.write(r.ID))
		}
	}
	return errors.Join(errs...)
}

// Forget drops what was seen of a sandbox whose record is gone.
func (f *Fences) Forget(id sandbox.ID) { f.seen.forget(id) }

// Run flushes now and then until ctx ends, and once more then. report gets each failure.
func (f *Fences) Run(ctx context.Context, report func(error)) {
	tick := time.NewTicker(f.every)
	defer tick.Stop()
	for {
		var ended bool
		select {
		case <-tick.C:
		case <-ctx.Done():
			ended = true
		}
		if err := f.Flush(); err != nil {
			report(err)
		}
		if ended {
			return
		}
	}
}
