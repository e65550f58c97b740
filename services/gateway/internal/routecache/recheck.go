package routecache

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// suspects remembers when a node was last looked at again because it could not be dialled.
type suspects struct {
	mu    sync.Mutex
	asked map[node.ID]int64
}

// due tells whether a node may be looked at again, and notes that it is.
func (s *suspects) due(id node.ID, now, every int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, ok := s.asked[id]; ok && now-at < every {
		return false
	}
	s.asked[id] = now
	return true
}

// Suspect is called when a dial by f has failed. It reads the binding and the node once more, at
// most once a second a node, and returns the route as it is now; lost tells that the node's lease
// has ended. When nothing can be read, f stands: a failure never ends a route. Errors:
// sandbox.ErrNotFound, ctx's.
func (c *Cache) Suspect(ctx context.Context, f Found) (now Found, lost bool, err error) {
	if c.suspects.due(f.Route.Node, c.now(), int64(time.Second)) {
		generation := c.generation.Load()
		n, held, err := c.readNode(ctx, f.Route.Node)
		if err == nil {
			c.storeNode(generation, n)
			lost = !held
		}
		if err := c.load(ctx, f.Sandbox, true); err != nil {
			return f, lost, ctx.Err()
		}
	} else if _, held, err := c.readNode(ctx, f.Route.Node); err == nil {
		lost = !held
	}
	s := c.shards.get(f.Sandbox)
	if s == nil {
		return Found{}, lost, sandbox.ErrNotFound
	}
	now, err = c.found(ctx, s, f.Stale)
	return now, lost, err
}

// Recheck returns the route of id once it is known at revision atLeast or above, reading its row
// until it is or the time of a look-up is over. Errors as Lookup's; ErrUnavailable where the row
// does not get there.
func (c *Cache) Recheck(ctx context.Context, id sandbox.ID, atLeast sandbox.Revision) (Found, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.cfg.LookupTimeout, ErrUnavailable)
	defer cancel()
	for {
		if s := c.shards.get(id); s != nil && s.route.Revision >= atLeast {
			return c.found(ctx, s, false)
		}
		if err := c.load(ctx, id, true); err != nil {
			return Found{}, recheckError(ctx, err)
		}
		s := c.shards.get(id)
		if s == nil {
			return Found{}, sandbox.ErrNotFound
		}
		if s.route.Revision >= atLeast {
			return c.found(ctx, s, false)
		}
		pause := time.NewTimer(20*time.Millisecond + rand.N(20*time.Millisecond))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return Found{}, recheckError(ctx, ctx.Err())
		}
	}
}

func recheckError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
