package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"berth/pkg/twirpkit"
	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
)

const (
	// overshootLimit bounds the whole of a test here; nothing in it waits for less.
	overshootLimit = 3 * time.Minute

	// beatEvery keeps nodes that only beat alive: a lease lasts 30 s.
	beatEvery = 5 * time.Second
)

// fleet is nodes that only beat, in front of the schedulers of a stack.
type fleet struct {
	*stack
	clients []schedulerv1.Scheduler // each asks another scheduler first, with a gateway's token
	ids     []string
}

// newFleet starts a stack of as many schedulers, and nodes with room for capacity sandboxes each.
func newFleet(t *testing.T, schedulers, nodes int, capacity uint32) *fleet {
	t.Helper()
	f := &fleet{stack: start(t, "--data", dataFolder(t), "--schedulers", strconv.Itoa(schedulers), "--gateways", "1", "--nodes", "1")}
	var secrets struct {
		NodeToken    string `json:"node_token"`
		GatewayToken string `json:"gateway_token"`
	}
	if err := json.Unmarshal(must[[]byte](t)(os.ReadFile(filepath.Join(f.data, "state.json"))), &secrets); err != nil {
		t.Fatal(err)
	}
	urls := make([]string, schedulers)
	for i, s := range f.Schedulers {
		urls[i] = s.Twirp
	}
	client := func(first int, token string) schedulerv1.Scheduler {
		c := must[*twirpkit.Failover](t)(twirpkit.NewFailover(append(append([]string{}, urls[first:]...), urls[:first]...), twirpkit.FailoverOptions{
			Token: token, Transport: &http.Transport{MaxIdleConnsPerHost: 64},
		}))
		t.Cleanup(c.CloseIdleConnections)
		return schedulerv1.NewSchedulerProtobufClient(c.Base(), c)
	}
	for i := range schedulers {
		f.clients = append(f.clients, client(i, secrets.GatewayToken))
	}
	beats := client(0, secrets.NodeToken)
	for n := range nodes {
		f.ids = append(f.ids, fmt.Sprintf("fleet-%d", n))
	}
	beat := func(ctx context.Context, id string) error {
		_, err := beats.Heartbeat(ctx, &schedulerv1.HeartbeatRequest{
			NodeId: id, ServiceInstanceId: "fleet", Endpoint: "http://127.0.0.1:9/", Capacity: &schedulerv1.Capacity{Sandboxes: capacity},
			Labels: map[string]string{"fleet": "yes"}, Capabilities: []string{"create_key"},
			Snapshot: &schedulerv1.NodeSnapshot{Status: schedulerv1.NodeStatus_NODE_STATUS_READY, CpuCount: 8, MemoryTotalBytes: 64 << 30},
		})
		return err
	}
	for _, id := range f.ids {
		if err := beat(t.Context(), id); err != nil {
			t.Fatalf("register %s: %v", id, err)
		}
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var beating sync.WaitGroup
	beating.Go(func() {
		tick := time.NewTicker(beatEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			for _, id := range f.ids {
				_ = beat(ctx, id) // a scheduler may just have been killed; the lease lasts six of these
			}
		}
	})
	t.Cleanup(func() { stop(); beating.Wait() })
	return f
}

// place asks for room until it is told yes or no: an answer that was lost with its scheduler is asked for
// again under the same request id, of the next one. It returns the node, or "" where no node has room.
func (f *fleet) place(ctx context.Context, caller int, request string) (string, error) {
	for try := caller; ; try++ {
		placed, err := f.clients[try%len(f.clients)].Schedule(ctx, &schedulerv1.ScheduleRequest{
			TenantId: "fleet", RequestId: request, ReservationTtlMs: 900_000, Resources: &schedulerv1.Resources{CpuMillis: 100, MemoryBytes: 1 << 20},
			Constraints: &schedulerv1.Constraints{Labels: map[string]string{"fleet": "yes"}},
		})
		decoded := rpcerr.Decode(err)
		switch {
		case err == nil:
			return placed.GetNode().GetNodeId(), nil
		case errors.Is(decoded, node.ErrNoRoom):
			return "", nil
		case ctx.Err() != nil:
			return "", err
		}
		if told, ok := errors.AsType[*node.Refused](decoded); ok && !errors.Is(told, node.ErrContended) {
			return "", err
		}
		pause := time.NewTimer(pollPause)
		select {
		case <-ctx.Done():
		case <-pause.C:
		}
	}
}

// placeAll runs creates at once, each caller one after another, and returns how many found room. killAt
// ends a random scheduler once as many creates are answered; 0: none.
func (f *fleet) placeAll(callers, each, killAt int, prefix string) int {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), overshootLimit)
	defer cancel()
	var answered, placed atomic.Int64
	due := make(chan struct{})
	var group sync.WaitGroup
	for caller := range callers {
		group.Go(func() {
			for i := range each {
				on, err := f.place(ctx, caller, fmt.Sprintf("%s-%d-%d", prefix, caller, i))
				if err != nil {
					f.t.Errorf("caller %d: %v", caller, err)
				}
				if on != "" {
					placed.Add(1)
				}
				if answered.Add(1) == int64(killAt) {
					close(due)
				}
			}
		})
	}
	if killAt > 0 {
		select {
		case <-due:
			f.kill(fmt.Sprintf("scheduler-%d", 1+rand.IntN(len(f.Schedulers))))
		case <-ctx.Done():
			f.t.Errorf("only %d creates were answered within %v", answered.Load(), overshootLimit)
		}
	}
	group.Wait()
	return int(placed.Load())
}

