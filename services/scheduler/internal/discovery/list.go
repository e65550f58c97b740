package discovery

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"berth/services/internal/node"
	"berth/services/scheduler/internal/nodes"
)

// View is what the API server told. Keys of Pods are namespace and name with a slash between them.
type View struct {
	Slices     []*discoveryv1.EndpointSlice
	Ignored    map[string]bool // Pods that are no nodes
	NoSchedule map[string]bool // Pods that take no creates
	// Current says which Pod has a name now, for names about which List was in doubt.
	Current map[string]types.UID
}

// found is one endpoint that may be a node's.
type found struct {
	addr        netip.AddrPort
	pod         types.UID
	terminating bool
	v4          bool
}

// List returns the nodes of v, sorted by id; no two have one id or one endpoint. The order of what v has
// says nothing. A node is an endpoint that serves, has a Pod's name and the port; it lingers when it
// terminates, or its Pod takes no creates. Of two with one id the preferred family goes first, then the
// newer Pod. doubts are Pods of which v does not say which is newer: the caller asks, and sets Current.
func (c Config) List(v View) (list []nodes.DiscoveredNode, doubts []string) {
	byPod := map[string][]found{}
	for _, slice := range v.Slices {
		port := c.port.of(slice.Ports)
		if port == 0 {
			continue
		}
		for _, e := range slice.Endpoints {
			key, f, fit := read(slice.Namespace, e, port)
			if fit && !v.Ignored[key] {
				byPod[key] = append(byPod[key], f)
			}
		}
	}
	byEndpoint := map[netip.AddrPort]nodes.DiscoveredNode{}
	for _, key := range slices.Sorted(maps.Keys(byPod)) {
		_, name, _ := strings.Cut(key, "/")
		best, doubt := c.best(byPod[key], v.Current[key])
		if doubt {
			doubts = append(doubts, key)
		}
		n := nodes.DiscoveredNode{
			ID: node.ID(name), Endpoint: c.scheme + "://" + best.addr.String(),
			Lingering: v.NoSchedule[key] || slices.ContainsFunc(byPod[key], func(f found) bool { return f.terminating }),
		}
		// A stale slice may show one address twice. Gateways would reach one process under two names.
		if other, twice := byEndpoint[best.addr]; !twice || other.Lingering && !n.Lingering {
			byEndpoint[best.addr] = n
		}
	}
	list = slices.SortedFunc(maps.Values(byEndpoint), func(a, b nodes.DiscoveredNode) int { return cmp.Compare(a.ID, b.ID) })
	return list, doubts
}

// read returns e as a node of its Pod, if it may be one.
func read(namespace string, e discoveryv1.Endpoint, port uint16) (pod string, f found, fit bool) {
	serves := e.Conditions.Serving != nil && *e.Conditions.Serving
	if !serves || e.TargetRef == nil || e.TargetRef.Name == "" || len(e.Addresses) == 0 {
		return "", found{}, false
	}
	addr, err := netip.ParseAddr(e.Addresses[0])
	if err != nil || addr.Zone() != "" {
		return "", found{}, false // a zone means something on one machine only
	}
	addr = addr.Unmap()
	return namespace + "/" + e.TargetRef.Name, found{
		addr: netip.AddrPortFrom(addr, port), pod: e.TargetRef.UID, v4: addr.Is4(),
		terminating: e.Conditions.Terminating != nil && *e.Conditions.Terminating,
	}, true
}

// best returns the first of several endpoints of one name. They are of one Pod with two addresses, or of
// a Pod and a newer one of its name. The newer one is the current; where that is not known, the one that
// does not terminate, for a name is free again only when its Pod has ended. Where that does not tell
// either it is in doubt, and the last comparisons only keep every replica's answer the same.
func (c Config) best(candidates []found, current types.UID) (best found, doubt bool) {
	order := func(a, b found) int {
		return cmp.Or(
			last(a.v4 == c.preferIPv6, b.v4 == c.preferIPv6),
			last(current != "" && a.pod != current, current != "" && b.pod != current),
			last(a.terminating, b.terminating),
		)
	}
	sorted := slices.SortedFunc(slices.Values(candidates), func(a, b found) int {
		return cmp.Or(order(a, b), cmp.Compare(b.pod, a.pod), a.addr.Compare(b.addr))
	})
	best = sorted[0]
	doubt = slices.ContainsFunc(sorted, func(f found) bool { return order(f, best) == 0 && f.pod != best.pod })
	return best, doubt
}

// last puts what is true after what is not.
func last(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}
