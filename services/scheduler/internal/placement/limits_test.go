package placement

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/node"
)

// TestEachLimitSeatsItsLastCreateAndNoneBeyondThroughTwoReplicas: whatever the nodes' reports show counts beside what is
// held, and both replicas are asked for twice as many as fit. The two limits of measured use are no sums, so creates do
// not bring them nearer; TestEveryReasonIsInTheRowWithValueAndLimit has those.
func TestEachLimitSeatsItsLastCreateAndNoneBeyondThroughTwoReplicas(t *testing.T) {
	t.Parallel()
	const nodes, fits = 2, 3 // of size(), on each
	tests := map[Reason]struct {
		limits Limits
		report string // columns of node_leases
		node   string // columns of nodes
	}{
		MaxSandboxCount:         {limits: Limits{SandboxCount: new(uint64(10))}, report: "sandbox_count = 4, sandbox_starting_count = 3, paused_sandbox_count = 9"},
		MaxSandboxStartingCount: {limits: Limits{SandboxStartingCount: new(uint64(5))}, report: "sandbox_count = 50, sandbox_starting_count = 2"},
		MaxSandboxCountIncludingPaused: {
			limits: Limits{SandboxCountIncludingPaused: new(uint64(10))}, report: "sandbox_count = 3, sandbox_starting_count = 2, paused_sandbox_count = 2",
		},
		MaxCPUAllocatedPercent:    {limits: Limits{CPUAllocatedPercent: new(uint64(100))}, report: "allocated_cpu = 5, paused_allocated_cpu = 9"},
		MaxMemoryAllocatedPercent: {limits: Limits{MemoryAllocatedPercent: new(uint64(50))}, report: "allocated_memory_bytes = 5::bigint << 30"},
		MaxAllocatedCPU:           {limits: Limits{AllocatedCPUIncludingPaused: new(uint64(8))}, report: "allocated_cpu = 3, paused_allocated_cpu = 2"},
		MaxAllocatedMemory: {
			limits: Limits{AllocatedBytesIncludingPaused: new(uint64(8 * gib))},
			report: "allocated_memory_bytes = 3::bigint << 30, paused_allocated_memory_bytes = 2::bigint << 30",
		},
		DeclaredSandboxes: {report: "sandbox_count = 1", node: "cap_sandboxes = 4"},
		DeclaredCPU:       {report: "allocated_cpu = 5", node: "cap_cpu_millis = 8999"},
		DeclaredMemory:    {report: "allocated_memory_bytes = 5::bigint << 30", node: "cap_memory_bytes = 8::bigint << 30"},
	}
	for reason, tt := range tests {
		t.Run(string(reason), func(t *testing.T) {
			t.Parallel()
			db := newDB(t, nodes, 0)
			statements := []string{"UPDATE node_leases SET " + tt.report}
			if tt.node != "" {
				statements = append(statements, "UPDATE nodes SET "+tt.node)
			}
			for _, sql := range statements {
				if _, err := db.Exec(t.Context(), sql); err != nil {
					t.Fatalf("%s: %v", sql, err)
				}
			}
			cfg := DefaultConfig()
			cfg.Limits = tt.limits
			placers := []*Placer{startPlacer(t, db, cfg), startPlacer(t, db, cfg)}
			var placed atomic.Int64
			var done sync.WaitGroup
			for caller := range 2 * nodes * fits {
				done.Go(func() {
					_, err := placers[caller%2].Schedule(t.Context(), request())
					if err == nil {
						placed.Add(1)
						return
					}
					told, ok := errors.AsType[*node.Refused](err)
					if !ok || !errors.Is(err, node.ErrNoRoom) {
						t.Errorf("Schedule = %v, want a placement or %v", err, node.ErrNoRoom)
					} else if diff := cmp.Diff(map[string]int{string(reason): nodes}, told.Reasons); diff != "" {
						t.Errorf("refused by (-want +got):\n%s", diff)
					}
				})
			}
			done.Wait()
			if diff := cmp.Diff(map[node.ID]int{"node-0": fits, "node-1": fits}, heldOn(t, db.DB)); diff != "" || placed.Load() != nodes*fits {
				t.Errorf("%d placed; holds (-want +got):\n%s", placed.Load(), diff)
			}
		})
	}
}
