package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// errNotSynced is a first view that did not become whole in time.
var errNotSynced = errors.New("the API server did not list everything in time")

// watches are what one try to follow the API server watches.
type watches struct {
	client     *client
	slices     *kept
	ignored    *kept // nil: no selector
	noSchedule *kept
	changed    chan struct{} // has a place for one
}

// newWatches returns what c wants watched. say is told when one kind of object can or cannot be had.
func newWatches(c Config, cl *client, pace pace, log *slog.Logger, say func(kind string, err error)) *watches {
	w := &watches{client: cl, changed: make(chan struct{}, 1)}
	keep := func(kind string, example runtime.Object, from func(heard func(error)) cache.ListerWatcher) *kept {
		k := &kept{Store: cache.NewStore(cache.MetaNamespaceKeyFunc), changed: w.changed, whole: make(chan struct{})}
		quiet := logr.FromSlogHandler(demoted{log.Handler()})
		heard := func(err error) {
			k.hear(err)
			say(kind, err)
		}
		k.reflector = cache.NewReflectorWithOptions(from(heard), example, k, cache.ReflectorOptions{
			Name: kind, Logger: &quiet,
			Backoff: &wait.Backoff{Duration: pace.retryMin, Cap: pace.retryMax, Factor: 2, Steps: 1000, Jitter: 0.2},
		})
		return k
	}
	w.slices = keep("endpointslices", &discoveryv1.EndpointSlice{}, func(heard func(error)) cache.ListerWatcher {
		return cl.endpointSlices(c.service, heard)
	})
	if c.ignore != nil {
		w.ignored = keep("ignored pods", &metav1.PartialObjectMetadata{}, func(heard func(error)) cache.ListerWatcher {
			return cl.podsOf(c.ignore, heard)
		})
	}
	if c.noSchedule != nil {
		w.noSchedule = keep("pods without creates", &metav1.PartialObjectMetadata{}, func(heard func(error)) cache.ListerWatcher {
			return cl.podsOf(c.noSchedule, heard)
		})
	}
	return w
}

func (w *watches) all() []*kept {
	var all []*kept
	for _, k := range []*kept{w.slices, w.ignored, w.noSchedule} {
		if k != nil {
			all = append(all, k)
		}
	}
	return all
}

// run watches until ctx ends, and returns when nothing of it runs any more.
func (w *watches) run(ctx context.Context, log *slog.Logger) {
	ctx = klog.NewContext(ctx, logr.FromSlogHandler(demoted{log.Handler()}))
	var running sync.WaitGroup
	for _, k := range w.all() {
		running.Go(func() { k.reflector.RunWithContext(ctx) })
	}
	running.Wait()
}

// sync waits until everything was listed once, at most limit.
func (w *watches) sync(ctx context.Context, limit time.Duration) error {
	late := time.NewTimer(limit)
	defer late.Stop()
	for _, k := range w.all() {
		select {
		case <-k.whole:
		case <-late.C:
			if err := w.failure(); err != nil {
				return fmt.Errorf("%w: %w", errNotSynced, err)
			}
			return errNotSynced
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// failure is why some objects cannot be had now; nil: all can.
func (w *watches) failure() error {
	for _, k := range w.all() {
		if last := k.last.Load(); last != nil && last.err != nil {
			return last.err
		}
	}
	return nil
}

// deafFor is how long some objects could not be had.
func (w *watches) deafFor() time.Duration {
	longest := time.Duration(0)
	for _, k := range w.all() {
		if last := k.last.Load(); last != nil && last.err != nil {
			longest = max(longest, time.Since(last.since))
		}
	}
	return longest
}

// view is what was told until now, each Pod of doubts with its present UID.
func (w *watches) view(ctx context.Context, doubts []string) View {
	v := View{Ignored: w.ignored.keys(), NoSchedule: w.noSchedule.keys(), Current: map[string]types.UID{}}
	for _, object := range w.slices.List() {
		if slice, ok := object.(*discoveryv1.EndpointSlice); ok {
			v.Slices = append(v.Slices, slice)
		}
	}
	for _, key := range doubts {
		_, name, err := cache.SplitMetaNamespaceKey(key)
		if err != nil {
			continue
		}
		// A Pod that is gone, or cannot be asked for, leaves the answer to the list's last comparisons.
		if uid, err := w.client.podUID(ctx, name); err == nil {
			v.Current[key] = uid
		}
	}
	return v
}

// heard is how the last question about one kind of object ended, and since when it ends like this.
type heard struct {
	err   error
	since time.Time
}

// kept is a store that a reflector fills, and says when that changed it.
type kept struct {
	cache.Store
	reflector *cache.Reflector
	changed   chan<- struct{}
	first     sync.Once
	whole     chan struct{} // closed once everything was listed
	last      atomic.Pointer[heard]
}

// hear is called by the one goroutine of the reflector.
func (k *kept) hear(err error) {
	if errors.Is(err, context.Canceled) {
		return // the end of this process's own asking
	}
	if before := k.last.Load(); before != nil && (before.err == nil) == (err == nil) {
		k.last.Store(&heard{err, before.since})
		return
	}
	k.last.Store(&heard{err, time.Now()})
}

// keys are the keys of what is kept; a nil store keeps nothing.
func (k *kept) keys() map[string]bool {
	keys := map[string]bool{}
	if k == nil {
		return keys
	}
	for _, key := range k.ListKeys() {
		keys[key] = true
	}
	return keys
}

func (k *kept) tell(err error) error {
	select {
	case k.changed <- struct{}{}:
	default:
	}
	return err
}

// Add keeps what was added.
func (k *kept) Add(object any) error { return k.tell(k.Store.Add(object)) }

// Update keeps what was changed.
func (k *kept) Update(object any) error { return k.tell(k.Store.Update(object)) }

// Delete forgets what was deleted.
func (k *kept) Delete(object any) error { return k.tell(k.Store.Delete(object)) }

// Replace keeps exactly list.
func (k *kept) Replace(list []any, revision string) error {
	err := k.Store.Replace(list, revision)
	if err == nil {
		k.first.Do(func() { close(k.whole) })
	}
	return k.tell(err)
}

// demoted logs everything as Debug: what client-go retries is told once, by this package, in its words.
type demoted struct{ slog.Handler }

// Enabled asks about Debug, whatever the level.
func (d demoted) Enabled(ctx context.Context, _ slog.Level) bool {
	return d.Handler.Enabled(ctx, slog.LevelDebug)
}

// Handle handles r as Debug. Errors come here without Enabled being asked.
func (d demoted) Handle(ctx context.Context, r slog.Record) error {
	if !d.Handler.Enabled(ctx, slog.LevelDebug) {
		return nil
	}
	r.Level = slog.LevelDebug
	return d.Handler.Handle(ctx, r)
}

// WithAttrs keeps the demotion.
func (d demoted) WithAttrs(attrs []slog.Attr) slog.Handler {
	return demoted{d.Handler.WithAttrs(attrs)}
}

// WithGroup keeps the demotion.
func (d demoted) WithGroup(name string) slog.Handler { return demoted{d.Handler.WithGroup(name)} }
