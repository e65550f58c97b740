package measure

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"berth/pkg/pgdb"
)

func TestSubjectsOfAProcessShareTheirMeasures(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	a, b := NewStore(reg), NewStore(reg)
	if err := a.Lock("node", func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	if err := b.Lock("node", func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	if err := b.Pass("expire", func(context.Context) error { return nil })(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.Failed("renew", pgdb.ErrPoolWait)
	b.Failed("renew", pgdb.ErrPoolWait)
	if got := testutil.ToFloat64(a.errors.WithLabelValues("renew")); got != 2 {
		t.Errorf("two failures in two subjects count as %v", got)
	}
	for name, want := range map[string]int{
		"berth_scheduler_lock_wait_seconds": 1, "berth_scheduler_loop_seconds": 1, "berth_scheduler_store_errors_total": 1,
	} {
		if got, err := testutil.GatherAndCount(reg, name); err != nil || got != want {
			t.Errorf("%s has %d series (%v), want %d", name, got, err, want)
		}
	}
}

func TestOnlyTheStoresFailuresAreCounted(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		err  error
		want float64
	}{
		"none":                     {nil, 0},
		"a refusal":                {errors.New("node_id is in use by another instance"), 0},
		"a caller who left":        {fmt.Errorf("renew: %w", context.Canceled), 0},
		"no connection":            {fmt.Errorf("renew: %w", pgdb.ErrPoolWait), 1},
		"an answer of PostgreSQL":  {fmt.Errorf("renew: %w", &pgconn.PgError{Code: "40P01"}), 1},
		"a commit nobody knows of": {fmt.Errorf("renew: %w", pgdb.ErrUnknown), 1},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := NewStore(prometheus.NewRegistry())
			err := s.Pass("loop", func(context.Context) error { return tt.err })(t.Context())
			if !errors.Is(err, tt.err) {
				t.Errorf("Pass = %v, want its pass's %v", err, tt.err)
			}
			if got := testutil.ToFloat64(s.errors.WithLabelValues("loop")); got != tt.want {
				t.Errorf("%v counts %v, want %v", tt.err, got, tt.want)
			}
		})
	}
}
