package bindings

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/placement"
)

// maxRaces bounds how often a transaction begins anew because a row appeared: each time somebody
// else's commit has won, so two are rare and this many do not happen.
const maxRaces = 5

// Record binds sandboxes to a node in one commit, with the confirmation of their reservation. Called
// again with the same assignment it changes nothing and gives the same answer. While RecordLoop runs,
// calls that wait at the same time share a transaction; no call fails or waits for another's sake.
//
// Errors: node.ErrNotListed when no present node has exactly this id and endpoint;
// node.ErrReservationOver when the named reservation has ended and the node has no room;
// sandbox.ErrChanged when a binding to another node has another revision than expected;
// sandbox.ErrInUse when a binding is another tenant's.
func (b *Bindings) Record(ctx context.Context, a Assignment) ([]Assigned, error) {
	assigned, err := b.records.ask(ctx, a)
	if errors.Is(err, errAlone) {
		assigned, err = b.recordAlone(ctx, a)
	}
	if err != nil {
		b.store.Failed("record", err)
		return nil, fmt.Errorf("record %d sandboxes on %s: %w", len(a.Sandboxes), a.Node, err)
	}
	return assigned, nil
}

// recordAlone records a in transactions of its own, which wait for whoever is in the way as long as the
// role's timeouts let them.
func (b *Bindings) recordAlone(ctx context.Context, a Assignment) ([]Assigned, error) {
	var room, repeated bool
	for races := 0; ; {
		r := &recording{a: a}
		err := b.db.Tx(ctx, func(tx pgx.Tx) error {
			*r = recording{a: a, room: room}
			err := b.store.Lock("sandbox", func() error { return pgdb.Lock(ctx, tx, a.locks(room)...) })
			if err != nil {
				return err
			}
			if err := recordAll(ctx, tx, b.cfg.Limits, []*recording{r}); err != nil {
				return err
			}
			return r.err
		})
		switch {
		case err == nil:
			if r.fed {
				b.bell.Ring()
			}
			return r.assigned, nil
		case errors.Is(err, placement.ErrAlone) && !room:
			room = true
		case raced(err) && races < maxRaces:
			races++
		case errors.Is(err, pgdb.ErrUnknown) && !repeated:
			repeated = true // it is its own key: what was committed is found, and answered
		default:
			return nil, err
		}
	}
}

// raced reports whether a row appeared between its reading and its writing.
func raced(err error) bool {
	return errors.Is(err, ErrRaced) || placement.HoldAppeared(err)
}

// locks are those of the sandboxes, and of the node where room is to be found on it. A sandbox without
// a row has nothing else that two records of it could wait at: one would get its hold and then need the
// row of the other, who has the row and needs the hold.
func (a Assignment) locks(room bool) []pgdb.Key {
	keys := make([]pgdb.Key, 0, len(a.Sandboxes)+1)
	if room {
		keys = append(keys, advisory.Node(a.Node))
	}
	for _, id := range a.Sandboxes {
		keys = append(keys, advisory.Sandbox(id))
	}
	return keys
}

// against returns the sandboxes that are bound to the node already, or why a cannot be recorded over
// held. Without a tenant the last writer wins, as in AgentENV.
func (a Assignment) against(held map[sandbox.ID]*Held) (here map[sandbox.ID]bool, err error) {
	here = make(map[sandbox.ID]bool, len(held))
	for _, id := range a.Sandboxes {
		row, found := held[id]
		switch {
		case !found || row.State == sandbox.Gone:
			continue // nobody uses the id
		case a.Tenant != "" && row.TenantID != "" && row.TenantID != a.Tenant:
			return nil, sandbox.ErrInUse
		case row.State != sandbox.Bound:
			continue
		case row.NodeID == a.Node:
			here[id] = true
		case a.ExpectedRevision != 0 && a.ExpectedRevision != row.Revision:
			return nil, sandbox.ErrChanged
		}
	}
	return here, nil
}

// bindings returns the rows to bind: all but those that are here. What placement knows goes before
// what the row says.
func (a Assignment) bindings(cluster string, held map[sandbox.ID]*Held, here map[sandbox.ID]bool, owner placement.Owner) []binding {
	var want []binding
	for _, id := range a.Sandboxes {
		if here[id] {
			continue
		}
		w := binding{
			Sandbox: id, Node: a.Node, Cluster: cluster, Incarnation: 1, Origin: sandbox.Recorded, Tenant: owner.Tenant,
			SpreadKey: owner.SpreadKey, Size: owner.Size, PlacementID: owner.PlacementID,
		}
		if row, found := held[id]; found {
			w.Locked, w.Incarnation = true, row.Incarnation
			// A sandbox that was gone and is recorded was started again, wherever that was.
			if row.NodeID != a.Node || row.State == sandbox.Gone {
				w.Incarnation++
			}
			if row.State != sandbox.Gone {
				w.inherit(row)
			}
		}
		want = append(want, w)
	}
	return want
}

// inherit keeps what only the row knows.
func (w *binding) inherit(row *Held) {
	if w.Tenant == "" {
		w.Tenant = row.TenantID
	}
	if w.SpreadKey == "" {
		w.SpreadKey = row.SpreadKey
	}
	if w.Size == (sandbox.Size{}) {
		w.Size = sandbox.Size{CPUMillis: row.CPUMillis, MemoryBytes: row.MemoryBytes}
	}
	if w.PlacementID == 0 && row.PlacementID != nil {
		w.PlacementID = *row.PlacementID
	}
}

// answer has the bindings in the order in which they were asked for, and whether one of them changed.
func (a Assignment) answer(held map[sandbox.ID]*Held, bound map[sandbox.ID]Assigned) (assigned []Assigned, changed bool) {
	assigned = make([]Assigned, len(a.Sandboxes))
	for i, id := range a.Sandboxes {
		if now, found := bound[id]; found {
			assigned[i], changed = now, true
			continue
		}
		assigned[i] = Assigned{Sandbox: id, Revision: held[id].Revision, Incarnation: held[id].Incarnation}
	}
	return assigned, changed
}
