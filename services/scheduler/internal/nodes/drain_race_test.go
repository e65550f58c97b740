package nodes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/placement"
)

// placer returns the placing part of another scheduler over the same database.
func (c *cell) placer() *placement.Placer {
	c.t.Helper()
	p := placement.New(c.As(c.t, "berth_scheduler"), placement.DefaultConfig(), slog.New(slog.DiscardHandler), nil)
	ctx, stop := context.WithCancel(context.WithoutCancel(c.t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	c.t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			c.t.Errorf("Placer.Run = %v, want nil", err)
		}
	})
	return p
}

// placedOn returns the reservations there ever were on a node.
func (c *cell) placedOn(id node.ID) map[string]bool {
	c.t.Helper()
	rows, err := c.Query(c.t.Context(), `SELECT reservation_id::text FROM placements WHERE node_id = $1`, id)
	if err != nil {
		c.t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		c.t.Fatal(err)
	}
	placed := map[string]bool{}
	for _, r := range list {
		placed[r] = true
	}
	return placed
}

// Three schedulers place without pause while a fourth closes a node. What was placed there when the answer
// came is all there ever is, with no pause between and with no clock asked.
func TestNothingIsPlacedOnceTheOrderToCloseIsAnswered(t *testing.T) {
	t.Parallel()
	for name, closing := range map[string]func(ctx context.Context, r *replica) error{
		"cordon":     func(ctx context.Context, r *replica) error { return r.Cordon(ctx, "n0", "") },
		"unregister": func(ctx context.Context, r *replica) error { return r.Unregister(ctx, "n0", "i1") },
		"drain": func(ctx context.Context, r *replica) error {
			_, err := r.StartDrain(ctx, DrainOrder{Node: "n0", Mode: Wait, RequestedBy: "o"})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			r := c.replica()
			for i := range 3 {
				r.must(t, beatOf(fmt.Sprintf("n%d", i), "i1", fmt.Sprintf("http://127.0.0.1:%d", 8001+i)))
			}
			const callers, atLeast = 4, 40 // of each placer; placed before the order, and after it
			var (
				placed, refused atomic.Int64
				goOn            = make(chan struct{})
				group           sync.WaitGroup
			)
			for range 3 {
				p := c.placer()
				for range callers {
					group.Go(func() {
						for {
							select {
							case <-goOn:
								return
							default:
							}
							_, err := p.Schedule(t.Context(), placement.Request{
								Tenant: "t", Size: sandbox.Size{CPUMillis: 1, MemoryBytes: 1}, Count: 1, Named: true, TTL: time.Hour,
							})
							switch {
							case err == nil:
								placed.Add(1)
							case errors.Is(err, node.ErrContended) || errors.Is(err, node.ErrNoneReady) || errors.Is(err, node.ErrNoRoom):
								refused.Add(1)
							default:
								t.Errorf("Schedule = %v", err)
								return
							}
						}
					})
				}
			}
			until(t, func() bool { return placed.Load() >= atLeast && len(c.placedOn("n0")) > 0 })
			if err := closing(t.Context(), r); err != nil {
				t.Errorf("the order = %v", err)
			}
			before, goal := c.placedOn("n0"), placed.Load()+atLeast
			until(t, func() bool { return placed.Load() >= goal })
			close(goOn)
			group.Wait()
			if diff := cmp.Diff(before, c.placedOn("n0")); diff != "" {
				t.Errorf("placed on the node after the answer (-before +after):\n%s", diff)
			}
			if refused.Load() > 0 {
				t.Errorf("%d creates were refused, though two nodes had room", refused.Load())
			}
		})
	}
}

// Creates that were under way when the drain began land or end; once it says draining, nothing lands.
func TestNothingLandsOnceADrainSaysDraining(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	replicas := []*replica{c.replica(), c.replica()}
	for i := range 2 {
		replicas[0].must(t, beatOf(fmt.Sprintf("n%d", i), "i1", fmt.Sprintf("http://127.0.0.1:%d", 8001+i)))
	}
	var (
		landed atomic.Int64
		goOn   = make(chan struct{})
		group  sync.WaitGroup
	)
	for i := range 6 {
		p, routes := c.placer(), replicas[i%2].routes
		group.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-goOn:
					return
				default:
				}
				got, err := p.Schedule(t.Context(), placement.Request{
					Tenant: "t", Size: sandbox.Size{CPUMillis: 1, MemoryBytes: 1}, Count: 1, Named: true, TTL: time.Hour,
				})
				if err != nil {
					t.Errorf("Schedule = %v", err)
					return
				}
				if n%3 == 2 { // this create fails on its node
					if _, err := p.Release(t.Context(), got.ID, got.Reservation, placement.NodeError); err != nil {
						t.Errorf("Release = %v", err)
					}
					continue
				}
				_, err = routes.Record(t.Context(), assignmentOf(got, sandbox.ID(fmt.Sprintf("s-%d-%d", i, n))))
				if err != nil {
					t.Errorf("Record on %s = %v", got.Node, err)
				}
				landed.Add(1)
			}
		})
	}
	until(t, func() bool { return landed.Load() >= 30 && len(c.placedOn("n0")) > 0 })
	d := replicas[0].start(t, DrainOrder{Node: "n0"})
	// Each pass is another replica's; both may try at once.
	var state DrainState
	until(t, func() bool {
		for _, r := range replicas {
			if err := r.advanceDrains(t.Context()); err != nil {
				t.Errorf("a pass = %v", err)
			}
		}
		now, err := replicas[0].Drain(t.Context(), d.ID, "")
		if err != nil {
			t.Fatal(err)
		}
		state = now.State
		return state == Draining
	})
	bound := func() int64 {
		return value[int64](c, `SELECT count(*) FROM bindings WHERE node_id = 'n0'`)
	}
	before, goal := bound(), landed.Load()+30
	until(t, func() bool { return landed.Load() >= goal })
	close(goOn)
	group.Wait()
	if after := bound(); after != before {
		t.Errorf("%d sandboxes on the node when it was %s, %d later", before, state, after)
	}
	if before == 0 {
		t.Error("nothing was on the node: the test shows nothing")
	}
}

