package conformance

import (
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"google.golang.org/grpc/codes"

	"berth/migrations"
	"berth/pkg/pgtest"
)

// stack is two replicas over one database, behind one address.
type stack struct {
	t        *testing.T
	db       *pgtest.Database
	replicas []*replica
	service  *service
	nodes    map[string]*agentNode
	gateway  *agentGateway
}

// quick lets rosters decide in seconds what they decide in a minute. A hold that nobody can name ends by
// itself where a node's roster tells of the sandbox before its gateway has recorded it.
var quick = []string{"--binding-grace=2s", "--full-reconcile=1s", "--tombstone-grace=1s", "--reservation-ttl=10s"}

// newStack starts two replicas that know ids, without any node.
func newStack(t *testing.T, db *pgtest.Database, ids ...string) *stack {
	t.Helper()
	s := &stack{t: t, db: db, nodes: map[string]*agentNode{}}
	flags := append([]string{"--config", agentENVFile(t, ids...)}, quick...)
	address := login(t, db)
	var behind []string
	for range 2 {
		r := serve(t, address, flags...)
		s.replicas = append(s.replicas, r)
		behind = append(behind, r.grpc)
	}
	s.service = newService(t, behind...)
	s.gateway = &agentGateway{t, newChannel(t, s.service.address)}
	return s
}

// start starts a node process with a channel of its own through the service.
func (s *stack) start(id string, boxes map[string]box) *agentNode {
	s.t.Helper()
	n := startNode(s.t, newTonic(s.t, s.service.address), id, boxes)
	s.nodes[id] = n
	return n
}

// everybody returns every way to reach every replica.
func (s *stack) everybody() map[string]wire {
	out := map[string]wire{}
	for i, r := range s.replicas {
		out[fmt.Sprintf("replica %d by tonic", i+1)] = newTonic(s.t, r.grpc)
		out[fmt.Sprintf("replica %d by grpc-go", i+1)] = newChannel(s.t, r.grpc)
		out[fmt.Sprintf("replica %d by Twirp's JSON", i+1)] = &twirp{url: r.twirpURL}
		out[fmt.Sprintf("replica %d by Twirp's protobuf", i+1)] = &twirp{url: r.twirpURL, binary: true}
	}
	return out
}

// status returns the observed status of a node as a gateway sees it, and its instance.
func (s *stack) status(id string) (status, instance string) {
	s.t.Helper()
	answer, err := ask(s.t.Context(), s.gateway.wire, "GetNode", fields{"node_id": id})
	if err != nil {
		return err.Error(), ""
	}
	status, _ = at(answer, "node", "snapshot", "status").(string)    // none is ""
	instance, _ = at(answer, "node", "service_instance_id").(string) // none is ""
	return status, instance
}

// create must create.
func (s *stack) create(hint fields) (string, place) {
	s.t.Helper()
	id, p, err := s.gateway.create(hint, s.nodes)
	if err != nil {
		s.t.Fatal(err)
	}
	return id, p
}

func (s *stack) count(query string, args ...any) int {
	s.t.Helper()
	var n int
	if err := s.db.QueryRow(s.t.Context(), query, args...).Scan(&n); err != nil {
		s.t.Fatalf("%s: %v", query, err)
	}
	return n
}

// ids returns the sorted ids of a list of nodes or peers.
func ids(answer fields, list string) []string {
	var out []string
	all, _ := answer[list].([]any) // none is empty
	for _, one := range all {
		id, _ := at(one.(fields), "node_id").(string) // none is ""
		out = append(out, id)
	}
	return out
}

func (s *stack) list(rpc, list string, set fields) []string {
	s.t.Helper()
	answer, err := ask(s.t.Context(), s.gateway.wire, rpc, set)
	if err != nil {
		s.t.Fatalf("%s = %v", rpc, err)
	}
	return ids(answer, list)
}

