package nodes

import (
	"log/slog"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"berth/services/scheduler/internal/placement"
)

// TestMetricsHaveTheNamesAndLabelsOfTheContract reads what is described, for most of it has no value until something
// goes wrong: a dashboard must find it then.
func TestMetricsHaveTheNamesAndLabelsOfTheContract(t *testing.T) {
	t.Parallel()
	r := newCell(t).replica()
	placement.New(r.db, placement.DefaultConfig(), slog.New(slog.DiscardHandler), r.reg)
	want := map[string]string{
		"placements_total": "outcome,reason", "placement_seconds": "outcome", "batch_size": "kind", "lock_wait_seconds": "lock", "holds": "state",
		"holds_ended_total": "how", "heartbeats_total": "path", "roster_changes_total": "change", "orphans": "reason", "bindings": "state",
		"node_conflicts_total": "", "node_skew_seconds": "", "drains": "state", "quota_refusals_total": "resource", "events_total": "kind,effect",
		"loop_seconds": "loop", "store_errors_total": "op",
	}
	described := make(chan *prometheus.Desc)
	go func() { r.reg.Describe(described); close(described) }()
	form := regexp.MustCompile(`fqName: "berth_scheduler_([a-z_]+)".*variableLabels: \{([a-z,]*)\}`)
	got := map[string]string{}
	for d := range described {
		parts := form.FindStringSubmatch(d.String())
		if parts == nil {
			continue // AgentENV's
		}
		if _, asked := want[parts[1]]; asked {
			got[parts[1]] = parts[2]
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics and their labels (-want +got):\n%s", diff)
	}
}
