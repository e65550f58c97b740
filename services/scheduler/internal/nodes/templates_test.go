package nodes

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"berth/services/internal/node"
	"berth/services/scheduler/internal/cputemplate"
)

// configOf returns a configuration with one MSR, whose bits tell templates apart.
func configOf(bits string) string {
	return `{"msr_modifiers":[{"addr":"0x10","bitmap":"` + bits + `"}]}`
}

// alone is the template of one node, and common that of several.
func alone(bits string) string {
	return `{"kvm_capabilities":[],"cpuid_modifiers":[],"msr_modifiers":[{"addr":"0x10","bitmap":"` + bits + `"}]}`
}

func common(bits string) string { return alone("0b" + strings.Repeat("0", 64-len(bits)) + bits) }

// templated returns a heartbeat of the node on port 8000+i of a cluster; config "" is not sent.
func templated(i int, instance, cluster, config string) Beat {
	id, endpoint := nodeAt(i)
	b := beatOf(id, instance, endpoint)
	b.Cluster = cluster
	b.Machine = &Machine{CPUArchitecture: "x86_64", CPUConfig: config}
	return b
}

// told sends a beat that is accepted, and returns the template it was told.
func (r *replica) told(t *testing.T, b Beat) string {
	t.Helper()
	return r.must(t, b).CPUConfigJSON
}

func wantTold(t *testing.T, when, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s the node is told %q, want %q", when, got, want)
	}
}

func TestATemplateIsWithheldUntilAllNodesHaveAConfiguration(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	a, b := c.replica(), c.replica()
	wantTold(t, "without a configuration of its own", a.told(t, templated(1, "i1", "c1", "")), "")
	wantTold(t, "while another has none", b.told(t, templated(2, "i1", "c1", configOf("110"))), "")
	wantTold(t, "with the last configuration", a.told(t, templated(1, "i1", "c1", configOf("011"))), common("010"))
	wantTold(t, "after that", b.told(t, templated(2, "i1", "c1", "")), common("010")) // it no longer sends its own, which is kept

	wantTold(t, "once it was told", a.told(t, templated(1, "i1", "c1", "")), "")
	wantTold(t, "once it was told", b.told(t, templated(1, "i1", "c1", "")), "")
	wantTold(t, "in another cluster", b.told(t, templated(3, "i1", "c2", configOf("1"))), alone("1"))
	wantTold(t, "once it was told", a.told(t, templated(2, "i1", "c1", "")), "")
}

func TestATemplateIsToldOnceToEachInstanceAndAgainWhenItChanged(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	wantTold(t, "at first", r.told(t, templated(1, "i1", "c1", configOf("111"))), alone("111"))
	for range 3 {
		wantTold(t, "again", r.told(t, templated(1, "i1", "c1", configOf("111"))), "")
	}
	wantTold(t, "after its restart", r.told(t, templated(1, "i2", "c1", configOf("111"))), alone("111"))
	wantTold(t, "again", r.told(t, templated(1, "i2", "c1", "")), "")

	wantTold(t, "as the second of two", r.told(t, templated(2, "i1", "c1", configOf("101"))), common("101"))
	wantTold(t, "when another joined", r.told(t, templated(1, "i2", "c1", "")), common("101"))
	wantTold(t, "again", r.told(t, templated(1, "i2", "c1", "")), "")

	wantTold(t, "with another configuration", r.told(t, templated(2, "i1", "c1", configOf("1"))), common("1"))
	wantTold(t, "when another's configuration changed", r.told(t, templated(1, "i2", "c1", "")), common("1"))

	if err := r.Unregister(t.Context(), "n02", "i1"); err != nil {
		t.Fatal(err)
	}
	c.exec(`UPDATE node_leases SET reconcile_due = '-infinity'`)
	wantTold(t, "when the other left", r.told(t, templated(1, "i2", "c1", "")), alone("111"))
}

func TestANodeThatMovesToAnotherClusterLeavesTheTemplateOfTheFirst(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, templated(1, "i1", "c1", configOf("111")))
	r.must(t, templated(2, "i1", "c1", configOf("110")))
	wantTold(t, "when another joined", r.told(t, templated(1, "i1", "c1", "")), common("110"))
	wantTold(t, "in its new cluster", r.told(t, templated(2, "i1", "c2", "")), alone("110"))
	c.exec(`UPDATE node_leases SET reconcile_due = '-infinity'`)
	wantTold(t, "alone again", r.told(t, templated(1, "i1", "c1", "")), alone("111"))
}

func TestASilentNodeCountsForTheTemplateWhileASourceListsIt(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, templated(1, "i1", "c1", configOf("111")))
	r.must(t, templated(2, "i1", "c1", configOf("110")))
	r.must(t, templated(1, "i1", "c1", configOf("111")))
	c.exec(`UPDATE node_leases SET expires_at = clock_timestamp() - interval '1 hour' WHERE node_id = 'n02'`)
	c.exec(`UPDATE node_leases SET reconcile_due = '-infinity'`)
	wantTold(t, "while the other is silent", r.told(t, templated(1, "i1", "c1", configOf("111"))), "")
	c.exec(`UPDATE nodes SET present = false, gone_at = clock_timestamp() WHERE node_id = 'n02'`)
	c.exec(`UPDATE node_leases SET reconcile_due = '-infinity'`)
	wantTold(t, "when the other is gone", r.told(t, templated(1, "i1", "c1", configOf("111"))), alone("111"))
}

