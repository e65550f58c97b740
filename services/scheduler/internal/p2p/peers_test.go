package p2p

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/node"
)

// TestOnlyReadyPeersAreNamed spoils one of two peers in each way there is: neither the list nor a lookup
// names it then, and both name it when it is well.
func TestOnlyReadyPeersAreNamed(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		spoil string
		want  []node.ID
	}{
		"a well one is named":             {`SELECT 1`, []node.ID{"bad", "good"}},
		"its lease expired":               {`UPDATE node_leases SET expires_at = now() - interval '1 ms' WHERE node_id = 'bad'`, []node.ID{"good"}},
		"it unregistered":                 {`UPDATE node_leases SET ended_at = now() WHERE node_id = 'bad'`, []node.ID{"good"}},
		"it was never heard":              {`DELETE FROM node_leases WHERE node_id = 'bad'`, []node.ID{"good"}},
		"no source lists it":              {`UPDATE nodes SET present = false, gone_at = now() WHERE node_id = 'bad'`, []node.ID{"good"}},
		"its source gives it up":          {`UPDATE nodes SET lingering = true WHERE node_id = 'bad'`, []node.ID{"good"}},
		"it is cordoned":                  {`UPDATE nodes SET cordoned = true WHERE node_id = 'bad'`, []node.ID{"good"}},
		"it drains":                       {`UPDATE nodes SET drain_id = 1 WHERE node_id = 'bad'`, []node.ID{"good"}},
		"it says that it is unhealthy":    {`UPDATE node_leases SET reported_status = 3 WHERE node_id = 'bad'`, []node.ID{"good"}},
		"it says that it lingers":         {`UPDATE node_leases SET reported_status = 4 WHERE node_id = 'bad'`, []node.ID{"good"}},
		"it says nothing about itself":    {`UPDATE node_leases SET reported_status = 0 WHERE node_id = 'bad'`, []node.ID{"good"}},
		"it has no store":                 {`DELETE FROM peer_endpoints WHERE node_id = 'bad'`, []node.ID{"good"}},
		"its store is of another backend": {`UPDATE peer_endpoints SET backend = 'B' WHERE node_id = 'bad'`, []node.ID{"good"}},
		"it moved to another cluster":     {`UPDATE peer_endpoints SET cluster_id = 'd' WHERE node_id = 'bad'`, []node.ID{"good"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCell(t)
			c.peer("good", "bad")
			x := c.replica(DefaultConfig())
			record(t, x, "k", "good", "bad")
			c.exec(tt.spoil)
			peers, err := x.Peers(t.Context(), Wanted{Cluster: "c", Backend: "b"})
			if err != nil {
				t.Fatalf("Peers = %v", err)
			}
			if diff := cmp.Diff(tt.want, nodesOf(peers)); diff != "" {
				t.Errorf("Peers (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.want, lookup(t, x, "k")); diff != "" {
				t.Errorf("Lookup (-want +got):\n%s", diff)
			}
		})
	}
}

func TestPeersAreThoseThatAreWantedByID(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.peer("n3", "n1", "n2", "n4")
	c.exec(`UPDATE peer_endpoints SET cluster_id = 'd' WHERE node_id = 'n2'`)
	c.exec(`UPDATE peer_endpoints SET backend = 'other', address = 'x:1' WHERE node_id = 'n3'`)
	x := c.replica(DefaultConfig())
	for name, tt := range map[string]struct {
		wanted Wanted
		want   []Peer
	}{
		"all":                    {Wanted{}, []Peer{{"n1", "b", "n1:9"}, {"n2", "b", "n2:9"}, {"n3", "other", "x:1"}, {"n4", "b", "n4:9"}}},
		"all but one":            {Wanted{Exclude: "n2"}, []Peer{{"n1", "b", "n1:9"}, {"n3", "other", "x:1"}, {"n4", "b", "n4:9"}}},
		"of a cluster":           {Wanted{Cluster: "d"}, []Peer{{"n2", "b", "n2:9"}}},
		"of a backend":           {Wanted{Backend: "other"}, []Peer{{"n3", "other", "x:1"}}},
		"of both, all but one":   {Wanted{Cluster: "c", Backend: "b", Exclude: "n1"}, []Peer{{"n4", "b", "n4:9"}}},
		"of nothing there is":    {Wanted{Cluster: "c", Backend: "B"}, []Peer{}},
		"a node that is none":    {Wanted{Cluster: "d", Exclude: "n9"}, []Peer{{"n2", "b", "n2:9"}}},
		"the only one, excluded": {Wanted{Cluster: "d", Exclude: "n2"}, []Peer{}},
	} {
		got, err := x.Peers(t.Context(), tt.wanted)
		if err != nil {
			t.Fatalf("%s: Peers(%+v) = %v", name, tt.wanted, err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: Peers(%+v) (-want +got):\n%s", name, tt.wanted, diff)
		}
	}
}

func TestSomeOfTakesEachPeerNowAndThen(t *testing.T) {
	t.Parallel()
	all := []Peer{{Node: "a"}, {Node: "b"}, {Node: "c"}}
	for limit, want := range map[int]int{-1: 3, 0: 3, 1: 1, 2: 2, 3: 3, 4: 3} {
		first := map[node.ID]int{}
		for range 200 { // that one of three is never first has odds of 1 to 10³⁴
			got := someOf(slices.Clone(all), limit)
			if len(got) != want || len(slices.Compact(nodesOf(got))) != want {
				t.Fatalf("someOf(3, %d) = %v, want %d of them", limit, got, want)
			}
			first[got[0].Node]++
		}
		if len(first) != 3 {
			t.Errorf("limit %d: only %v came first", limit, first)
		}
	}
}
