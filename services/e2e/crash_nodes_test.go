package e2e

import (
	"context"
	"fmt"
	"testing"

	adminv1 "berth/rpc/admin/v1"
	schedulerv1 "berth/rpc/scheduler/v1"
)

// deed is one call about a node, and what of it is in the database: each query counts 0 before it and 1 after it,
// whatever happened between, and all of them the same at any moment.
type deed struct {
	name string
	at   string // part of the statement in which its commit waits

	// early is the step at which it has begun and is not done.
	early step

	call  func(ctx context.Context, r *replica, n crashed) error
	marks []string // of $1, the node, and $2, the sandbox that is bound there, with "-new" for another

	// again repeats it as its caller would who heard nothing; nil: call. It may be refused where it was done.
	again func(ctx context.Context, r *replica, n crashed, done bool) error
}

// crashed is a node of one deed, with a sandbox.
type crashed struct {
	id, box, endpoint string
}

// beat is a heartbeat of an instance with a roster.
func (n crashed) beat(instance string, seq int64, roster ...string) *schedulerv1.HeartbeatRequest {
	return &schedulerv1.HeartbeatRequest{
		NodeId: n.id, ServiceInstanceId: instance, Endpoint: n.endpoint, Seq: seq, SandboxIds: roster,
		Snapshot: &schedulerv1.NodeSnapshot{Status: schedulerv1.NodeStatus_NODE_STATUS_READY, CpuCount: 8, MemoryTotalBytes: 8 << 30},
	}
}

func heartbeat(ctx context.Context, r *replica, request *schedulerv1.HeartbeatRequest) error {
	_, err := r.client.Heartbeat(ctx, request)
	return err
}

// deeds are the commits of scheduler.md 4.3, 4.5, 4.7, 4.8 and of the end of a sandbox.
func deeds() []deed {
	const (
		fed      = `SELECT count(*) FROM route_feed AS f JOIN bindings AS b ON b.sandbox_id = f.key AND b.revision = f.revision WHERE f.key = `
		lease    = `SELECT count(*) FROM node_leases WHERE node_id = $1 AND `
		tell     = schedulerv1.SandboxEventType_SANDBOX_EVENT_TYPE_CREATE
		newBound = `SELECT count(*) FROM bindings WHERE sandbox_id = $2 || '-new' AND node_id = $1 AND state = 'bound'`
	)
	return []deed{
		{
			name: "a plain heartbeat", at: "l.node_id, n.cordoned",
			call: func(ctx context.Context, r *replica, n crashed) error {
				return heartbeat(ctx, r, n.beat("i1", 2, n.box))
			},
			marks: []string{lease + `node_seq = 2 AND $2 <> ''`},
		},
		{
			name: "a heartbeat that brings a sandbox", at: "commit",
			early: step{block: `LOCK TABLE bindings IN SHARE MODE`, at: "bindings"},
			call: func(ctx context.Context, r *replica, n crashed) error {
				return heartbeat(ctx, r, n.beat("i1", 2, n.box, n.box+"-new"))
			},
			marks: []string{
				lease + `node_seq = 2 AND $2 <> ''`, newBound, fed + `$2 || '-new' AND $1 <> ''`,
				`SELECT count(*) FROM sandbox_events WHERE kind = 'adopted' AND node_id = $1 AND sandbox_id = $2 || '-new'`,
			},
		},
		{
			name: "a heartbeat of the next process", at: "commit",
			early: step{block: `LOCK TABLE node_leases IN SHARE MODE`, at: "l.node_id, n.cordoned"},
			call: func(ctx context.Context, r *replica, n crashed) error {
				return heartbeat(ctx, r, n.beat("i2", 1, n.box))
			},
			marks: []string{lease + `service_instance_id = 'i2' AND $2 <> ''`, lease + `epoch = 2 AND $2 <> ''`, lease + `retired = '{i1}' AND $2 <> ''`},
		},
		{
			name: "an end of the node", at: "commit",
			early: step{block: `LOCK TABLE node_leases IN SHARE MODE`, at: "ended_at = clock_timestamp()"},
			call: func(ctx context.Context, r *replica, n crashed) error {
				_, err := r.client.UnregisterNode(ctx, &schedulerv1.UnregisterNodeRequest{NodeId: n.id, ServiceInstanceId: "i1"})
				return err
			},
			marks: []string{
				lease + `ended_at IS NOT NULL AND $2 <> ''`,
				`SELECT count(*) FROM bindings WHERE sandbox_id = $2 AND node_id = $1 AND state = 'parked' AND ended_by = 'unregistered'`,
				fed + `$2 AND b.state = 'parked' AND b.node_id = $1`,
				`SELECT count(*) FROM sandbox_events WHERE kind = 'node_unregistered' AND node_id = $1 AND $2 <> ''`,
			},
		},
		{
			name: "an event", at: "commit",
			early: step{block: `LOCK TABLE bindings IN SHARE MODE`, at: "bindings"},
			call: func(ctx context.Context, r *replica, n crashed) error {
				_, err := r.client.ReportSandboxEvent(ctx, &schedulerv1.ReportSandboxEventRequest{
					NodeId: n.id, ServiceInstanceId: "i1",
					Events: []*schedulerv1.SandboxEvent{{SandboxId: n.box + "-new", EventType: tell, RequestedCpu: 1, RequestedMemoryBytes: 1 << 20, Seq: 1}},
				})
				return err
			},
			marks: []string{
				newBound, fed + `$2 || '-new' AND $1 <> ''`, lease + `event_seq = 1 AND $2 <> ''`,
				`SELECT count(*) FROM reservations WHERE node_id = $1 AND sandbox_id = $2 || '-new'`,
				`SELECT count(*) FROM sandbox_events WHERE kind = 'create' AND effect <> 'repeated' AND node_id = $1 AND sandbox_id = $2 || '-new'`,
			},
		},
		{
			name: "an end of a sandbox", at: "commit",
			early: step{block: `LOCK TABLE bindings IN SHARE MODE`, at: "bindings"},
			call: func(ctx context.Context, r *replica, n crashed) error {
				_, err := r.holds.ReleaseSandbox(ctx, &schedulerv1.ReleaseSandboxRequest{SandboxId: n.box})
				return err
			},
			marks: []string{
				`SELECT count(*) FROM bindings WHERE sandbox_id = $2 AND node_id = $1 AND state = 'gone' AND ended_by = 'deleted'`,
				fed + `$2 AND b.state = 'gone' AND b.node_id = $1`,
			},
		},
		{
			name: "a drain", at: "commit",
			early: step{block: `LOCK TABLE drains IN SHARE MODE`, at: "INTO drains"},
			call: func(ctx context.Context, r *replica, n crashed) error {
				_, err := r.admin.StartDrain(ctx, &adminv1.StartDrainRequest{NodeId: n.id})
				return err
			},
			again: func(ctx context.Context, r *replica, n crashed, done bool) error {
				_, err := r.admin.StartDrain(ctx, &adminv1.StartDrainRequest{NodeId: n.id})
				if done != (err != nil) {
					return fmt.Errorf("StartDrain = %w, want it refused: %t", err, done)
				}
				return nil
			},
			marks: []string{
				`SELECT count(*) FROM drains WHERE node_id = $1 AND ended_at IS NULL AND $2 <> ''`,
				`SELECT count(*) FROM nodes AS n JOIN drains AS d USING (drain_id) WHERE n.node_id = $1 AND n.cordoned AND $2 <> ''`,
			},
		},
	}
}

