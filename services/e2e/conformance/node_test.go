package conformance

import (
	"context"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
)

const (
	// beatEvery stands for the node's 5 s; everything else of its time is scaled alike.
	beatEvery = 250 * time.Millisecond

	firstBeat = beatEvery / 50 // 100 ms of 5 s

	cluster = "conformance"

	boxCPU    = 2
	boxMemory = 512 << 20
)

// cpuConfig is what each of these nodes can do, and so what all can do.
const cpuConfig = `{"kvm_capabilities":["5"],"cpuid_modifiers":[{"leaf":"0x1","subleaf":"0x0","flags":0,"modifiers":[{"register":"eax","bitmap":"0b00000000000000000000000000000110"}]}],"msr_modifiers":[]}`

// pauses are what the node waits after failures: 5, 10, 20, 40, then 60 s.
var pauses = []time.Duration{beatEvery, 2 * beatEvery, 4 * beatEvery, 8 * beatEvery, 12 * beatEvery}

// box is one sandbox in a node's store.
type box string

const (
	creating box = "creating"
	running  box = "running"
	paused   box = "paused"
)

// agentNode is one process of AgentENV's node, with its own channel to the scheduler.
type agentNode struct {
	id, instance, p2p, cpuConfig string

	t      *testing.T
	wire   wire
	events chan []any
	end    context.CancelFunc
	done   sync.WaitGroup

	mu      sync.Mutex
	boxes   map[string]box
	begun   int           // heartbeats begun
	heard   int           // the number of the last one that was answered well
	changed chan struct{} // closed and replaced with each answer
	lastErr error
	told    bool   // a heartbeat was answered, so the CPU configuration is not sent again
	given   string // the CPU template that came
	creates uint64
}

// startNode starts a node process that finds boxes in its store.
func startNode(t *testing.T, w wire, id string, boxes map[string]box) *agentNode {
	t.Helper()
	n := &agentNode{
		id: id, instance: uuid.NewString(), p2p: id + ":7000", cpuConfig: cpuConfig,
		t: t, wire: w, events: make(chan []any, 1000), boxes: map[string]box{}, changed: make(chan struct{}),
	}
	maps.Copy(n.boxes, boxes)
	ctx, end := context.WithCancel(context.WithoutCancel(t.Context()))
	n.end = end
	n.done.Go(func() { n.beat(ctx) })
	n.done.Go(func() { n.report(ctx) })
	t.Cleanup(n.kill)
	return n
}

// beat is the loop of heartbeats.
func (n *agentNode) beat(ctx context.Context) {
	failed := 0
	for wait := firstBeat; ; {
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		number, set := n.heartbeat()
		answer, err := ask(ctx, n.wire, "Heartbeat", set)
		if err != nil {
			wait = pauses[min(failed, len(pauses)-1)]
			failed++
		} else {
			wait, failed = beatEvery, 0
		}
		n.answered(number, answer, err)
	}
}

// heartbeat returns what the node says of itself now.
func (n *agentNode) heartbeat() (int, fields) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.begun++
	count := map[box]int{}
	for _, state := range n.boxes {
		count[state]++
	}
	config := n.cpuConfig
	if n.told {
		config = ""
	}
	return n.begun, fields{
		"node_id": n.id, "cluster_id": cluster, "service_instance_id": n.instance, "version": "0.9.1", "commit": "0f3a",
		"machine_info": fields{"cpu_family": "6", "cpu_model": "143", "cpu_model_name": "Xeon", "cpu_architecture": "x86_64", "cpu_config_json": config},
		"snapshot": fields{
			"status": "NODE_STATUS_READY", "allocated_cpu": boxCPU * (count[running] + count[creating]),
			"allocated_memory_bytes": boxMemory * (count[running] + count[creating]), "cpu_percent": 12, "cpu_count": 64,
			"memory_used_bytes": 4 << 30, "memory_total_bytes": 256 << 30,
			"disks":         []any{fields{"mount_point": "/", "device": "/dev/nvme0n1", "filesystem_type": "ext4", "used_bytes": 1 << 30, "total_bytes": 1 << 40}},
			"sandbox_count": count[running], "sandbox_starting_count": count[creating], "create_successes": n.creates,
			"reported_at_unix_ms": time.Now().UnixMilli(), "paused_sandbox_count": count[paused],
			"paused_allocated_cpu": boxCPU * count[paused], "paused_allocated_memory_bytes": boxMemory * count[paused],
		},
		"sandbox_ids":  slices.Sorted(maps.Keys(n.boxes)),
		"p2p_endpoint": fields{"backend": "tcp", "address": n.p2p},
	}
}

