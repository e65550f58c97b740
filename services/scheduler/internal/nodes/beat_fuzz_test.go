package nodes

import (
	"strings"
	"testing"
	"unicode/utf8"

	"berth/services/internal/node"
)

// FuzzPrepare: whatever a node sends is refused, or can be stored as it is.
func FuzzPrepare(f *testing.F) {
	f.Add("c1", "i1", "v1", "http://10.0.0.1:8000", "zone", "a", "backend", "10.0.0.1:1", "s1", int64(1))
	f.Add("\x00", "\xff", strings.Repeat("v", 2000), "http://[::1]:80/?x", "", "", " ", "", "S 1", int64(-1))
	f.Add(" c ", strings.Repeat("i", 128), "", "", strings.Repeat("k", 63), "\u0085", "b", "x", "", int64(1)<<62)
	n := &Nodes{guard: mustGuard(f)}
	f.Fuzz(func(t *testing.T, cluster, instance, version, endpoint, label, capability, backend, address, id string, number int64) {
		roster, _ := node.NewRoster([]string{id, id + "x"}, nil)
		p, err := n.prepare(Beat{
			Node: "a", Instance: instance, Cluster: cluster, Version: version, Commit: version, Endpoint: endpoint,
			Labels: map[string]string{label: version}, Capabilities: []string{capability, label}, Roster: roster,
			Peer: &Peer{Backend: backend, Address: address}, Seq: number,
			Capacity: Capacity{Sandboxes: uint32(number), CPUMillis: number, MemoryBytes: number},
			Snapshot: &Snapshot{ReportedAtUnixMS: number, CreateFails: uint64(number), CPUPercent: uint32(number), Status: node.Status(number)},
			Machine:  &Machine{CPUModel: version, CPUConfig: label},
		})
		if err != nil {
			return
		}
		machine, config := p.Machine.storable()
		texts := []string{p.Cluster, p.Instance, p.Version, p.Endpoint, p.place, label, capability, machine.CPUModel, config}
		if p.Peer != nil {
			texts = append(texts, p.Peer.Backend, p.Peer.Address)
		}
		for _, text := range texts {
			if !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
				t.Errorf("%q would be stored", text)
			}
		}
		if l := p.load; l.createFails < 0 || l.cpuPercent < 0 || l.status < 0 || l.status > int16(node.Lingering) || p.Capacity.CPUMillis < 0 {
			t.Errorf("load %+v, capacity %+v would be stored", l, p.Capacity)
		}
		if len(p.facts) != digestBytes || len(p.roster) != digestBytes {
			t.Errorf("digests of %d and %d bytes", len(p.facts), len(p.roster))
		}
	})
}
