package discovery

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/scheduler/internal/nodes"
)

// slice is an EndpointSlice of namespace n with a port of number 8000 and the name http.
func slice(endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "n"},
		Ports:      []discoveryv1.EndpointPort{{Name: new("metrics"), Port: new(int32(9000))}, {Name: new("http"), Port: new(int32(8000))}},
		Endpoints:  endpoints,
	}
}

// serving is an endpoint of a Pod that serves.
func serving(pod, address string, changes ...func(*discoveryv1.Endpoint)) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{
		Addresses: []string{address}, TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "n", Name: pod},
		Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true)},
	}
	for _, change := range changes {
		change(&e)
	}
	return e
}

func serves(state *bool) func(*discoveryv1.Endpoint) {
	return func(e *discoveryv1.Endpoint) { e.Conditions.Serving = state }
}

func terminating(e *discoveryv1.Endpoint) { e.Conditions.Terminating = new(true) }

func uid(id types.UID) func(*discoveryv1.Endpoint) {
	return func(e *discoveryv1.Endpoint) { e.TargetRef.UID = id }
}

func config(t testing.TB, change func(*Settings)) Config {
	t.Helper()
	s := Settings{Namespace: "n", ServiceName: "s", Port: "8000", Scheme: "http"}
	if change != nil {
		change(&s)
	}
	c, mistakes := Parse(s)
	if len(mistakes) > 0 {
		t.Fatalf("Parse(%+v) = %v", s, mistakes)
	}
	return c
}

