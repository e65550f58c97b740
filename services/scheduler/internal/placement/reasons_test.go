package placement

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"berth/services/internal/node"
)

// TestEveryReasonIsInTheRowWithValueAndLimit has a node for each rule, and one create that all of them
// refuse. Rules that would refuse every node have a create of their own.
func TestEveryReasonIsInTheRowWithValueAndLimit(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	nodes := map[Reason]struct {
		change       string // of the rows of a node that would take it
		value, limit float64
	}{
		Absent:                  {change: `UPDATE nodes SET present = false, gone_at = now() WHERE node_id = $1`},
		Unregistered:            {change: `UPDATE node_leases SET ended_at = now() WHERE node_id = $1`},
		Unhealthy:               {change: `UPDATE node_leases SET expires_at = now() - interval '1 second' WHERE node_id = $1`},
		Connecting:              {change: `DELETE FROM node_leases WHERE node_id = $1`},
		Lingering:               {change: `UPDATE nodes SET lingering = true WHERE node_id = $1`},
		Cordoned:                {change: `UPDATE nodes SET cordoned = true WHERE node_id = $1`},
		Draining:                {change: `UPDATE nodes SET drain_id = 1 WHERE node_id = $1`},
		Excluded:                {change: `SELECT $1::text`},
		OtherCluster:            {change: `UPDATE nodes SET cluster_id = 'other' WHERE node_id = $1`},
		OtherLabel:              {change: `UPDATE nodes SET labels = '{"zone": "b"}' WHERE node_id = $1`},
		CPUArchitecture:         {change: `UPDATE nodes SET machine_info = '{"cpu_architecture": "arm64"}' WHERE node_id = $1`},
		NoArtifact:              {change: `DELETE FROM p2p_holders WHERE node_id = $1`},
		TooManyOfSpread:         {change: `INSERT INTO bindings (sandbox_id, state, node_id, origin, spread_key) SELECT 'b-' || i, 'bound', $1, 'recorded', 'app' FROM generate_series(1, 2) AS i`, value: 3, limit: 2},
		MaxSandboxCount:         {change: `UPDATE node_leases SET sandbox_count = 50 WHERE node_id = $1`, value: 51, limit: 50},
		MaxSandboxStartingCount: {change: `UPDATE node_leases SET sandbox_starting_count = 4 WHERE node_id = $1`, value: 5, limit: 4},
		MaxCPUUsedPercent:       {change: `UPDATE node_leases SET cpu_percent = 96 WHERE node_id = $1`, value: 96, limit: 95},
		MaxMemoryUsedPercent:    {change: `UPDATE node_leases SET memory_used_bytes = memory_total_bytes WHERE node_id = $1`, value: 100, limit: 95},
		DeclaredSandboxes:       {change: `UPDATE nodes SET cap_sandboxes = 7 WHERE node_id = $1`, value: 8, limit: 7},
		DeclaredCPU:             {change: `UPDATE nodes SET cap_cpu_millis = 999 WHERE node_id = $1`, value: 1000, limit: 999},
		DeclaredMemory:          {change: `UPDATE nodes SET cap_memory_bytes = 1073741823 WHERE node_id = $1`, value: float64(gib), limit: float64(gib - 1)},
	}
	if _, err := db.Exec(t.Context(), `INSERT INTO p2p_artifacts (cluster_id, backend, key) VALUES ('c', 'b', 'k')`); err != nil {
		t.Fatal(err)
	}
	id := func(r Reason) string { return strings.ReplaceAll(string(r), "_", "-") }
	byID := map[node.ID]Reason{}
	for reason, n := range nodes {
		name := id(reason)
		byID[node.ID(name)] = reason
		addNode(t, db.DB, testNode{id: name, cluster: "c", running: 7})
		for _, sql := range []string{
			`UPDATE nodes SET labels = '{"zone": "a"}', machine_info = '{"cpu_architecture": "x86_64"}' WHERE node_id = $1`,
			`INSERT INTO p2p_holders (artifact_id, node_id) SELECT artifact_id, $1 FROM p2p_artifacts`,
			n.change,
		} {
			if _, err := db.Exec(t.Context(), sql, name); err != nil {
				t.Fatalf("%s: %s: %v", reason, sql, err)
			}
		}
	}
	if len(byID) != len(nodes) {
		t.Fatalf("%d names for %d reasons", len(byID), len(nodes))
	}
	cfg := DefaultConfig()
	limit := func(n uint64) *uint64 { return &n }
	cfg.Limits = Limits{
		SandboxCount: limit(50), SandboxStartingCount: limit(4), CPUUsedPercent: limit(95), MemoryUsedPercent: limit(95),
	}
	p := startPlacer(t, db, cfg)
	r := keyed("r")
	r.Cluster, r.Exclude = "c", []node.ID{node.ID(id(Excluded))}
	r.Constraints = Constraints{
		Labels: map[string]string{"zone": "a"}, CPUArchitecture: "x86_64", Artifact: Artifact{"b", "k"}, ArtifactRequired: true,
		SpreadKey: "app", MaxPerNode: 2,
	}
	_, err := p.Schedule(t.Context(), r)
	told, ok := errors.AsType[*node.Refused](err)
	if !ok || !errors.Is(err, node.ErrNoRoom) {
		t.Fatalf("Schedule = %v, want %v", err, node.ErrNoRoom)
	}
	counted := map[string]int{}
	want := make([]Candidate, 0, len(nodes))
	for name, reason := range byID {
		counted[string(reason)] = 1
		want = append(want, Candidate{Node: name, Verdict: VerdictRefused, Reason: reason, Value: nodes[reason].value, Limit: nodes[reason].limit})
	}
	if diff := cmp.Diff(counted, told.Reasons); diff != "" {
		t.Errorf("the caller is told (-want +got):\n%s", diff)
	}
	got, err := p.Explain(t.Context(), Question{PlacementID: told.Placement})
	if err != nil {
		t.Fatalf("Explain = %v", err)
	}
	byNode := cmpopts.SortSlices(func(a, b Candidate) bool { return a.Node < b.Node })
	if diff := cmp.Diff(want, got.Candidates, byNode); diff != "" {
		t.Errorf("the row says (-want +got):\n%s", diff)
	}

	for name, tt := range map[string]struct {
		change func(*Request)
		want   Reason
	}{
		"pinned":         {func(r *Request) { r.Constraints = Constraints{Node: "nowhere"} }, Pinned},
		"runtime":        {func(r *Request) { r.Constraints, r.Managed = Constraints{}, true }, NoRuntime},
		"no such digest": {func(r *Request) { r.Constraints = Constraints{CPUTemplate: []byte{1}} }, CPUTemplate},
	} {
		alone := keyed(name)
		tt.change(&alone)
		_, err := p.Schedule(t.Context(), alone)
		told, ok := errors.AsType[*node.Refused](err)
		if !ok || !errors.Is(err, node.ErrConstraints) || told.Reasons[string(tt.want)] == 0 || told.RetryAfter != 0 {
			t.Errorf("%s: Schedule = %v (%+v), want %v for %s and no hint", name, err, told, node.ErrConstraints, tt.want)
		}
	}
}