// TestAFleetOfAgentENVsProcessesLivesWithBerth plays the whole life of a fleet.
func TestAFleetOfAgentENVsProcessesLivesWithBerth(t *testing.T) {
	t.Parallel()
	s := newStack(t, pgtest.New(t, migrations.FS), "node-a", "node-b", "node-c", "node-a-again")
	g := s.gateway

	// Nobody was heard: the list is there, and nothing may be observed. As nothing is ready, limits are
	// set, and no reporter is known, there is no place.
	if diff := cmp.Diff([]string{"node-a", "node-a-again", "node-b", "node-c"}, s.list("ListNodes", "nodes", nil)); diff != "" {
		t.Errorf("ListNodes (-want +got):\n%s", diff)
	}
	if got := s.list("ListObservedNodes", "nodes", nil); len(got) != 0 {
		t.Errorf("ListObservedNodes before any heartbeat = %v, want none", got)
	}
	if _, err := g.schedule(cold); httpStatus(err) != http.StatusServiceUnavailable {
		t.Errorf("Schedule before any heartbeat = %v, want unavailable", err)
	}
	for _, id := range []string{"node-a", "node-b", "node-c"} {
		s.start(id, nil)
	}
	for _, n := range s.nodes {
		n.heardSince(t)
	}
	for id, n := range s.nodes {
		if status, instance := s.status(id); status != "NODE_STATUS_READY" || instance != n.instance {
			t.Errorf("%s is %s of instance %s, want ready of %s", id, status, instance, n.instance)
		}
	}
	s.everyProcessIsGivenTheTemplate()
	s.theDoorIsOpenToPicks()
	s.createsAreFoundByAnybody()
	s.theLastRecordWins()
	s.pausesStayAndDeletesGo()
	s.aNewProcessOfANodeKeepsItsSandboxes()
	s.artifactsAreFoundWhereTheyAre()
	s.sandboxesComeBackUnderANewNodeID()
	s.metricsAreAgentENVs()
	s.deadReplicasAreLeft()
}

// everyProcessIsGivenTheTemplate waits for what all CPUs have in common, the same text for all.
func (s *stack) everyProcessIsGivenTheTemplate() {
	s.t.Helper()
	for id, n := range s.nodes {
		eventually(s.t, settleLimit, func() error {
			if got := n.template(); got != cpuConfig {
				return fmt.Errorf("%s was given the CPU template %q, want %q", id, got, cpuConfig)
			}
			return nil
		})
	}
}

// theDoorIsOpenToPicks asks for any node, as AgentENV's gateway does for calls that create nothing.
func (s *stack) theDoorIsOpenToPicks() {
	before := s.count("SELECT count(*) FROM placements") + s.count("SELECT count(*) FROM reservations")
	picked := map[string]bool{}
	for range 12 {
		p, err := s.gateway.schedule(nil)
		if err != nil || p.endpoint != endpoint(p.id) || s.nodes[p.id] == nil {
			s.t.Fatalf("Schedule without a hint = %v, %v, want a node that is ready", p, err)
		}
		picked[p.id] = true
	}
	if len(picked) != len(s.nodes) {
		s.t.Errorf("twelve picks by round_robin took %v, want each node", picked)
	}
	if after := s.count("SELECT count(*) FROM placements") + s.count("SELECT count(*) FROM reservations"); after != before {
		s.t.Errorf("picks wrote: %d rows, want %d", after, before)
	}
}

