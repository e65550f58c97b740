package nodes

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"berth/services/internal/node"
	"berth/services/scheduler/internal/bindings"
)

const (
	seldomEvery = time.Minute
	maxSeldom   = 10_000
)

// seldom tells what is said of a node once a minute, for nodes repeat themselves every few seconds.
type seldom struct {
	mu   sync.Mutex
	last map[node.ID]time.Time
}

func newSeldom() *seldom { return &seldom{last: map[node.ID]time.Time{}} }

// first reports whether nothing was said of id for a minute.
func (s *seldom) first(id node.ID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if last, known := s.last[id]; known && time.Since(last) < seldomEvery {
		return false
	}
	if len(s.last) >= maxSeldom {
		clear(s.last)
	}
	s.last[id] = time.Now()
	return true
}

// conflict counts a beat of a second claimant of a node's id, and says so once a minute: in this replica's
// log, and in the log of events, where the other replicas' heartbeats are looked at too.
func (n *Nodes) conflict(ctx context.Context, p *prepared) {
	n.metrics.conflicts.Inc()
	if !n.conflicts.first(p.Node) {
		return
	}
	n.log.WarnContext(ctx, "two instances have one node id", slog.Any("node", p.Node), slog.String("instance", p.Instance))
	err := n.routes.NoteSeldom(ctx, bindings.Event{
		Kind: bindings.KindConflict, Cluster: p.Cluster, Node: p.Node, Instance: p.Instance,
		Detail: map[string]any{"place": p.place},
	}, seldomEvery)
	if err != nil {
		n.log.WarnContext(ctx, "a conflict is not in the log of events", slog.Any("node", p.Node), slog.Any("error", err))
	}
}