func TestARefusalByQuotaSaysWhatThereWas(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 99)
	if _, err := db.Exec(t.Context(), "INSERT INTO tenant_quotas (tenant_id, max_sandboxes, max_cpu_millis, max_memory_bytes) VALUES ('t', 2, 2500, $1)", 3*gib); err != nil {
		t.Fatal(err)
	}
	p := startPlacer(t, db, DefaultConfig())
	first := request()
	first.Tenant = "t"
	mustSchedule(t, p, first)
	for name, tt := range map[string]struct {
		change       func(*Request)
		resource     string
		limit, used  int64
		wantsByValue float64
	}{
		"sandboxes":    {func(r *Request) { r.Count = 2 }, "sandboxes", 2, 1, 3},
		"cpu_millis":   {func(r *Request) { r.Size.CPUMillis = 1501 }, "cpu_millis", 2500, 1000, 2501},
		"memory_bytes": {func(r *Request) { r.Size.MemoryBytes = 2*gib + 1 }, "memory_bytes", 3 * gib, gib, float64(3*gib + 1)},
	} {
		r := keyed(name)
		r.Tenant = "t"
		tt.change(&r)
		_, err := p.Schedule(t.Context(), r)
		told, ok := errors.AsType[*node.Refused](err)
		if !ok || !errors.Is(err, node.ErrQuota) || told.Resource != tt.resource || told.Limit != tt.limit || told.Used != tt.used || told.RetryAfter == 0 {
			t.Errorf("%s: Schedule = %v (%+v), want %v of %d with %d used and a hint", name, err, told, node.ErrQuota, tt.limit, tt.used)
			continue
		}
		got, err := p.Explain(t.Context(), Question{PlacementID: told.Placement})
		want := []Candidate{{Verdict: VerdictRefused, Reason: Reason("quota_" + tt.resource), Value: tt.wantsByValue, Limit: float64(tt.limit)}}
		if err != nil || !cmp.Equal(want, got.Candidates) {
			t.Errorf("%s: Explain = %+v, %v, want %+v", name, got.Candidates, err, want)
		}
	}
}
