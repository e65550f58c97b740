package adminapi

import (
	"math"
	"time"

	adminv1 "berth/rpc/admin/v1"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/nodes"
	"berth/services/scheduler/internal/placement"
)

func nodeToWire(k *nodes.Known, held placement.Held) *adminv1.Node {
	return &adminv1.Node{
		NodeId: string(k.ID), ClusterId: k.Cluster, Endpoint: k.Endpoint, Source: k.Source, Status: k.Standing, Present: k.Present,
		Cordoned: k.Cordoned, CordonReason: k.CordonReason, DrainId: k.DrainID, LeaseLeftMs: k.LeaseLeft.Milliseconds(),
		LastSeenUnixMs: unixMS(k.LastSeen), BoundSandboxes: narrow(k.Left.Bound), HeldSandboxes: narrow(int(held.Sandboxes)),
		HeldCpuMillis: held.CPUMillis, HeldMemoryBytes: held.MemoryBytes, Labels: k.Labels, Capabilities: k.Capabilities,
		Version: k.Version,
	}
}

func drainToWire(d *nodes.Drain) *adminv1.Drain {
	out := &adminv1.Drain{
		DrainId: d.ID, NodeId: string(d.Node), State: string(d.State), Mode: string(d.Mode), Reason: d.Reason,
		RequestedBy: d.RequestedBy, WasCordoned: d.WasCordoned, Total: narrow(d.Total), Left: narrow(d.Left.Bound),
		HoldsLeft: narrow(d.Left.Holds), MoreBlockers: narrow(d.More), CreatedUnixMs: d.CreatedAt.UnixMilli(),
		TookMs: d.AsOf.Sub(d.CreatedAt).Milliseconds(),
	}
	if d.DeadlineAt != nil {
		out.DeadlineUnixMs, out.DeadlineLeftMs = d.DeadlineAt.UnixMilli(), d.DeadlineAt.Sub(d.AsOf).Milliseconds()
	}
	if d.EndedAt != nil {
		out.EndedUnixMs, out.TookMs = d.EndedAt.UnixMilli(), d.EndedAt.Sub(d.CreatedAt).Milliseconds()
	}
	for _, b := range d.Blockers {
		out.Blockers = append(out.Blockers, &adminv1.Blocker{
			SandboxId: string(b.SandboxID), Reason: reasonOf(d.Mode, b), SinceUnixMs: b.Since.UnixMilli(), TenantId: b.TenantID,
		})
	}
	return out
}

// reasonOf says why b is in the way. No node has the runtime API yet by which a sandbox could be moved, so
// in mode move every sandbox is observed: its node alone decides about it.
func reasonOf(mode nodes.DrainMode, b bindings.Blocker) string {
	switch {
	case b.Hold:
		return "hold"
	case mode == nodes.Move:
		return "observed"
	}
	return "bound"
}

func unixMS(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

// narrow keeps a count within what the wire takes.
func narrow(n int) uint32 { return uint32(min(max(n, 0), math.MaxUint32)) }
