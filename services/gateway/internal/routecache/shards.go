package routecache

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

const (
	shardCount = 64
	// evictionSample is how many entries are compared when room is needed: the least recently used
	// of some is nearly as good as that of all (Redis does the same), and costs no list.
	evictionSample = 16
)

// slot is one entry. The route never changes; the times are hints.
type slot struct {
	route     route.Route
	since     int64        // when it came
	confirmed atomic.Int64 // when a read that found this revision began; 0: never
	asked     atomic.Int64
	used      atomic.Int64
}

type shard struct {
	mu sync.RWMutex
	m  map[sandbox.ID]*slot
}

// shards is a map of slots in parts with a lock each. No lock is held during I/O.
type shards struct {
	seed         maphash.Seed
	perShard     int
	tombstoneFor time.Duration
	parts        [shardCount]shard
}

func (s *shards) init(maxEntries int, tombstoneFor time.Duration) {
	s.seed = maphash.MakeSeed()
	s.perShard = max(1, maxEntries/shardCount)
	s.tombstoneFor = tombstoneFor
	for i := range s.parts {
		s.parts[i].m = map[sandbox.ID]*slot{}
	}
}

func (s *shards) part(id sandbox.ID) *shard {
	return &s.parts[maphash.String(s.seed, string(id))%shardCount]
}

func (s *shards) get(id sandbox.ID) *slot {
	p := s.part(id)
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.m[id]
}

// put keeps r if it is newer than what is there. confirmed is when the read that found it began, 0
// where it was told by the feed; it is noted also where the revision is the one that is there.
func (s *shards) put(r route.Route, now, confirmed int64) {
	p := s.part(r.Sandbox)
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.m[r.Sandbox]
	// A tenant is filled in without a new revision where a roster told of the sandbox before its
	// create was recorded.
	filled := old != nil && r.Revision == old.route.Revision && old.route.Tenant == "" && r.Tenant != ""
	if old != nil && !r.Newer(old.route) && !filled {
		if confirmed > 0 && r.Revision == old.route.Revision {
			forward(&old.confirmed, confirmed)
		}
		return
	}
	fresh := &slot{route: r, since: now}
	fresh.confirmed.Store(confirmed)
	fresh.used.Store(now)
	if old != nil {
		fresh.used.Store(old.used.Load())
	} else if len(p.m) >= s.perShard {
		p.evict(now, int64(s.tombstoneFor))
	}
	p.m[r.Sandbox] = fresh
}

// evict removes one entry: a tombstone that has served its time, else the live one that was used
// longest ago, else any.
func (p *shard) evict(now, tombstoneFor int64) {
	var victim sandbox.ID
	best, seen := int64(0), 0
	for id, s := range p.m {
		age := now - s.used.Load()
		if !s.route.Live() {
			if now-s.since > tombstoneFor {
				delete(p.m, id)
				return
			}
			age = -1 // a late row could bring it back: it goes only if all others are such too
		}
		if seen == 0 || age > best {
			victim, best = id, age
		}
		if seen++; seen == evictionSample {
			break
		}
	}
	delete(p.m, victim)
}

// remove drops id if its entry is still s.
func (s *shards) remove(id sandbox.ID, old *slot) {
	p := s.part(id)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.m[id] == old {
		delete(p.m, id)
	}
}

// sweep drops tombstones that have served their time.
func (s *shards) sweep(now int64) {
	for i := range s.parts {
		p := &s.parts[i]
		p.mu.Lock()
		for id, e := range p.m {
			if !e.route.Live() && now-e.since > int64(s.tombstoneFor) {
				delete(p.m, id)
			}
		}
		p.mu.Unlock()
	}
}

func (s *shards) clear() {
	for i := range s.parts {
		p := &s.parts[i]
		p.mu.Lock()
		p.m = map[sandbox.ID]*slot{}
		p.mu.Unlock()
	}
}

func (s *shards) len() int {
	n := 0
	for i := range s.parts {
		p := &s.parts[i]
		p.mu.RLock()
		n += len(p.m)
		p.mu.RUnlock()
	}
	return n
}

func (s *shards) each(f func(route.Route) bool) {
	for i := range s.parts {
		p := &s.parts[i]
		p.mu.RLock()
		routes := make([]route.Route, 0, len(p.m))
		for _, e := range p.m {
			routes = append(routes, e.route)
		}
		p.mu.RUnlock()
		for _, r := range routes {
			if !f(r) {
				return
			}
		}
	}
}
