package placement

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"berth/services/internal/node"
)

// TestAnEmptyNodeFillsToItsLimitsOfCPUAndMemory: a node without holds has room for as much as its limits say, whichever statement read it: the one that
// reads all nodes, or the one that reads the chosen ones again under their locks.
func TestAnEmptyNodeFillsToItsLimitsOfCPUAndMemory(t *testing.T) {
	t.Parallel()
	const fits = 3 // of size()
	tests := map[string]struct {
		limits  Limits
		declare string // columns of nodes
	}{
		"allocated CPU":       {limits: Limits{AllocatedCPUIncludingPaused: new(uint64(fits))}},
		"allocated memory":    {limits: Limits{AllocatedBytesIncludingPaused: new(uint64(fits * gib))}},
		"a share of CPU":      {limits: Limits{CPUAllocatedPercent: new(uint64(38))}},
		"a share of memory":   {limits: Limits{MemoryAllocatedPercent: new(uint64(19))}},
		"the declared CPU":    {declare: "cap_cpu_millis = 3000"},
		"the declared memory": {declare: "cap_memory_bytes = 3221225472"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t, 1, 0)
			if tt.declare != "" {
				if _, err := db.Exec(t.Context(), "UPDATE nodes SET "+tt.declare); err != nil {
					t.Fatal(err)
				}
			}
			cfg := DefaultConfig()
			cfg.Limits = tt.limits
			p := startPlacer(t, db, cfg)
			var placed []Placement
			for range fits {
				one, err := p.Schedule(t.Context(), request())
				if err != nil {
					t.Fatalf("after %d, Schedule = %v, want room", len(placed), err)
				}
				placed = append(placed, one)
			}
			if _, err := p.Schedule(t.Context(), request()); !errors.Is(err, node.ErrNoRoom) {
				t.Errorf("Schedule = %v beyond the limit, want %v", err, node.ErrNoRoom)
			}
			for _, one := range placed {
				if released, err := p.Release(t.Context(), one.ID, one.Reservation, Canceled); err != nil || !released {
					t.Fatalf("Release = %t, %v", released, err)
				}
			}
			if _, err := p.Schedule(t.Context(), request()); err != nil {
				t.Errorf("Schedule = %v on a node that is empty again, want room", err)
			}
		})
	}
}

func TestANodeWithoutHoldsIsReadAsOneEitherWay(t *testing.T) {
	t.Parallel()
	db := newDB(t, 2, 0)
	p := startPlacer(t, db, DefaultConfig())
	only := request()
	only.Constraints.Node = "node-1"
	if _, err := p.Schedule(t.Context(), only); err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	want := map[node.ID]Held{"node-0": {}, "node-1": {Sandboxes: 1, Open: 1, CPUMillis: 1000, MemoryBytes: gib}}
	for name, read := range map[string]struct {
		sql  string
		args []any
	}{
		"all":     {sql: selectAllNodesSQL},
		"by name": {selectNodesSQL, []any{pgx.StrictNamedArgs{"ids": []node.ID{"node-0", "node-1"}}}},
	} {
		rows, err := db.Query(t.Context(), read.sql, read.args...)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		nodes, err := scanNodes(rows)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		got := map[node.ID]Held{}
		for _, n := range nodes {
			got[n.ID] = n.Held
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
