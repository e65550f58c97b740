package launch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"time"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/gateway/internal/proxy"
	"berth/services/gateway/internal/routecache"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// deleteTries is how often a node is asked to delete what could not be bound.
const deleteTries = 3

// bind records the sandboxes and keeps their routes for this gateway's next request. It may repeat, so
// the scheduler is asked until it answers or the tries are over; err says what it answered.
func (c *creation) bind(p *placement, ids []sandbox.ID) (sandbox.Revision, error) {
	in := &schedulerv1.RecordAssignmentRequest{
		SandboxId:     string(ids[0]),
		Node:          &schedulerv1.Node{NodeId: string(p.node.ID), Endpoint: p.node.Endpoint},
		ReservationId: p.reservation,
		PlacementId:   p.id,
		TenantId:      c.Tenant,
	}
	for _, id := range ids[1:] {
		in.MoreSandboxIds = append(in.MoreSandboxIds, string(id))
	}
	out, err := c.Scheduler.record(c.ctx, in)
	if err != nil {
		return 0, fmt.Errorf("record %s: %w", ids[0], err)
	}
	if len(out.GetAssigned()) != len(ids) {
		return 0, fmt.Errorf("record %s: scheduler named %d of %d sandboxes", ids[0], len(out.GetAssigned()), len(ids))
	}
	for i, assigned := range out.GetAssigned() {
		c.Routes.Put(route.Route{
			Sandbox: ids[i], Node: p.node.ID, Tenant: c.Tenant, State: sandbox.Bound,
			Revision:    sandbox.Revision(assigned.GetRevision()),
			Incarnation: sandbox.Incarnation(assigned.GetIncarnation()),
		})
	}
	c.Log.InfoContext(c.ctx, "sandbox created", slog.Any("sandbox", ids[0]), slog.Any("node", p.node.ID),
		slog.Int64("placement", p.id), slog.Int64("revision", out.GetAssigned()[0].GetRevision()))
	return sandbox.Revision(out.GetAssigned()[0].GetRevision()), nil
}

// release gives p's room back, and reports whether the scheduler said it is back. A hold that is not
// released expires.
func (c *creation) release(p *placement, reason schedulerv1.ReleaseReason) bool {
	if p.reservation == "" {
		return true
	}
	_, err := c.Scheduler.release(c.ctx, &schedulerv1.ReleasePlacementRequest{
		PlacementId: p.id, ReservationId: p.reservation, Reason: reason,
	})
	if err != nil {
		c.Log.WarnContext(c.ctx, "placement was not released", slog.Any("node", p.node.ID),
			slog.Int64("placement", p.id), slog.Any("error", err))
		return false
	}
	return true
}

// compensate deletes on the node what it made and could not be bound, and gives the room back. cause
// says why. What it cannot delete the node's roster brings up.
func (c *creation) compensate(p *placement, named []string, cause error) {
	deleted := true
	for _, id := range named {
		if err := c.deleteOn(p.node, id); err != nil {
			deleted = false
			c.Log.ErrorContext(c.ctx, "unbound sandbox was not deleted", slog.String("sandbox", id), slog.Any("node", p.node.ID),
				slog.Int64("placement", p.id), slog.Any("error", err))
			continue
		}
		// The recording may have taken effect although its answer was lost.
		if parsed, err := sandbox.ParseID(id); err == nil && uncertain(cause) {
			if _, err := c.Scheduler.ReleaseSandbox(c.ctx, parsed, 0); err != nil {
				c.Log.WarnContext(c.ctx, "binding was not released", slog.Any("sandbox", parsed), slog.Any("error", err))
			}
		}
	}
	c.release(p, schedulerv1.ReleaseReason_RELEASE_REASON_NODE_ERROR)
	outcome := "deleted"
	if !deleted {
		outcome = "failed"
	}
	c.metrics.compensations.WithLabelValues(outcome).Inc()
	c.Log.WarnContext(c.ctx, "create was undone", slog.Any("node", p.node.ID), slog.Int64("placement", p.id),
		slog.String("outcome", outcome), slog.Any("error", cause))
}

// uncertain tells whether a recording that failed so may have been committed.
func uncertain(err error) bool {
	return again(err) || errors.Is(err, context.DeadlineExceeded)
}

// abandon ends sandboxes that nobody knows of: their client left before it was told.
func (c *creation) abandon(p *placement, ids []sandbox.ID, revision sandbox.Revision) {
	for _, id := range ids {
		if err := c.deleteOn(p.node, string(id)); err != nil {
			c.Log.ErrorContext(c.ctx, "sandbox of a client that left was not deleted", slog.Any("sandbox", id),
				slog.Any("node", p.node.ID), slog.Any("error", err))
			continue
		}
		ended, err := c.Scheduler.ReleaseSandbox(c.ctx, id, revision)
		if err != nil {
			c.Log.WarnContext(c.ctx, "binding was not released", slog.Any("sandbox", id), slog.Any("error", err))
			continue
		}
		c.Routes.Put(route.Route{Sandbox: id, Node: p.node.ID, Tenant: c.Tenant, State: sandbox.Gone, Revision: ended})
		c.Log.InfoContext(c.ctx, "sandbox of a client that left was deleted", slog.Any("sandbox", id), slog.Any("node", p.node.ID))
	}
}

// deleteOn asks the node to delete id, three times within the limit. Not there is deleted.
func (c *creation) deleteOn(to *routecache.Node, id string) error {
	ctx, cancel := context.WithTimeout(c.ctx, c.cfg.DeleteLimit)
	defer cancel()
	for tries := 1; ; tries++ {
		err := c.deleteOnce(ctx, to, id)
		if err == nil || tries == deleteTries || !pause(ctx, firstPause<<tries) {
			return err
		}
	}
}

func (c *creation) deleteOnce(ctx context.Context, to *routecache.Node, id string) error {
	ctx, cancel := context.WithTimeout(ctx, max(c.cfg.DeleteLimit/deleteTries, time.Millisecond))
	defer cancel()
	resp, err := c.Nodes.Do(ctx, proxy.NodeCall{Node: to, Method: http.MethodDelete, Target: "/sandboxes/" + url.PathEscape(id)})
	if err != nil {
		return fmt.Errorf("delete on %s: %w", to.ID, err)
	}
	defer func() { _ = resp.Body.Close() }()
	if status := resp.StatusCode; status != http.StatusNotFound && (status < 200 || status >= 300) {
		return fmt.Errorf("delete on %s: node answered %d", to.ID, status)
	}
	return nil
}