// held returns how many holds each node of the fleet has, by SQL, whatever anybody was told.
func (f *fleet) held() map[string]int {
	f.t.Helper()
	out := map[string]int{}
	for _, id := range f.ids {
		out[id] = 0
	}
	for line := range strings.Lines(f.sql("SELECT node_id, count(*) FROM reservations WHERE tenant_id = 'fleet' GROUP BY 1") + "\n") {
		id, count, ok := strings.Cut(strings.TrimSpace(line), "|")
		if n, err := strconv.Atoi(count); ok && err == nil {
			out[id] = n
		}
	}
	return out
}

// TestThreeSchedulersFillEightNodesAndNoFurther: at half of the room no node is further from the mean than
// spreadBound; then more creates than there is room for, and one scheduler is killed among them.
func TestThreeSchedulersFillEightNodesAndNoFurther(t *testing.T) {
	t.Parallel()
	const (
		schedulers, nodes, capacity = 3, 8, 16
		callers, half               = 32, nodes * capacity / 2
		spreadBound                 = 6 // each scheduler knows of the others' placements only what their locks show it
	)
	f := newFleet(t, schedulers, nodes, capacity)

	if placed := f.placeAll(callers, half/callers, 0, "half"); placed != half {
		t.Errorf("%d of %d creates found room while half of it was free", placed, half)
	}
	held := f.held()
	t.Logf("at half of the room: %v", held)
	for id, n := range held {
		if away := n - half/nodes; away < -spreadBound || away > spreadBound {
			t.Errorf("%s has %d of %d at half of the room, want %d ± %d", id, n, half, half/nodes, spreadBound)
		}
	}

	const each = 3 // 96 creates for the 64 slots that are left
	placed := f.placeAll(callers, each, 1+rand.IntN(callers*each/2), "rest")
	if placed != nodes*capacity-half {
		t.Errorf("%d creates found room, want each of the %d slots that were left, and none twice", placed, nodes*capacity-half)
	}
	for id, n := range f.held() {
		if n != capacity {
			t.Errorf("%s holds %d, want its %d", id, n, capacity)
		}
	}
	if twice := f.sql("SELECT count(*) FROM (SELECT placement_id FROM reservations WHERE tenant_id = 'fleet' GROUP BY 1 HAVING count(*) > 1) AS t"); twice != "0" {
		t.Errorf("%s placements hold room twice", twice)
	}
	if lost := f.sql("SELECT count(*) FROM placements AS p WHERE tenant_id = 'fleet' AND outcome = 'reserved' AND NOT EXISTS (SELECT FROM reservations AS r WHERE r.reservation_id = p.reservation_id)"); lost != "0" {
		t.Errorf("%s placements are reserved without a hold", lost)
	}
}

// TestAsManyOneSlotNodesAsCallersSeatThemAll: nobody is told that there is no room while a node is free,
// though three schedulers want the same few and one of them is killed.
func TestAsManyOneSlotNodesAsCallersSeatThemAll(t *testing.T) {
	t.Parallel()
	const schedulers, callers = 3, 48
	f := newFleet(t, schedulers, callers, 1)
	if placed := f.placeAll(callers, 1, 1+rand.IntN(callers/2), "one"); placed != callers {
		t.Errorf("%d of %d callers found a node", placed, callers)
	}
	for id, n := range f.held() {
		if n != 1 {
			t.Errorf("%s holds %d, want 1", id, n)
		}
	}
}
