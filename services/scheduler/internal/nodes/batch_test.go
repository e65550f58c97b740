package nodes

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"

	"berth/pkg/pgdb"
	"berth/pkg/waittest"
	"berth/services/internal/node"
)

type sizes struct{}

func (sizes) Observe(float64) {}

// statements is a store that records what was sent together, and holds each statement until it is let
// go.
type statements struct {
	mu      sync.Mutex
	batches [][]node.ID
	flying  int
	gate    chan struct{}
	err     error
}

func (s *statements) renew(_ context.Context, beats []*prepared) (map[node.ID]*renewed, error) {
	s.mu.Lock()
	s.flying++
	if s.flying > 1 {
		panic("two statements are in flight")
	}
	var ids []node.ID
	answers := map[node.ID]*renewed{}
	for _, b := range beats {
		ids = append(ids, b.Node)
		answers[b.Node] = &renewed{NodeID: b.Node, Epoch: b.Seq}
	}
	s.batches = append(s.batches, ids)
	s.mu.Unlock()
	<-s.gate
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flying--
	return answers, s.err
}

func TestABatchIsWhatWaitsAndHasEachNodeOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &statements{gate: make(chan struct{})}
		b := newBatcher(3, s.renew, sizes{})
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- b.Run(ctx) }()

		var wg sync.WaitGroup
		send := func(ctx context.Context, id string, seq int64) {
			wg.Go(func() {
				got, err := b.submit(ctx, &prepared{Beat: Beat{Node: node.ID(id), Seq: seq}})
				if ctx.Err() == nil && (err != nil || got == nil || got.Epoch != seq) {
					t.Errorf("submit(%s, %d) = %+v, %v, want its own answer", id, seq, got, err)
				}
			})
			synctest.Wait()
		}
		send(t.Context(), "first", 1) // in flight, held by the gate
		leaving, leave := context.WithCancel(t.Context())
		send(leaving, "leaver", 2)
		leave()
		for i, id := range []string{"a", "a", "b", "a", "c", "d"} {
			send(t.Context(), id, int64(10+i))
		}
		for range 4 {
			s.gate <- struct{}{}
			synctest.Wait()
		}
		wg.Wait()
		want := "[[first] [a b c] [a d] [a]]"
		if got := fmt.Sprint(s.batches); got != want {
			t.Errorf("batches = %s, want %s", got, want)
		}
		stop()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
}

func TestAnErrorOfTheStatementIsEveryBeats(t *testing.T) {
	t.Parallel()
	away := errors.New("database is away")
	s := &statements{gate: make(chan struct{}, 10), err: away}
	s.gate <- struct{}{}
	b := newBatcher(3, s.renew, sizes{})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	if got, err := b.submit(t.Context(), &prepared{}); got != nil || !errors.Is(err, away) {
		t.Errorf("submit = %v, %v, want %v: a beat must not take the slow path because the fast one failed", got, err, away)
	}
	stop()
	waittest.Receive(t, "the end of the batcher", ended)
}

func TestABatcherThatStopsRefusesWhatWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &statements{gate: make(chan struct{})}
		b := newBatcher(1, s.renew, sizes{})
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- b.Run(ctx) }()
		submit := func(id node.ID) <-chan error {
			answered := make(chan error, 1)
			go func() {
				_, err := b.submit(t.Context(), &prepared{Beat: Beat{Node: id}})
				answered <- err
			}()
			synctest.Wait()
			return answered
		}
		flying, queued := submit("a"), submit("b")
		stop()
		close(s.gate)
		<-ended
		if err := <-flying; err != nil {
			t.Errorf("the beat in flight: %v, want its answer", err)
		}
		if err := <-queued; !pgdb.Unavailable(err) {
			t.Errorf("the beat that waited: %v, want it told to go elsewhere", err)
		}
		if _, err := b.submit(t.Context(), &prepared{}); !pgdb.Unavailable(err) {
			t.Errorf("a later beat: %v, want it told to go elsewhere", err)
		}
	})
}
