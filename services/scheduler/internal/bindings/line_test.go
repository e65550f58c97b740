package bindings

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/pkg/waittest"
)

// lineOf has callers that wait, named by their keys.
func lineOf(t *testing.T, most int, waiting ...string) *line[string, int] {
	t.Helper()
	l := newLine[string, int](most, func(q string) []string {
		keys := make([]string, len(q))
		for i, key := range q {
			keys[i] = string(key)
		}
		return keys
	})
	for _, q := range waiting {
		l.waiting = append(l.waiting, &caller[string, int]{ctx: t.Context(), asked: q, done: make(chan answer[int], 1)})
	}
	return l
}

func asked(batch []*caller[string, int]) []string {
	var all []string
	for _, c := range batch {
		all = append(all, c.asked)
	}
	return all
}

func TestABatchIsTheOldestWhoShareNoKey(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		most    int
		waiting []string
		want    [][]string
	}{
		"nobody":                                {4, nil, nil},
		"all who wait":                          {4, []string{"a", "b", "c"}, [][]string{{"a", "b", "c"}}},
		"no more than one batch takes":          {2, []string{"a", "b", "c"}, [][]string{{"a", "b"}, {"c"}}},
		"the second of two with one key waits":  {4, []string{"a", "a", "b"}, [][]string{{"a", "b"}, {"a"}}},
		"one key of several is enough":          {4, []string{"ab", "bc", "d"}, [][]string{{"ab", "d"}, {"bc"}}},
		"a key of one's own is in nobody's way": {4, []string{"aa", "b"}, [][]string{{"aa", "b"}}},
		"nobody overtakes one with his key":     {4, []string{"ab", "bc", "c"}, [][]string{{"ab"}, {"bc"}, {"c"}}},
	} {
		l := lineOf(t, tt.most, tt.waiting...)
		var got [][]string
		for batch := l.take(); len(batch) > 0; batch = l.take() {
			got = append(got, asked(batch))
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: batches of %v (-want +got):\n%s", name, tt.waiting, diff)
		}
	}
}

func TestWhoHasLeftIsInNoBatch(t *testing.T) {
	t.Parallel()
	l := lineOf(t, 4, "a", "a", "b")
	gone, leave := context.WithCancel(t.Context())
	leave()
	l.waiting[0].ctx = gone
	if diff := cmp.Diff([]string{"a", "b"}, asked(l.take())); diff != "" {
		t.Errorf("the batch (-want +got):\n%s", diff)
	}
}

func TestALineWithoutServersSendsItsCallersAway(t *testing.T) {
	t.Parallel()
	l := lineOf(t, 4)
	if _, err := l.ask(t.Context(), "a"); !errors.Is(err, errAlone) {
		t.Fatalf("ask before anybody serves = %v, want %v", err, errAlone)
	}
	ctx, stop := context.WithCancel(t.Context())
	begun := make(chan struct{})
	var servers, callers sync.WaitGroup
	servers.Go(func() {
		_ = l.serve(ctx, func(_ context.Context, batch []*caller[string, int]) { // nil: it is a clean stop
			close(begun)
			<-ctx.Done()
			for _, c := range batch {
				c.answer(1, nil)
			}
		})
	})
	l.await(t, func() bool { return l.servers == 1 })
	callers.Go(func() {
		if got, err := l.ask(t.Context(), "served"); got != 1 || err != nil {
			t.Errorf("who was taken hears %d, %v, want its answer", got, err)
		}
	})
	waittest.Receive(t, "the batch to begin", begun)
	callers.Go(func() {
		if _, err := l.ask(t.Context(), "late"); !errors.Is(err, errAlone) {
			t.Errorf("who waits at the end hears %v, want %v", err, errAlone)
		}
	})
	l.await(t, func() bool { return len(l.waiting) == 1 })
	stop()
	servers.Wait()
	callers.Wait()
}

// await returns once is holds.
func (l *line[Q, A]) await(t *testing.T, is func() bool) {
	t.Helper()
	for {
		l.mu.Lock()
		so := is()
		l.mu.Unlock()
		if so {
			return
		}
		if t.Context().Err() != nil {
			t.Fatal("the line does not come to what is awaited")
		}
	}
}

// together lets callers ask at once and serves them when all of them wait, so that they are in one batch.
func (l *line[Q, A]) together(t *testing.T, serve func(ctx context.Context) error, calls ...func()) {
	t.Helper()
	l.mu.Lock()
	l.servers++ // they wait
	l.mu.Unlock()
	var callers, server sync.WaitGroup
	for _, call := range calls {
		callers.Go(call)
	}
	l.await(t, func() bool { return len(l.waiting) == len(calls) })
	ctx, stop := context.WithCancel(t.Context())
	server.Go(func() {
		if err := serve(ctx); err != nil {
			t.Errorf("the server ends with %v", err)
		}
	})
	callers.Wait()
	stop()
	server.Wait()
	l.leave()
}
