package heartbeat

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/sandbox"
	"berth/services/nodeagent/internal/sandboxes"
)

// scripted answers heartbeats as told, and notes when they came.
type scripted struct {
	begun time.Time
	came  []time.Duration
	err   func(n int) error
	next  uint32
}

func (s *scripted) Heartbeat(ctx context.Context, _ *schedulerv1.HeartbeatRequest) (*schedulerv1.HeartbeatResponse, error) {
	s.came = append(s.came, time.Since(s.begun))
	if err := s.err(len(s.came)); err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			<-ctx.Done()
		}
		return nil, err
	}
	return &schedulerv1.HeartbeatResponse{LeaseTtlMs: 30_000, NextHeartbeatMs: s.next}, nil
}

func (s *scripted) UnregisterNode(context.Context, *schedulerv1.UnregisterNodeRequest) (*schedulerv1.UnregisterNodeResponse, error) {
	return nil, nil
}

type nobodyLives struct{}

func (nobodyLives) List() []sandboxes.View                   { return nil }
func (nobodyLives) Usage() sandboxes.Usage                   { return sandboxes.Usage{} }
func (nobodyLives) Delete(context.Context, sandbox.ID) error { return nil }

func beatFor(t *testing.T, s *scripted, d time.Duration) *Reporter {
	t.Helper()
	r := New(Deps{
		Scheduler: s, Living: nobodyLives{}, Machine: NewMachine(t.TempDir()), Log: slog.New(slog.DiscardHandler),
		Metrics: NewMetrics(prometheus.NewRegistry(), nobodyLives{}.Usage),
	})
	s.begun = time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	if err := r.Run(ctx); err != nil {
		t.Fatalf("Run: %v", err)
	}
	return r
}

func TestHeartbeatsComeInTheirPeriod(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &scripted{err: func(int) error { return nil }, next: 5000}
		r := beatFor(t, s, time.Minute)
		if s.came[0] != firstAfter {
			t.Errorf("the first heartbeat came after %v, want %v", s.came[0], firstAfter)
		}
		for i := 1; i < len(s.came); i++ {
			if gap := s.came[i] - s.came[i-1]; gap < 4500*time.Millisecond || gap > 5*time.Second {
				t.Errorf("heartbeat %d came %v after the one before", i, gap)
			}
		}
		if err := r.Ready(t.Context()); err != nil {
			t.Errorf("Ready = %v", err)
		}
		time.Sleep(31 * time.Second) //nolint:forbidigo // in a bubble it passes at once
		if err := r.Ready(t.Context()); err == nil {
			t.Error("Ready after the lease has ended")
		}
	})
}

func TestFailedHeartbeatsComeLessAndLessOften(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &scripted{err: func(int) error { return errors.New("no") }}
		r := beatFor(t, s, 5*time.Minute)
		want := []time.Duration{5 * time.Second, 10 * time.Second, 20 * time.Second, 40 * time.Second, time.Minute, time.Minute}
		for i, gap := range want {
			if got := s.came[i+1] - s.came[i]; got != gap {
				t.Errorf("try %d came %v after the one before, want %v", i+1, got, gap)
			}
		}
		if err := r.Ready(t.Context()); err == nil {
			t.Error("Ready without any accepted heartbeat")
		}
	})
}

func TestASilentSchedulerIsGivenUpAfterTheDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &scripted{err: func(n int) error {
			if n == 1 {
				return context.DeadlineExceeded
			}
			return nil
		}}
		beatFor(t, s, time.Minute)
		if got := s.came[1] - s.came[0]; got != callLimit+firstBackoff {
			t.Errorf("the second heartbeat came after %v, want %v", got, callLimit+firstBackoff)
		}
	})
}

func TestPeriodIsWithinReason(t *testing.T) {
	t.Parallel()
	for ms, most := range map[uint32]time.Duration{0: defaultEvery, 1: leastEvery, 2000: 2 * time.Second, 1 << 31: mostEvery} {
		if got := period(ms); got > most || got < most-most/10 {
			t.Errorf("period(%d) = %v, want up to a tenth below %v", ms, got, most)
		}
	}
}