func TestSlicesAndPodsBecomeNodes(t *testing.T) {
	t.Parallel()
	a := nodes.DiscoveredNode{ID: "a", Endpoint: "http://10.0.0.1:8000"}
	b := nodes.DiscoveredNode{ID: "b", Endpoint: "http://10.0.0.2:8000"}
	v6 := nodes.DiscoveredNode{ID: "a", Endpoint: "http://[fd00::1]:8000"}
	lingering := func(n nodes.DiscoveredNode) nodes.DiscoveredNode {
		n.Lingering = true
		return n
	}
	ports := func(ports ...discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
		s := slice(serving("a", "10.0.0.1"))
		s.Ports = ports
		return s
	}
	views := func(slices ...*discoveryv1.EndpointSlice) View { return View{Slices: slices} }
	tests := map[string]struct {
		change func(*Settings)
		view   View
		want   []nodes.DiscoveredNode
		doubts []string
	}{
		"nothing":                             {},
		"two Pods that serve, sorted":         {view: views(slice(serving("b", "10.0.0.2"), serving("a", "10.0.0.1"))), want: []nodes.DiscoveredNode{a, b}},
		"serving is not said":                 {view: views(slice(serving("a", "10.0.0.1", serves(nil))))},
		"it does not serve, though ready":     {view: views(slice(serving("a", "10.0.0.1", serves(new(false)))))},
		"it serves, though not ready":         {view: views(slice(serving("a", "10.0.0.1", func(e *discoveryv1.Endpoint) { e.Conditions.Ready = new(false) }))), want: []nodes.DiscoveredNode{a}},
		"it terminates and serves":            {view: views(slice(serving("a", "10.0.0.1", terminating))), want: []nodes.DiscoveredNode{lingering(a)}},
		"it terminates and does not serve":    {view: views(slice(serving("a", "10.0.0.1", terminating, serves(new(false)))))},
		"no Pod behind it":                    {view: views(slice(serving("a", "10.0.0.1", func(e *discoveryv1.Endpoint) { e.TargetRef = nil })))},
		"a Pod without a name":                {view: views(slice(serving("", "10.0.0.1")))},
		"no address":                          {view: views(slice(serving("a", "", func(e *discoveryv1.Endpoint) { e.Addresses = nil })))},
		"a first address that is a name":      {view: views(slice(serving("a", "node.example", func(e *discoveryv1.Endpoint) { e.Addresses = append(e.Addresses, "10.0.0.1") })))},
		"only the first address counts":       {view: views(slice(serving("a", "10.0.0.1", func(e *discoveryv1.Endpoint) { e.Addresses = append(e.Addresses, "10.0.0.9") }))), want: []nodes.DiscoveredNode{a}},
		"IPv6, in brackets":                   {view: views(slice(serving("a", "fd00::1"))), want: []nodes.DiscoveredNode{v6}},
		"IPv6, in its shortest form":          {view: views(slice(serving("a", "FD00:0:0::0001"))), want: []nodes.DiscoveredNode{v6}},
		"IPv4 in the clothes of IPv6":         {view: views(slice(serving("a", "::ffff:10.0.0.1"))), want: []nodes.DiscoveredNode{a}},
		"an address with a zone":              {view: views(slice(serving("a", "fe80::1%eth0")))},
		"another port":                        {view: views(ports(discoveryv1.EndpointPort{Port: new(int32(8001))}))},
		"no ports":                            {view: views(ports())},
		"a port without a number":             {view: views(ports(discoveryv1.EndpointPort{Name: new("http")}))},
		"a port of another protocol":          {view: views(ports(discoveryv1.EndpointPort{Port: new(int32(8000)), Protocol: new(corev1.ProtocolUDP)}))},
		"a port with its protocol":            {view: views(ports(discoveryv1.EndpointPort{Port: new(int32(8000)), Protocol: new(corev1.ProtocolTCP)})), want: []nodes.DiscoveredNode{a}},
		"a port by its name":                  {change: func(s *Settings) { s.Port = "http" }, view: views(slice(serving("a", "10.0.0.1"))), want: []nodes.DiscoveredNode{a}},
		"another number under the same name":  {change: func(s *Settings) { s.Port = "http" }, view: views(ports(discoveryv1.EndpointPort{Name: new("http"), Port: new(int32(81))})), want: []nodes.DiscoveredNode{{ID: "a", Endpoint: "http://10.0.0.1:81"}}},
		"a name that no port has":             {change: func(s *Settings) { s.Port = "grpc" }, view: views(slice(serving("a", "10.0.0.1")))},
		"another scheme":                      {change: func(s *Settings) { s.Scheme = "https" }, view: views(slice(serving("a", "10.0.0.1"))), want: []nodes.DiscoveredNode{{ID: "a", Endpoint: "https://10.0.0.1:8000"}}},
		"a Pod that is ignored":               {view: View{Slices: []*discoveryv1.EndpointSlice{slice(serving("a", "10.0.0.1"), serving("b", "10.0.0.2"))}, Ignored: map[string]bool{"n/a": true}}, want: []nodes.DiscoveredNode{b}},
		"a Pod that takes no creates":         {view: View{Slices: []*discoveryv1.EndpointSlice{slice(serving("a", "10.0.0.1"), serving("b", "10.0.0.2"))}, NoSchedule: map[string]bool{"n/a": true}}, want: []nodes.DiscoveredNode{lingering(a), b}},
		"both: ignored wins":                  {view: View{Slices: []*discoveryv1.EndpointSlice{slice(serving("a", "10.0.0.1"))}, Ignored: map[string]bool{"n/a": true}, NoSchedule: map[string]bool{"n/a": true}}},
		"a Pod of that name elsewhere":        {view: View{Slices: []*discoveryv1.EndpointSlice{slice(serving("a", "10.0.0.1"))}, Ignored: map[string]bool{"m/a": true}}, want: []nodes.DiscoveredNode{a}},
		"two families: IPv4":                  {view: views(slice(serving("a", "fd00::1")), slice(serving("a", "10.0.0.1"))), want: []nodes.DiscoveredNode{a}},
		"two families: IPv6, where preferred": {change: func(s *Settings) { s.PreferIPv6 = true }, view: views(slice(serving("a", "10.0.0.1")), slice(serving("a", "fd00::1"))), want: []nodes.DiscoveredNode{v6}},
		"one family, though not preferred":    {change: func(s *Settings) { s.PreferIPv6 = true }, view: views(slice(serving("a", "10.0.0.1"))), want: []nodes.DiscoveredNode{a}},
		"listed both ways":                    {view: views(slice(serving("a", "10.0.0.1")), slice(serving("a", "fd00::1", terminating))), want: []nodes.DiscoveredNode{lingering(a)}},
		"a newer Pod of the name, known": {
			view: View{Slices: []*discoveryv1.EndpointSlice{slice(serving("a", "10.0.0.1", uid("u1"))), slice(serving("a", "10.0.0.9", uid("u9")))}, Current: map[string]types.UID{"n/a": "u1"}},
			want: []nodes.DiscoveredNode{a},
		},
		"a newer Pod of the name, known otherwise": {
			view: View{Slices: []*discoveryv1.EndpointSlice{slice(serving("a", "10.0.0.1", uid("u1"))), slice(serving("a", "10.0.0.9", uid("u9")))}, Current: map[string]types.UID{"n/a": "u9"}},
			want: []nodes.DiscoveredNode{{ID: "a", Endpoint: "http://10.0.0.9:8000"}},
		},
		"a newer Pod, for the other one terminates": {
			view: views(slice(serving("a", "10.0.0.9", uid("u9"), terminating)), slice(serving("a", "10.0.0.1", uid("u1")))),
			want: []nodes.DiscoveredNode{lingering(a)},
		},
		"two Pods of one name, in doubt": {
			view: views(slice(serving("a", "10.0.0.9", uid("u1"))), slice(serving("a", "10.0.0.1", uid("u9")))),
			want: []nodes.DiscoveredNode{a}, doubts: []string{"n/a"},
		},
		"the family goes before the newer Pod": {
			view: View{Slices: []*discoveryv1.EndpointSlice{slice(serving("a", "10.0.0.1", uid("u1"))), slice(serving("a", "fd00::1", uid("u9")))}, Current: map[string]types.UID{"n/a": "u9"}},
			want: []nodes.DiscoveredNode{a},
		},
		"one address, two names": {view: views(slice(serving("a", "10.0.0.1", terminating), serving("b", "10.0.0.1"))), want: []nodes.DiscoveredNode{{ID: "b", Endpoint: "http://10.0.0.1:8000"}}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := config(t, tt.change)
			check := func(v View) {
				got, doubts := c.List(v)
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Errorf("List (-want +got):\n%s", diff)
				}
				if !slices.Equal(doubts, tt.doubts) {
					t.Errorf("in doubt about %v, want %v", doubts, tt.doubts)
				}
			}
			check(tt.view)
			slices.Reverse(tt.view.Slices) // never by arrival
			check(tt.view)
		})
	}
}