func TestABerthNodeIsToldTheTemplateUntilItEchoesIt(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	b := templated(1, "i1", "c1", configOf("111"))
	b.Capabilities = []string{"create_key"}
	for range 3 {
		wantTold(t, "before it echoed", r.told(t, b), alone("111"))
	}
	b.TemplateDigest = []byte("another")
	wantTold(t, "with the echo of another", r.told(t, b), alone("111"))
	b.TemplateDigest = cputemplate.Digest(alone("111"))
	wantTold(t, "with its echo", r.told(t, b), "")
	before := without(c.versions(), "node_leases")
	wantTold(t, "with its echo", r.told(t, b), "")
	if after := without(c.versions(), "node_leases"); fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("a heartbeat with the right echo wrote more than its lease: %v, then %v", before, after)
	}
	b.TemplateDigest = nil
	wantTold(t, "when it has forgotten", r.told(t, b), alone("111"))
}

func TestAConfigurationThatCannotBeReadIsShownAndNobodyHasATemplate(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	shown := func(id node.ID) string {
		t.Helper()
		o, err := r.Get(t.Context(), id, "")
		if err != nil {
			t.Fatal(err)
		}
		return o.ConfigError
	}
	bad := configOf("0b2")
	r.must(t, templated(1, "i1", "c1", configOf("111")))
	wantTold(t, "with one that cannot be read", r.told(t, templated(2, "i1", "c1", bad)), "")
	r.must(t, templated(3, "i1", "c1", bad))
	const want = "not a CPU configuration: msr_modifiers[0].bitmap: not a binary number of that many digits"
	for id, want := range map[node.ID]string{"n01": "", "n02": want, "n03": want} {
		if got := shown(id); got != want {
			t.Errorf("cpu_config_error of %s = %q, want %q", id, got, want)
		}
	}
	wantTold(t, "after a restart beside one that cannot be read", r.told(t, templated(1, "i2", "c1", configOf("111"))), "")

	r.must(t, templated(2, "i1", "c1", configOf("11")))
	wantTold(t, "once all can be read", r.told(t, templated(3, "i1", "c1", configOf("1"))), common("1"))
	for _, id := range []node.ID{"n01", "n02", "n03"} {
		if got := shown(id); got != "" {
			t.Errorf("cpu_config_error of %s = %q after it was mended, want none", id, got)
		}
	}
}

// Heartbeats of one instance at once, to both replicas: one of them is told.
func TestOfHeartbeatsAtOnceOneIsToldTheTemplate(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	replicas := []*replica{c.replica(), c.replica()}
	for round := range 5 {
		cluster := fmt.Sprintf("c%d", round)
		var (
			wg   sync.WaitGroup
			told atomic.Int64
		)
		for i := range 8 {
			wg.Go(func() {
				answer, err := replicas[i%2].Heartbeat(t.Context(), templated(round, "i1", cluster, configOf("111")))
				if err != nil {
					t.Error(err)
				}
				if answer.CPUConfigJSON != "" {
					told.Add(1)
				}
			})
		}
		wg.Wait()
		if got := told.Load(); got != 1 {
			t.Errorf("%d of 8 heartbeats at once were told, want one", got)
		}
	}
	if got := c.deadlocks(replicas...); got != 0 {
		t.Errorf("%d deadlocks, want none", got)
	}
}

// leaving ends its caller's context in the moment the template is marked as told.
type leaving struct {
	context.Context
	asked atomic.Int64
	from  int64
}

func (l *leaving) Err() error {
	if l.asked.Add(1) >= l.from {
		return context.Canceled
	}
	return l.Context.Err()
}

func TestATemplateIsTakenBackFromACallThatFails(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, templated(1, "i1", "c1", configOf("111")))
	c.exec(`UPDATE node_leases SET template_sent = 'former'`)
	p, err := r.prepare(templated(1, "i1", "c1", configOf("111")))
	if err != nil {
		t.Fatal(err)
	}
	// Its caller leaves at each moment in turn, until it stays to the end.
	told := false
	for from := int64(1); !told; from++ {
		if from > 1000 {
			t.Fatal("the caller never stays to the end")
		}
		text, err := r.tellTemplate(&leaving{Context: t.Context(), from: from}, p)
		told = err == nil
		sent := value[string](c, `SELECT encode(template_sent, 'escape') FROM node_leases`)
		switch {
		case told && text != alone("111"):
			t.Errorf("a call that did not fail is told %q, want %q", text, alone("111"))
		case !told && (text != "" || sent != "former"):
			t.Errorf("a call that failed (%v) is told %q, and template_sent is %q, want it as before", err, text, sent)
		}
	}
}

func TestAllReplicasComputeTheSameTemplateWhateverTheOrderOfNodes(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	replicas := []*replica{c.replica(), c.replica(), c.replica()}
	const nodes = 12
	for round := range 3 {
		cluster := fmt.Sprintf("c%d", round)
		var wg sync.WaitGroup
		for i := range nodes {
			wg.Go(func() {
				bits := fmt.Sprintf("1%0*b", nodes, ^uint16(1<<i)&(1<<nodes-1)) // all but one
				if _, err := replicas[(i+round)%3].Heartbeat(t.Context(), templated(round*nodes+i, "i1", cluster, configOf(bits))); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		want := common("1" + strings.Repeat("0", nodes))
		c.exec(`UPDATE node_leases SET reconcile_due = '-infinity'`)
		replicas[0].must(t, templated(round*nodes, "i1", cluster, ""))
		if got := value[string](c, `SELECT template_json FROM cpu_templates WHERE cluster_id = $1`, cluster); got != want {
			t.Errorf("template of %s = %s, want %s", cluster, got, want)
		}
	}
	if got := c.deadlocks(replicas...); got != 0 {
		t.Errorf("%d deadlocks, want none", got)
	}
}
