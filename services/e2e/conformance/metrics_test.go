package conformance

import (
	"bufio"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/google/go-cmp/cmp"
)

// agentENVsBuckets are in seconds.
var agentENVsBuckets = []string{
	"0.001", "0.002", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1", "2.5", "5", "10", "30", "60", "120", "300", "600", "900", "1200", "1800", "+Inf",
}

var callStatuses = []string{"ok", "canceled", "invalid_argument", "not_found", "failed_precondition", "unavailable", "deadline_exceeded", "internal", "other"}

// metric is one metric of the frozen table: its kind, and the values that each of its labels may have.
type metric struct {
	kind    string
	labels  map[string][]string
	buckets []string // of a histogram
}

// agentENVsMetrics are the names that AgentENV's dashboards ask for.
var agentENVsMetrics = map[string]metric{
	"agentenv_scheduler_rpc_duration_seconds": {
		"histogram", map[string][]string{"rpc": rpcs, "status": callStatuses}, agentENVsBuckets,
	},
	"agentenv_scheduler_schedule_duration_seconds": {
		"histogram", map[string][]string{"strategy": {"round_robin"}, "status": callStatuses}, agentENVsBuckets,
	},
	"agentenv_scheduler_schedule_assignments_total": {"counter", map[string][]string{"strategy": {"round_robin"}}, nil},
	"agentenv_scheduler_observed_nodes": {
		"gauge", map[string][]string{"status": {"ready", "connecting", "unhealthy", "lingering", "unspecified"}}, nil,
	},
}

// berthsMetrics are the labels of ours, by name. One that has no value yet is not printed.
var berthsMetrics = map[string][]string{
	"berth_scheduler_placements_total": {"outcome", "reason"}, "berth_scheduler_placement_seconds": {"outcome"}, "berth_scheduler_batch_size": {"kind"},
	"berth_scheduler_lock_wait_seconds": {"lock"}, "berth_scheduler_holds": {"state"}, "berth_scheduler_heartbeats_total": {"path"},
	"berth_scheduler_roster_changes_total": {"change"}, "berth_scheduler_bindings": {"state"}, "berth_scheduler_node_conflicts_total": nil,
	"berth_scheduler_node_skew_seconds": nil, "berth_scheduler_loop_seconds": {"loop"},
	"berth_scheduler_events_total": {"kind", "effect"},
}

// sample is one line of what is scraped.
type sample struct {
	name   string
	labels map[string]string
	value  string
}

var (
	lineOf  = regexp.MustCompile(`^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$`)
	labelOf = regexp.MustCompile(`([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"`)

	// idLike is what no label may have: a UUID, a node's name or endpoint, an address.
	idLike = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}|node-[abc]|://|\d+\.\d+\.\d+\.\d+`)
)

// scrape reads one page of metrics: the kind of each by name, and every line.
func scrape(page string) (map[string]string, []sample, error) {
	kinds := map[string]string{}
	var samples []sample
	for lines := bufio.NewScanner(strings.NewReader(page)); lines.Scan(); {
		line := lines.Text()
		if words := strings.Fields(line); strings.HasPrefix(line, "# TYPE ") {
			kinds[words[2]] = words[3]
		}
		if line == "" || line[0] == '#' {
			continue
		}
		parts := lineOf.FindStringSubmatch(line)
		if parts == nil {
			return nil, nil, fmt.Errorf("no metric: %s", line)
		}
		s := sample{parts[1], map[string]string{}, parts[3]}
		for _, label := range labelOf.FindAllStringSubmatch(parts[2], -1) {
			s.labels[label[1]] = label[2]
		}
		samples = append(samples, s)
	}
	return kinds, samples, nil
}

// metricsAreAgentENVs calls everything everywhere and compares what both replicas count with the table.
func (s *stack) metricsAreAgentENVs() {
	for name, w := range s.everybody() {
		if _, err := ask(s.t.Context(), w, "Schedule", fields{"hint": cold}); err != nil {
			s.t.Errorf("%s: Schedule = %v", name, err)
		}
		for _, rpc := range rpcs {
			if _, err := ask(s.t.Context(), w, rpc, nil); err != nil {
				if code, text := refused(err); text == "" {
					s.t.Errorf("%s: %s = %s without a text", name, rpc, code)
				}
			}
		}
	}
	for i, r := range s.replicas {
		for _, path := range []string{"/", "/anything/else?x=1"} {
			code, text, err := get(s.t.Context(), r.ops+path)
			if err != nil || code != 200 || !strings.Contains(text, "agentenv_scheduler_rpc_duration_seconds_bucket") {
				s.t.Errorf("replica %d: GET %s = %d, %v, want the metrics", i+1, path, code, err)
			}
		}
		kinds, samples := s.scraped(r)
		for name, want := range agentENVsMetrics {
			s.compare(name, want, kinds[name], samples)
		}
	}
	s.compareOurs()
}