// TestASchedulerKilledAroundACommitAboutANodeLeavesAllOfItOrNothing kills a replica as it commits what a node, its gateway
// or an operator asked for, and once it has. Whoever heard nothing asks the other replica again.
func TestASchedulerKilledAroundACommitAboutANodeLeavesAllOfItOrNothing(t *testing.T) {
	t.Parallel()
	c := newCrashCell(t)
	for table, change := range map[string]string{"node_leases": "INSERT OR UPDATE", "bindings": "UPDATE", "drains": "INSERT"} {
		c.exec(`CREATE CONSTRAINT TRIGGER at_end AFTER ` + change + ` ON ` + table + ` DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION at_commit()`)
	}
	for i, d := range deeds() {
		steps := []step{{block: atCommit, at: d.at}, {block: atCommit, at: d.at, late: true}}
		if d.early.block != "" {
			steps = append(steps, d.early)
		}
		for j, s := range steps {
			early := s.block != atCommit
			s.name = fmt.Sprintf("%s, early: %t, late: %t", d.name, early, s.late)
			n := crashed{fmt.Sprintf("n-%d-%d", i, j), fmt.Sprintf("box-%d-%d", i, j), fmt.Sprintf("http://10.0.%d.%d:8000", i, 10+j)}
			if err := heartbeat(t.Context(), c.keep, n.beat("i1", 1, n.box)); err != nil {
				t.Fatalf("%s: a node = %v", s.name, err)
			}
			c.exec(`UPDATE node_leases SET expires_at = clock_timestamp() + interval '1 day', reconcile_due = clock_timestamp() + interval '1 day' WHERE node_id = $1`, n.id)
			// marked returns how many of the marks there are, each once.
			marked := func() (there int) {
				for _, mark := range d.marks {
					switch got := c.count(mark, n.id, n.box); got {
					case 0:
					case 1:
						there++
					default:
						t.Errorf("%s: %d, want one at most: %s", s.name, got, mark)
					}
				}
				return there
			}
			if there := marked(); there != 0 {
				t.Fatalf("%s: %d marks of it are there before it", s.name, there)
			}
			c.killAt(s, nil, func(ctx context.Context, r *replica) {
				if err := d.call(ctx, r, n); err == nil {
					t.Errorf("%s: the replica answered; the test killed it too late", s.name)
				}
			}, func() bool { return marked() == len(d.marks) })

			there := marked()
			if there != 0 && there != len(d.marks) || s.late && there == 0 || early && there != 0 {
				t.Errorf("%s: after the kill %d of %d marks are there, want all or none, none where it was early", s.name, there, len(d.marks))
			}
			var err error
			if d.again != nil {
				err = d.again(t.Context(), c.keep, n, there > 0)
			} else {
				err = d.call(t.Context(), c.keep, n)
			}
			if err != nil {
				t.Errorf("%s: asked again elsewhere = %v", s.name, err)
			}
			if there := marked(); there != len(d.marks) {
				t.Errorf("%s: asked again, %d of %d marks are there", s.name, there, len(d.marks))
			}
		}
	}
}