// Whatever slices say: ids and endpoints are unique and sorted, endpoints have the form the guard wants,
// and no order of arrival changes anything.
func TestListsAreTheSameWhateverTheOrder(t *testing.T) {
	t.Parallel()
	rapid.Check(t, properties(t))
}

func FuzzList(f *testing.F) { f.Fuzz(rapid.MakeFuzz(properties(f))) }

func properties(tb testing.TB) func(*rapid.T) {
	guard, err := route.NewGuard(route.GuardConfig{Schemes: route.DefaultSchemes})
	if err != nil {
		tb.Fatal(err)
	}
	endpoint := rapid.Custom(func(t *rapid.T) discoveryv1.Endpoint {
		e := serving(rapid.SampledFrom([]string{"", "a", "b", "c", "d"}).Draw(t, "pod"), rapid.OneOf(
			rapid.SampledFrom([]string{"10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2", "::ffff:10.0.0.1", "fe80::1%z"}), rapid.String(),
		).Draw(t, "address"))
		e.TargetRef.UID = rapid.SampledFrom([]types.UID{"", "u1", "u2"}).Draw(t, "uid")
		for _, condition := range []**bool{&e.Conditions.Serving, &e.Conditions.Terminating} {
			*condition = rapid.SampledFrom([]*bool{nil, new(true), new(true), new(false)}).Draw(t, "condition")
		}
		return e
	})
	keys := rapid.MapOf(rapid.SampledFrom([]string{"n/a", "n/b", "n/c", "m/a"}), rapid.Bool())
	preferred := []Config{config(tb, nil), config(tb, func(s *Settings) { s.PreferIPv6, s.Port = true, "http" })}
	return func(t *rapid.T) {
		c := rapid.SampledFrom(preferred).Draw(t, "config")
		v := View{Ignored: keys.Draw(t, "ignored"), NoSchedule: keys.Draw(t, "no schedule")}
		if rapid.Bool().Draw(t, "known") {
			v.Current = map[string]types.UID{"n/a": "u1", "n/b": "u2"}
		}
		for _, endpoints := range rapid.SliceOfN(rapid.SliceOfN(endpoint, 0, 4), 0, 4).Draw(t, "slices") {
			v.Slices = append(v.Slices, slice(endpoints...))
		}
		list, doubts := c.List(v)
		seen := map[string]bool{}
		last := node.ID("")
		for _, n := range list {
			if _, _, err := guard.Form(n.Endpoint); err != nil || strings.Contains(n.Endpoint, "%") {
				t.Fatalf("endpoint %q: %v", n.Endpoint, err)
			}
			if n.ID <= last || seen[n.Endpoint] {
				t.Fatalf("%+v is not sorted, or has an id or an endpoint twice", list)
			}
			if v.Ignored["n/"+string(n.ID)] || v.NoSchedule["n/"+string(n.ID)] && !n.Lingering {
				t.Fatalf("%+v is not what the selectors say", n)
			}
			last, seen[n.Endpoint] = n.ID, true
		}
		for _, s := range v.Slices {
			s.Endpoints = rapid.Permutation(s.Endpoints).Draw(t, "endpoints")
		}
		v.Slices = rapid.Permutation(v.Slices).Draw(t, "order")
		again, doubtsAgain := c.List(v)
		if diff := cmp.Diff(list, again); diff != "" || !slices.Equal(doubts, doubtsAgain) {
			t.Fatalf("another order (-first +second):\n%s\nin doubt about %v, then %v", diff, doubts, doubtsAgain)
		}
	}
}
