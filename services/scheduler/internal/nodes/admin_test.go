package nodes

import (
	"errors"
	"fmt"
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// byOldContract is a beat without any field of ours: such a node cannot announce itself.
func byOldContract(b Beat) Beat {
	b.Endpoint, b.MayRegister, b.Labels = "", false, nil
	return b
}

func TestAnOperatorListsANodeThatCannotAnnounceItself(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	old := byOldContract(beatOf("a", "i1", "", "s1"))
	if _, err := r.Heartbeat(t.Context(), old); !errors.Is(err, node.ErrNotListed) {
		t.Fatalf("Heartbeat of a node nobody lists = %v, want %v", err, node.ErrNotListed)
	}
	listed := Registration{Node: "a", Endpoint: endpointA + "/", Labels: map[string]string{"zone": "z1"}}
	for range 2 { // it may repeat
		if err := r.Register(t.Context(), listed); err != nil {
			t.Fatalf("Register = %v", err)
		}
	}
	if got := c.feed(); got != 1 {
		t.Errorf("%d feed rows, want one for the endpoint", got)
	}
	if k := r.knownNode(t, "a"); k.Standing != "connecting" || k.Source != "registered" || k.Endpoint != endpointA {
		t.Errorf("the node is %+v, want it connecting", k)
	}
	r.must(t, old)
	k := r.knownNode(t, "a")
	if k.Standing != "ready" || k.Left.Bound != 1 || !maps.Equal(k.Labels, listed.Labels) {
		t.Errorf("the node is %+v, want it ready with the operator's labels", k)
	}

	if err := r.Register(t.Context(), Registration{Node: "a", Endpoint: endpointB}); !errors.Is(err, node.ErrIDInUse) {
		t.Errorf("another endpoint for a node that lives = %v, want %v", err, node.ErrIDInUse)
	}
	if err := r.Remove(t.Context(), "a"); !errors.Is(err, node.ErrLeaseLives) {
		t.Errorf("Remove of a node that lives = %v, want %v", err, node.ErrLeaseLives)
	}
	c.exec(`UPDATE node_leases SET expires_at = clock_timestamp()`)
	if err := r.Cordon(t.Context(), "a", "disk"); err != nil {
		t.Fatal(err)
	}
	for range 2 { // it may repeat
		if err := r.Remove(t.Context(), "a"); err != nil {
			t.Errorf("Remove of a silent node = %v", err)
		}
	}
	if k := r.knownNode(t, "a"); k.Present {
		t.Errorf("the removed node is %+v, want it absent", k)
	}
	if got := c.bindings()["s1"].State; got != sandbox.Bound {
		t.Errorf("its sandbox is %s, want it bound until it counts as lost", got)
	}
	if known, err := r.ListKnown(t.Context(), "", false); err != nil || len(known) != 0 {
		t.Errorf("ListKnown = %+v, %v, want nobody", known, err)
	}
	if known, err := r.ListKnown(t.Context(), " c1 ", true); err != nil || len(known) != 1 {
		t.Errorf("ListKnown of all = %+v, %v, want the removed one", known, err)
	}
	if err := r.Register(t.Context(), Registration{Node: "a", Endpoint: endpointB}); err != nil {
		t.Errorf("Register of a removed node = %v", err)
	}
	if k := r.knownNode(t, "a"); !k.Present || k.Endpoint != endpointB || !k.Cordoned || !maps.Equal(k.Labels, listed.Labels) {
		t.Errorf("the node is %+v, want it present, and cordoned as it was", k)
	}
}

func TestWhatAnOperatorMayNotRegisterOrRemove(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	if err := r.ApplyStatic(t.Context(), []StaticNode{{"static", endpointA}}); err != nil {
		t.Fatal(err)
	}
	if err := r.Remove(t.Context(), "static"); !errors.Is(err, node.ErrOtherSource) {
		t.Errorf("Remove of a configured node = %v, want %v", err, node.ErrOtherSource)
	}
	for name, tt := range map[string]struct {
		given Registration
		want  error
	}{
		"a configured node":      {Registration{Node: "static", Endpoint: endpointA}, node.ErrOtherSource},
		"a public address":       {Registration{Node: "b", Endpoint: "http://203.0.113.1:80"}, route.ErrNotAllowed},
		"user information":       {Registration{Node: "b", Endpoint: "http://u:p@127.0.0.1:80"}, route.ErrNotAllowed},
		"a path":                 {Registration{Node: "b", Endpoint: endpointB + "/x"}, route.ErrNotAllowed},
		"another scheme":         {Registration{Node: "b", Endpoint: "ftp://127.0.0.1:21"}, route.ErrNotAllowed},
		"a label that is a text": {Registration{Node: "b", Endpoint: endpointB, Labels: map[string]string{"a": fmt.Sprintf("%064d", 1)}}, node.ErrBadTag},
	} {
		if err := r.Register(t.Context(), tt.given); !errors.Is(err, tt.want) {
			t.Errorf("%s: Register = %v, want %v", name, err, tt.want)
		}
	}
	known, err := r.ListKnown(t.Context(), "", true)
	if err != nil || len(known) != 1 {
		t.Errorf("%+v, %v after refusals, want the configured node alone", known, err)
	}
}

func TestTheStandingOfAKnownNode(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA))
	for _, tt := range []struct{ given, want string }{
		{`UPDATE nodes SET cordoned = true`, "lingering"},
		{`UPDATE nodes SET cordoned = false, lingering = true`, "lingering"},
		{`UPDATE nodes SET lingering = false`, "ready"},
		{`UPDATE node_leases SET expires_at = clock_timestamp() - interval '1 s'`, "unhealthy"},
		{`UPDATE node_leases SET ended_at = clock_timestamp()`, "unregistered"},
		{`DELETE FROM node_leases`, "connecting"},
		{`UPDATE nodes SET present = false, gone_at = now()`, "absent"},
	} {
		c.exec(tt.given)
		if got := r.knownNode(t, "a").Standing; got != tt.want {
			t.Errorf("after %s the node is %s, want %s", tt.given, got, tt.want)
		}
	}
}

func TestACordonKeepsItsReason(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	r := c.replica()
	r.must(t, beatOf("a", "i1", endpointA))
	var got []string
	for _, reason := range []string{"disk", "", "fan", "fan"} {
		if err := r.Cordon(t.Context(), "a", reason); err != nil {
			t.Fatal(err)
		}
		got = append(got, r.knownNode(t, "a").CordonReason)
	}
	for range 2 {
		if err := r.Uncordon(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
	}
	got = append(got, r.knownNode(t, "a").CordonReason)
	if diff := cmp.Diff([]string{"disk", "disk", "fan", "fan", ""}, got); diff != "" {
		t.Errorf("reasons (-want +got):\n%s", diff)
	}
	const told = `SELECT count(*) FROM sandbox_events WHERE kind IN ('node_cordoned', 'node_uncordoned')`
	if events := value[int64](c, told); events != 3 {
		t.Errorf("%d events, want one for each change", events)
	}
}