func (n *agentNode) answered(number int, answer fields, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lastErr = err
	if err == nil {
		n.heard, n.told = number, true
		if template, ok := at(answer, "cpu_config_json").(string); ok { // it comes once
			n.given = template
		}
	}
	close(n.changed)
	n.changed = make(chan struct{})
}

// report sends events in batches as they come, each once.
func (n *agentNode) report(ctx context.Context) {
	for {
		var batch []any
		select {
		case <-ctx.Done():
			return
		case batch = <-n.events:
		}
		// Whether it arrives is not known to the node, and not asked again.
		_, _ = ask(ctx, n.wire, "ReportSandboxEvent", fields{
			"node_id": n.id, "cluster_id": cluster, "service_instance_id": n.instance, "events": batch,
		})
	}
}

func (n *agentNode) tell(kind string, ids ...string) {
	batch := make([]any, len(ids))
	for i, id := range ids {
		batch[i] = fields{"sandbox_id": id, "event_type": "SANDBOX_EVENT_TYPE_" + kind, "requested_cpu": boxCPU, "requested_memory_bytes": boxMemory}
	}
	n.events <- batch
}

// set puts sandboxes into the store in a state, or takes them out of it where that is "".
func (n *agentNode) set(state box, ids ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, id := range ids {
		if state == "" {
			delete(n.boxes, id)
			continue
		}
		n.boxes[id] = state
	}
}

// create starts a sandbox, as a gateway's POST does, and returns its id, which the node drew.
func (n *agentNode) create() string {
	id := uuid.NewString()
	n.set(creating, id)
	n.set(running, id)
	n.mu.Lock()
	n.creates++
	n.mu.Unlock()
	n.tell("CREATE", id)
	return id
}

func (n *agentNode) pause(id string)  { n.set(paused, id); n.tell("PAUSE", id) }
func (n *agentNode) resume(id string) { n.set(running, id); n.tell("RESUME", id) }
func (n *agentNode) remove(id string) { n.set("", id); n.tell("DELETE", id) }

// heardSince waits until a heartbeat that began after this call was answered well.
func (n *agentNode) heardSince(t *testing.T) {
	t.Helper()
	n.mu.Lock()
	wanted := n.begun + 1
	n.mu.Unlock()
	limit := time.NewTimer(settleLimit)
	defer limit.Stop()
	for {
		n.mu.Lock()
		heard, changed, err := n.heard, n.changed, n.lastErr
		n.mu.Unlock()
		if heard >= wanted {
			return
		}
		select {
		case <-changed:
		case <-limit.C:
			t.Fatalf("%s: no heartbeat was answered well within %v; the last answer: %v", n.id, settleLimit, err)
		}
	}
}

// stored returns the store.
func (n *agentNode) stored() map[string]box {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.boxes)
}

// template returns the CPU template that this process was given, "" if none was.
func (n *agentNode) template() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.given
}

// kill ends the process at once; a second call does nothing.
func (n *agentNode) kill() {
	n.end()
	n.done.Wait()
}

// terminate ends the process as SIGTERM does: it unregisters first, then parks its sandboxes, which it
// returns.
func (n *agentNode) terminate(t *testing.T) map[string]box {
	t.Helper()
	n.kill()
	if _, err := ask(t.Context(), n.wire, "UnregisterNode", fields{"node_id": n.id, "service_instance_id": n.instance}); err != nil {
		t.Errorf("%s: UnregisterNode = %v", n.id, err)
	}
	return n.stored()
}