// createsAreFoundByAnybody creates by both hints, some at once, and looks up everywhere.
func (s *stack) createsAreFoundByAnybody() {
	var mu sync.Mutex
	where := map[string]place{}
	var group sync.WaitGroup
	for _, hint := range []fields{cold, sandbox, cold, sandbox, cold, sandbox} {
		group.Go(func() {
			id, p, err := s.gateway.create(hint, s.nodes)
			if err != nil {
				s.t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			where[id] = p
		})
	}
	group.Wait()
	for name, w := range s.everybody() {
		for id, p := range where {
			if err := (&agentGateway{s.t, w}).finds(id, p.id); err != nil {
				s.t.Errorf("%s: %v", name, err)
			}
		}
	}
	// What was counted with a hold is counted by the nodes now.
	eventually(s.t, settleLimit, func() error {
		if left := s.count("SELECT count(*) FROM reservations"); left != 0 {
			return fmt.Errorf("%d holds left", left)
		}
		return nil
	})
	for id, p := range where {
		s.nodes[p.id].remove(id)
	}
	for id := range where {
		eventually(s.t, settleLimit, func() error { return s.gateway.loses(id) })
	}
}

// theLastRecordWins records one sandbox on two nodes, as two gateways may.
func (s *stack) theLastRecordWins() {
	id := uuid.NewString()
	for _, on := range []string{"node-a", "node-b", "node-a", "node-c"} {
		if err := s.gateway.record(id, place{on, endpoint(on)}); err != nil {
			s.t.Errorf("RecordAssignment on %s = %v", on, err)
		}
		if err := s.gateway.finds(id, on); err != nil {
			s.t.Error(err)
		}
	}
	// Nobody runs it: when it is not young any more, the roster of its node ends it.
	eventually(s.t, settleLimit, func() error { return s.gateway.loses(id) })
}

// pausesStayAndDeletesGo shows that the roster of all that is stored is what counts.
func (s *stack) pausesStayAndDeletesGo() {
	id, p := s.create(cold)
	n := s.nodes[p.id]
	n.pause(id)
	n.heardSince(s.t)
	n.heardSince(s.t)
	if err := s.gateway.finds(id, p.id); err != nil {
		s.t.Errorf("paused: %v", err)
	}
	answer, err := ask(s.t.Context(), s.gateway.wire, "GetNode", fields{"node_id": p.id, "cluster_id": cluster})
	if err != nil || at(answer, "node", "snapshot", "paused_sandbox_count") != float64(1) ||
		at(answer, "node", "snapshot", "paused_allocated_memory_bytes") != fmt.Sprint(boxMemory) {
		s.t.Errorf("GetNode = %v, %v, want the paused sandbox in the snapshot", answer, err)
	}
	n.resume(id)
	n.heardSince(s.t)
	if err := s.gateway.finds(id, p.id); err != nil {
		s.t.Errorf("resumed: %v", err)
	}
	n.remove(id)
	eventually(s.t, settleLimit, func() error { return s.gateway.loses(id) })
}

// aNewProcessOfANodeKeepsItsSandboxes kills a node and starts it again: the same id, a new instance.
func (s *stack) aNewProcessOfANodeKeepsItsSandboxes() {
	id, p := s.create(sandbox)
	old := s.nodes[p.id]
	old.heardSince(s.t)
	old.kill()
	s.eventsActAtOnce(old)
	again := s.start(p.id, old.stored())
	again.heardSince(s.t)
	if _, instance := s.status(p.id); instance != again.instance {
		s.t.Errorf("%s has instance %s, want the new process's %s", p.id, instance, again.instance)
	}
	if err := s.gateway.finds(id, p.id); err != nil {
		s.t.Error(err)
	}
	// The former process is late: it is refused, and nothing is taken from the new one.
	_, set := old.heartbeat()
	_, err := ask(s.t.Context(), old.wire, "Heartbeat", set)
	if code, text := refused(err); code != codes.FailedPrecondition || text != "service instance superseded" {
		s.t.Errorf("a heartbeat of the former process = %v, want superseded", err)
	}
	_, err = ask(s.t.Context(), old.wire, "UnregisterNode", fields{"node_id": p.id, "service_instance_id": old.instance})
	if code, text := refused(err); code != codes.FailedPrecondition || text != "service instance mismatch" {
		s.t.Errorf("UnregisterNode of the former process = %v, want a mismatch", err)
	}
	if err := s.gateway.finds(id, p.id); err != nil {
		s.t.Errorf("after the former process spoke: %v", err)
	}
	again.remove(id)
	eventually(s.t, settleLimit, func() error { return s.gateway.loses(id) })
}

// eventsActAtOnce tells of sandboxes as a node does whose next heartbeat is far away.
func (s *stack) eventsActAtOnce(n *agentNode) {
	s.t.Helper()
	tell := func(id string, kinds ...string) {
		s.t.Helper()
		var events []any
		for _, kind := range kinds {
			events = append(events, fields{"sandbox_id": id, "event_type": "SANDBOX_EVENT_TYPE_" + kind, "requested_cpu": boxCPU, "requested_memory_bytes": boxMemory})
		}
		if _, err := ask(s.t.Context(), n.wire, "ReportSandboxEvent", fields{
			"node_id": n.id, "cluster_id": cluster, "service_instance_id": n.instance, "events": events,
		}); err != nil {
			s.t.Errorf("ReportSandboxEvent of %v = %v", kinds, err)
		}
	}
	child := uuid.NewString()
	for _, kinds := range [][]string{{"FORK"}, {"PAUSE"}, {"RESUME"}, {"PAUSE", "RESUME"}} {
		tell(child, kinds...)
		if err := s.gateway.finds(child, n.id); err != nil {
			s.t.Errorf("after %v: %v", kinds, err)
		}
	}
	tell(child, "DELETE")
	if err := s.gateway.loses(child); err != nil {
		s.t.Errorf("after DELETE: %v", err)
	}
}

// artifactsAreFoundWhereTheyAre plays the peer-to-peer calls of nodes.
func (s *stack) artifactsAreFoundWhereTheyAre() {
	w := s.nodes["node-a"].wire
	peers := func(rpc string, set fields) []string {
		s.t.Helper()
		answer, err := ask(s.t.Context(), w, rpc, set)
		if err != nil {
			s.t.Fatalf("%s(%v) = %v", rpc, set, err)
		}
		out := ids(answer, "peers")
		slices.Sort(out)
		return out
	}
	if diff := cmp.Diff([]string{"node-b", "node-c"}, peers("ListP2pPeers", fields{"cluster_id": cluster, "backend": "tcp", "exclude_node_id": "node-a"})); diff != "" {
		s.t.Errorf("ListP2pPeers (-want +got):\n%s", diff)
	}
	key := fields{"cluster_id": cluster, "backend": "tcp", "key": "image/sha256:0a"}
	with := func(name, id string) fields {
		return fields{"cluster_id": cluster, "backend": "tcp", "key": key["key"], name: id}
	}
	for _, id := range []string{"node-a", "node-b", "node-b"} {
		if _, err := ask(s.t.Context(), w, "RecordP2pArtifact", with("node_id", id)); err != nil {
			s.t.Errorf("RecordP2pArtifact of %s = %v", id, err)
		}
	}
	if diff := cmp.Diff([]string{"node-a", "node-b"}, peers("LookupP2pArtifact", key)); diff != "" {
		s.t.Errorf("LookupP2pArtifact (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"node-b"}, peers("LookupP2pArtifact", with("exclude_node_id", "node-a"))); diff != "" {
		s.t.Errorf("LookupP2pArtifact without its caller (-want +got):\n%s", diff)
	}
	if _, err := ask(s.t.Context(), w, "ForgetP2pArtifact", with("node_id", "node-b")); err != nil {
		s.t.Errorf("ForgetP2pArtifact = %v", err)
	}
	if diff := cmp.Diff([]string{"node-a"}, peers("LookupP2pArtifact", key)); diff != "" {
		s.t.Errorf("LookupP2pArtifact after one was forgotten (-want +got):\n%s", diff)
	}
}

// sandboxesComeBackUnderANewNodeID ends a node as an orchestrator does and brings it back as a new Pod.
func (s *stack) sandboxesComeBackUnderANewNodeID() {
	n := s.nodes["node-a"]
	id := n.create()
	if err := s.gateway.record(id, place{n.id, endpoint(n.id)}); err != nil {
		s.t.Fatalf("RecordAssignment = %v", err)
	}
	n.pause(id)
	n.heardSince(s.t)
	parked := n.terminate(s.t)
	delete(s.nodes, n.id)
	if err := s.gateway.loses(id); err != nil {
		s.t.Errorf("after UnregisterNode: %v", err)
	}
	if status, _ := s.status(n.id); status != "rpc error: code = NotFound desc = observed node not found" {
		s.t.Errorf("GetNode of a node that unregistered = %s, want not found", status)
	}
	if diff := cmp.Diff([]string{"node-b", "node-c"}, s.list("ListObservedNodes", "nodes", fields{"cluster_id": " " + cluster + " "})); diff != "" {
		s.t.Errorf("ListObservedNodes (-want +got):\n%s", diff)
	}
	for range 6 {
		if p, err := s.gateway.schedule(cold); err != nil || p.id == n.id {
			s.t.Errorf("Schedule = %v, %v, want a node that is left", p, err)
		}
	}
	// A second call, and one for a node that nobody knows, are answered like the first.
	for _, again := range []string{n.id, "nobody"} {
		if _, err := ask(s.t.Context(), n.wire, "UnregisterNode", fields{"node_id": again, "service_instance_id": n.instance}); err != nil {
			s.t.Errorf("UnregisterNode(%s) again = %v", again, err)
		}
	}
	back := s.start("node-a-again", parked)
	back.heardSince(s.t)
	if err := s.gateway.finds(id, back.id); err != nil {
		s.t.Errorf("after the node came back: %v", err)
	}
}

// deadReplicasAreLeft kills a replica under connections that are kept, and then the other one, after a
// new one has taken the first one's place.
func (s *stack) deadReplicasAreLeft() {
	id, p := s.create(cold)
	s.nodes[p.id].heardSince(s.t)
	for i := range s.replicas {
		s.replicas[i].kill()
		eventually(s.t, settleLimit, func() error { return s.gateway.finds(id, p.id) })
		for _, n := range s.nodes {
			n.heardSince(s.t)
		}
		for name, n := range s.nodes {
			if status, instance := s.status(name); status != "NODE_STATUS_READY" || instance != n.instance {
				s.t.Errorf("after a replica died, %s is %s of %s, want ready of %s", name, status, instance, n.instance)
			}
		}
		other, q := s.create(sandbox)
		if err := s.gateway.finds(other, q.id); err != nil {
			s.t.Errorf("after a replica died: %v", err)
		}
		s.replicas[i] = serve(s.t, login(s.t, s.db), append([]string{"--config", agentENVFile(s.t, "node-a", "node-b", "node-c", "node-a-again")}, quick...)...)
		s.service.mu.Lock()
		s.service.behind[i] = s.replicas[i].grpc
		s.service.mu.Unlock()
	}
	if err := s.gateway.finds(id, p.id); err != nil {
		s.t.Errorf("after every replica died once: %v", err)
	}
}