func (s *stack) scraped(r *replica) (map[string]string, []sample) {
	s.t.Helper()
	code, page, err := get(s.t.Context(), r.ops+"/metrics")
	if err != nil || code != 200 {
		s.t.Fatalf("GET /metrics = %d, %v", code, err)
	}
	kinds, samples, err := scrape(page)
	if err != nil {
		s.t.Fatal(err)
	}
	return kinds, samples
}

// compare checks one of AgentENV's metrics against what was scraped.
func (s *stack) compare(name string, want metric, kind string, samples []sample) {
	s.t.Helper()
	if kind != want.kind {
		s.t.Errorf("%s is a %q, want a %s", name, kind, want.kind)
		return
	}
	seen := map[string]map[string]bool{}
	buckets := map[string]bool{}
	for _, one := range samples {
		base := one.name
		if want.kind == "histogram" {
			base = strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(base, "_bucket"), "_sum"), "_count")
		}
		if base != name {
			continue
		}
		labels := maps.Clone(one.labels)
		if strings.HasSuffix(one.name, "_bucket") {
			buckets[labels["le"]] = true
			delete(labels, "le")
		}
		if diff := cmp.Diff(slices.Sorted(maps.Keys(want.labels)), slices.Sorted(maps.Keys(labels))); diff != "" {
			s.t.Errorf("labels of %s (-want +got):\n%s", one.name, diff)
		}
		for label, value := range labels {
			if !slices.Contains(want.labels[label], value) {
				s.t.Errorf("%s has %s %q, want one of %v", name, label, value, want.labels[label])
			}
			if seen[label] == nil {
				seen[label] = map[string]bool{}
			}
			seen[label][value] = true
		}
	}
	if len(buckets) != len(want.buckets) {
		s.t.Errorf("%s has buckets %v, want %v", name, slices.Sorted(maps.Keys(buckets)), want.buckets)
	}
	for _, bucket := range want.buckets {
		if !buckets[bucket] {
			s.t.Errorf("%s has no bucket %s", name, bucket)
		}
	}
	if name == "agentenv_scheduler_rpc_duration_seconds" {
		for _, rpc := range rpcs {
			if !seen["rpc"][rpc] {
				s.t.Errorf("no call of %s was counted", rpc)
			}
		}
	}
	if name == "agentenv_scheduler_observed_nodes" && len(seen["status"]) != len(want.labels["status"]) {
		s.t.Errorf("%s has status %v, want %v", name, slices.Sorted(maps.Keys(seen["status"])), want.labels["status"])
	}
}

// compareOurs checks the labels of our own metrics, and that no label of any has an id in it. What one
// replica does for all is counted by that one, some of it after its first pass.
func (s *stack) compareOurs() {
	s.t.Helper()
	var all []sample
	eventually(s.t, settleLimit, func() error {
		all = nil
		printed := map[string]bool{}
		for _, r := range s.replicas {
			kinds, samples := s.scraped(r)
			maps.Copy(printed, boolean(kinds))
			all = append(all, samples...)
		}
		for name := range berthsMetrics {
			if !printed[name] {
				return fmt.Errorf("%s is not among the metrics", name)
			}
		}
		return nil
	})
	for _, one := range all {
		if !strings.HasPrefix(one.name, "agentenv_") && !strings.HasPrefix(one.name, "berth_scheduler_") {
			continue
		}
		for label, value := range one.labels {
			if idLike.MatchString(value) {
				s.t.Errorf("%s has %s %q: no label has an id", one.name, label, value)
			}
		}
		want, known := berthsMetrics[one.name]
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			if base, ok := strings.CutSuffix(one.name, suffix); ok && !known {
				want, known = berthsMetrics[base]
			}
		}
		if !known {
			continue
		}
		labels := maps.Clone(one.labels)
		delete(labels, "le")
		if diff := cmp.Diff(slices.Sorted(slices.Values(want)), slices.Sorted(maps.Keys(labels))); diff != "" {
			s.t.Errorf("labels of %s (-want +got):\n%s", one.name, diff)
		}
	}
}

func boolean(kinds map[string]string) map[string]bool {
	out := map[string]bool{}
	for name := range kinds {
		out[name] = true
	}
	return out
}