func assignmentOf(p placement.Placement, id sandbox.ID) bindings.Assignment {
	return bindings.Assignment{
		Sandboxes: []sandbox.ID{id}, Node: p.Node, Endpoint: p.Endpoint, ReservationID: p.Reservation, PlacementID: p.ID, Tenant: "t",
	}
}

// until waits for a condition that others bring about.
func until(t *testing.T, is func() bool) {
	t.Helper()
	limit := time.After(2 * time.Minute)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("it did not come about within two minutes")
		}
	}
}

// Records and heartbeats race with the end of a drain that parks. Who commits first is in what is parked; who
// comes later finds no room, and the node's roster brings nothing back.
func TestNothingComesBehindADrainThatParked(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	replicas := []*replica{c.replica(), c.replica()}
	replicas[0].must(t, beatOf("a", "i1", endpointA))
	c.watch()
	const creates, there = 40, 5 // there are recorded before, and the node lists them all the time
	var held []placement.Placement
	p := c.placer()
	for range creates {
		got, err := p.Schedule(t.Context(), placement.Request{
			Tenant: "t", Size: sandbox.Size{CPUMillis: 1, MemoryBytes: 1}, Count: 1, Named: true, TTL: time.Hour,
		})
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, got)
	}
	d := replicas[0].start(t, DrainOrder{Node: "a", Mode: Park, Deadline: time.Hour})

	var (
		landed, late atomic.Int64
		group        sync.WaitGroup
		half         = make(chan struct{})
		once         sync.Once
		ids          []string
	)
	for i := range held {
		ids = append(ids, fmt.Sprintf("s-%02d", i))
	}
	for i := range there {
		if _, err := replicas[0].routes.Record(t.Context(), assignmentOf(held[i], sandbox.ID(ids[i]))); err != nil {
			t.Fatal(err)
		}
		landed.Add(1)
	}
	for worker := range 4 {
		group.Go(func() {
			for i := there + worker; i < creates; i += 4 {
				_, err := replicas[worker%2].routes.Record(t.Context(), assignmentOf(held[i], sandbox.ID(ids[i])))
				switch {
				case err == nil:
					if landed.Add(1) == creates/4 {
						once.Do(func() { close(half) })
					}
				case errors.Is(err, node.ErrReservationOver):
					late.Add(1)
				default:
					t.Errorf("Record = %v", err)
				}
			}
		})
	}
	<-half
	c.exec(`UPDATE drains SET deadline_at = clock_timestamp()`)
	until(t, func() bool {
		replicas[1].must(t, beatOf("a", "i1", endpointA, ids[:there]...))
		if err := replicas[0].advanceDrains(t.Context()); err != nil {
			t.Errorf("a pass = %v", err)
		}
		now, err := replicas[0].Drain(t.Context(), d.ID, "")
		if err != nil {
			t.Fatal(err)
		}
		return now.State == Done
	})
	group.Wait()
	c.exec(`UPDATE node_leases SET reconcile_due = '-infinity'`)
	replicas[1].must(t, beatOf("a", "i1", endpointA, ids[:there]...))
	if landed.Load()+late.Load() != creates {
		t.Errorf("%d landed and %d came late, of %d", landed.Load(), late.Load(), creates)
	}
	states := map[string]int{}
	for _, b := range c.bindings() {
		states[string(b.State)+" "+b.EndedBy]++
	}
	if diff := cmp.Diff(map[string]int{"parked drain": int(landed.Load())}, states); diff != "" {
		t.Errorf("bindings (-want +got):\n%s", diff)
	}
	if holds := value[int64](c, `SELECT count(*) FROM reservations`); holds != 0 {
		t.Errorf("%d holds are left, want none", holds)
	}
	c.checkFeed()
}
