package placement

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
)

// watchEvery is how often the keys that calls wait for are looked at; all of a replica in one statement.
const watchEvery = 50 * time.Millisecond

// keyWatch wakes those who wait for a create key. It looks at what is, not at what changes, so nothing
// can be missed between a question and the wait.
type keyWatch struct {
	mu      *sync.Mutex
	waiting map[[2]string]*keyWaiters // by tenant and key
	begun   chan struct{}             // somebody waits
}

type keyWaiters struct {
	count   int
	settled chan struct{} // closed when asking again may give another answer
}

func newKeyWatch() keyWatch {
	return keyWatch{mu: &sync.Mutex{}, waiting: map[[2]string]*keyWaiters{}, begun: make(chan struct{}, 1)}
}

// join returns a channel that is closed when the key may be asked for again. leave is called by who does
// not wait until then.
func (w *keyWatch) join(tenant, key string) (settled <-chan struct{}, leave func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	name := [2]string{tenant, key}
	waiters := w.waiting[name]
	if waiters == nil {
		waiters = &keyWaiters{settled: make(chan struct{})}
		w.waiting[name] = waiters
	}
	waiters.count++
	select {
	case w.begun <- struct{}{}:
	default:
	}
	return waiters.settled, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if waiters.count--; waiters.count == 0 && w.waiting[name] == waiters {
			delete(w.waiting, name)
		}
	}
}

// watch looks at the keys until ctx ends; while nobody waits it asks nothing.
func (w *keyWatch) watch(ctx context.Context, db *pgdb.DB, log *slog.Logger) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.begun:
		}
		for tenants, keys := w.names(); len(keys) > 0; tenants, keys = w.names() {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			settled, err := selectSettled(ctx, db, tenants, keys)
			if err != nil {
				// Who waits answers pending in the end, which is true.
				log.DebugContext(ctx, "create keys were not looked at", slog.Any("error", err))
				continue
			}
			w.wake(settled)
		}
	}
}

func (w *keyWatch) names() (tenants, keys []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for name := range w.waiting {
		tenants, keys = append(tenants, name[0]), append(keys, name[1])
	}
	return tenants, keys
}

func (w *keyWatch) wake(settled []settledKey) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, key := range settled {
		name := [2]string{key.TenantID, key.CreateKey}
		if waiters := w.waiting[name]; waiters != nil {
			close(waiters.settled)
			delete(w.waiting, name)
		}
	}
}

type settledKey struct {
	TenantID  string
	CreateKey string
}

// selectSettledSQL finds the keys that are not in flight any more: free, recorded, or to be taken over.
const selectSettledSQL = `
SELECT  asked.tenant_id, asked.create_key
FROM    unnest(@tenants::text[], @keys::text[]) AS asked (tenant_id, create_key)
WHERE   NOT EXISTS (
        SELECT 1
        FROM   placements AS p
        WHERE  p.tenant_id = asked.tenant_id AND p.create_key = asked.create_key AND p.outcome IN ('reserved', 'confirmed')
        AND    p.outcome = 'reserved'
        AND    (p.sandbox_ids = '{}' OR NOT EXISTS (
               SELECT 1
               FROM   reservations AS r
               WHERE  r.reservation_id = p.reservation_id AND r.sandbox_id IS NULL AND r.expires_at < clock_timestamp())))`

func selectSettled(ctx context.Context, db *pgdb.DB, tenants, keys []string) ([]settledKey, error) {
	rows, err := db.Query(ctx, selectSettledSQL, pgx.StrictNamedArgs{"tenants": tenants, "keys": keys})
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByName[settledKey])
}
