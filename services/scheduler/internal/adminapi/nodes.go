package adminapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/twitchtv/twirp"

	adminv1 "berth/rpc/admin/v1"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
	"berth/services/scheduler/internal/nodes"
	"berth/services/scheduler/internal/placement"
)

const (
	maxReasonBytes = 1024
	maxNameBytes   = 255

	// maxDeadline is a year; a drain that may take longer needs no deadline.
	maxDeadline = 365 * 24 * time.Hour
)

// Nodes is the service of that name.
type Nodes struct {
	known  *nodes.Nodes
	routes *bindings.Bindings
	placer *placement.Placer
}

// NewNodes returns the service.
func NewNodes(known *nodes.Nodes, routes *bindings.Bindings, placer *placement.Placer) *Nodes {
	return &Nodes{known: known, routes: routes, placer: placer}
}

// Twirp returns the service's path and its handler behind intercept.
func (s *Nodes) Twirp(intercept twirp.Interceptor) (prefix string, handler http.Handler) {
	server := adminv1.NewNodesServer(s, twirp.WithServerInterceptors(intercept))
	return server.PathPrefix(), server
}

// ListNodes returns nodes by id. Called by operators; it changes nothing.
func (s *Nodes) ListNodes(ctx context.Context, r *adminv1.ListNodesRequest) (*adminv1.ListNodesResponse, error) {
	if err := node.CheckTag("cluster_id", r.GetClusterId()); err != nil {
		return nil, err
	}
	known, err := s.known.ListKnown(ctx, r.GetClusterId(), r.GetAll())
	if err != nil {
		return nil, err
	}
	held, err := s.placer.Held(ctx, "")
	if err != nil {
		return nil, err
	}
	out := &adminv1.ListNodesResponse{Nodes: make([]*adminv1.Node, len(known))}
	for i := range known {
		out.Nodes[i] = nodeToWire(&known[i], held[known[i].ID])
	}
	return out, nil
}

// GetNode returns one node. Called by operators; it changes nothing.
func (s *Nodes) GetNode(ctx context.Context, r *adminv1.GetNodeRequest) (*adminv1.GetNodeResponse, error) {
	id, err := node.ParseID(r.GetNodeId())
	if err != nil {
		return nil, err
	}
	found, err := s.node(ctx, id)
	return &adminv1.GetNodeResponse{Node: found}, err
}

func (s *Nodes) node(ctx context.Context, id node.ID) (*adminv1.Node, error) {
	known, err := s.known.GetKnown(ctx, id)
	if err != nil {
		return nil, err
	}
	held, err := s.placer.Held(ctx, id)
	if err != nil {
		return nil, err
	}
	return nodeToWire(&known, held[id]), nil
}

// RegisterNode lists a node. Called by operators; the same call again changes nothing.
func (s *Nodes) RegisterNode(ctx context.Context, r *adminv1.RegisterNodeRequest) (*adminv1.RegisterNodeResponse, error) {
	id, err := node.ParseID(r.GetNodeId())
	if err != nil {
		return nil, err
	}
	if strings.TrimSpace(r.GetEndpoint()) == "" {
		return nil, node.ErrAssignmentRequired
	}
	if err := s.known.Register(ctx, nodes.Registration{Node: id, Endpoint: r.GetEndpoint(), Labels: r.GetLabels()}); err != nil {
		return nil, err
	}
	listed, err := s.node(ctx, id)
	return &adminv1.RegisterNodeResponse{Node: listed}, err
}

// RemoveNode makes a registered node absent. Called by operators; it may repeat.
func (s *Nodes) RemoveNode(ctx context.Context, r *adminv1.RemoveNodeRequest) (*adminv1.RemoveNodeResponse, error) {
	id, err := node.ParseID(r.GetNodeId())
	if err != nil {
		return nil, err
	}
	return &adminv1.RemoveNodeResponse{}, s.known.Remove(ctx, id)
}

// CordonNode closes a node to placements. Called by operators; it may repeat.
func (s *Nodes) CordonNode(ctx context.Context, r *adminv1.CordonNodeRequest) (*adminv1.CordonNodeResponse, error) {
	id, err := node.ParseID(r.GetNodeId())
	if err != nil {
		return nil, err
	}
	if err := checkText("reason", r.GetReason(), maxReasonBytes); err != nil {
		return nil, err
	}
	if err := s.known.Cordon(ctx, id, r.GetReason()); err != nil {
		return nil, err
	}
	closed, err := s.node(ctx, id)
	return &adminv1.CordonNodeResponse{Node: closed}, err
}

// UncordonNode opens a node again. Called by operators; it may repeat.
func (s *Nodes) UncordonNode(ctx context.Context, r *adminv1.UncordonNodeRequest) (*adminv1.UncordonNodeResponse, error) {
	id, err := node.ParseID(r.GetNodeId())
	if err != nil {
		return nil, err
	}
	if err := s.known.Uncordon(ctx, id); err != nil {
		return nil, err
	}
	opened, err := s.node(ctx, id)
	return &adminv1.UncordonNodeResponse{Node: opened}, err
}

// StartDrain begins to empty a node. Called by operators; a second call is refused and names the open drain.
func (s *Nodes) StartDrain(ctx context.Context, r *adminv1.StartDrainRequest) (*adminv1.StartDrainResponse, error) {
	order, err := orderOf(r)
	if err != nil {
		return nil, err
	}
	started, err := s.known.StartDrain(ctx, order)
	if err != nil {
		return nil, err
	}
	return &adminv1.StartDrainResponse{Drain: drainToWire(&started)}, nil
}

func orderOf(r *adminv1.StartDrainRequest) (nodes.DrainOrder, error) {
	id, err := node.ParseID(r.GetNodeId())
	if err != nil {
		return nodes.DrainOrder{}, err
	}
	order := nodes.DrainOrder{
		Node: id, Mode: nodes.DrainMode(r.GetMode()), Reason: r.GetReason(), RequestedBy: r.GetRequestedBy(),
	}
	switch order.Mode {
	case nodes.Wait, nodes.Move, nodes.Park:
	case "":
		order.Mode = nodes.Wait
	default:
		return nodes.DrainOrder{}, &rpcerr.Invalid{Text: "mode must be wait, move or park"}
	}
	if r.GetDeadlineMs() > uint64(maxDeadline.Milliseconds()) {
		return nodes.DrainOrder{}, &rpcerr.Invalid{Text: fmt.Sprintf("deadline_ms must be at most %d, a year", maxDeadline.Milliseconds())}
	}
	order.Deadline = time.Duration(r.GetDeadlineMs()) * time.Millisecond
	if order.Mode == nodes.Park && order.Deadline == 0 {
		return nodes.DrainOrder{}, &rpcerr.Invalid{Text: "deadline_ms is required for mode park, which acts at the deadline"}
	}
	if order.RequestedBy == "" {
		order.RequestedBy = "operator"
	}
	if err := checkText("requested_by", order.RequestedBy, maxNameBytes); err != nil {
		return nodes.DrainOrder{}, err
	}
	return order, checkText("reason", order.Reason, maxReasonBytes)
}

// GetDrain returns one drain with its blockers. Called by operators; it changes nothing.
func (s *Nodes) GetDrain(ctx context.Context, r *adminv1.GetDrainRequest) (*adminv1.GetDrainResponse, error) {
	id, of, err := drainNamed(r)
	if err != nil {
		return nil, err
	}
	found, err := s.known.Drain(ctx, id, of)
	if err != nil {
		return nil, err
	}
	return &adminv1.GetDrainResponse{Drain: drainToWire(&found)}, nil
}

// CancelDrain ends an open drain. Called by operators; it may repeat.
func (s *Nodes) CancelDrain(ctx context.Context, r *adminv1.CancelDrainRequest) (*adminv1.CancelDrainResponse, error) {
	id, of, err := drainNamed(r)
	if err != nil {
		return nil, err
	}
	canceled, err := s.known.CancelDrain(ctx, id, of)
	if err != nil {
		return nil, err
	}
	return &adminv1.CancelDrainResponse{Drain: drainToWire(&canceled)}, nil
}

// drainNamed returns the drain id, or the node where there is none.
func drainNamed(r interface {
	GetDrainId() int64
	GetNodeId() string
},
) (int64, node.ID, error) {
	switch {
	case r.GetDrainId() < 0 || r.GetDrainId() == 0 && r.GetNodeId() == "":
		return 0, "", &rpcerr.Invalid{Text: "drain_id or node_id is required"}
	case r.GetNodeId() == "":
		return r.GetDrainId(), "", nil
	}
	id, err := node.ParseID(r.GetNodeId())
	return r.GetDrainId(), id, err
}

// ListDrains returns drains, newest first. Called by operators; it changes nothing.
func (s *Nodes) ListDrains(ctx context.Context, r *adminv1.ListDrainsRequest) (*adminv1.ListDrainsResponse, error) {
	limit, err := pageOf(r.GetLimit())
	if err != nil {
		return nil, err
	}
	if r.GetBeforeDrainId() < 0 {
		return nil, &rpcerr.Invalid{Text: "before_drain_id must not be negative"}
	}
	of, err := optionalNode(r.GetNodeId())
	if err != nil {
		return nil, err
	}
	drains, err := s.known.ListDrains(ctx, nodes.DrainList{Node: of, Open: r.GetOpen(), Before: r.GetBeforeDrainId(), Limit: limit})
	if err != nil {
		return nil, err
	}
	out := &adminv1.ListDrainsResponse{Drains: make([]*adminv1.Drain, len(drains))}
	for i := range drains {
		out.Drains[i] = drainToWire(&drains[i])
	}
	return out, nil
}

// ListOrphans returns what nodes run and may not serve. Called by operators; it changes nothing.
func (s *Nodes) ListOrphans(ctx context.Context, r *adminv1.ListOrphansRequest) (*adminv1.ListOrphansResponse, error) {
	limit, err := pageOf(r.GetLimit())
	if err != nil {
		return nil, err
	}
	page := bindings.OrphanPage{Reason: bindings.OrphanReason(r.GetReason()), Limit: limit}
	switch page.Reason {
	case "", bindings.OrphanDeleted, bindings.OrphanSuperseded, bindings.OrphanHeld:
	default:
		return nil, &rpcerr.Invalid{Text: "reason must be deleted, superseded or held_elsewhere"}
	}
	if page.Node, err = optionalNode(r.GetNodeId()); err != nil {
		return nil, err
	}
	if page.AfterNode, err = optionalNode(r.GetAfterNodeId()); err != nil {
		return nil, err
	}
	if page.AfterSandbox, err = optionalSandbox(r.GetAfterSandboxId()); err != nil {
		return nil, err
	}
	orphans, err := s.routes.ListOrphans(ctx, page)
	if err != nil {
		return nil, err
	}
	out := &adminv1.ListOrphansResponse{Orphans: make([]*adminv1.Orphan, len(orphans))}
	for i, o := range orphans {
		out.Orphans[i] = &adminv1.Orphan{
			NodeId: string(o.NodeID), SandboxId: string(o.SandboxID), Reason: string(o.Reason),
			FirstSeenUnixMs: o.FirstSeenAt.UnixMilli(), LastSeenUnixMs: o.LastSeenAt.UnixMilli(),
		}
		if o.HolderNodeID != nil {
			out.Orphans[i].HolderNodeId = string(*o.HolderNodeID)
		}
	}
	return out, nil
}

// ListEvents returns the log, newest first. Called by operators; it changes nothing.
func (s *Nodes) ListEvents(ctx context.Context, r *adminv1.ListEventsRequest) (*adminv1.ListEventsResponse, error) {
	limit, err := pageOf(r.GetLimit())
	if err != nil {
		return nil, err
	}
	page := bindings.EventPage{Kind: bindings.Kind(r.GetKind()), Limit: limit}
	if err := node.CheckTag("kind", r.GetKind()); err != nil {
		return nil, err
	}
	if page.Sandbox, err = optionalSandbox(r.GetSandboxId()); err != nil {
		return nil, err
	}
	if page.Node, err = optionalNode(r.GetNodeId()); err != nil {
		return nil, err
	}
	if page.Before, err = bindings.ParseEventCursor(r.GetBefore()); err != nil {
		return nil, &rpcerr.Invalid{Text: "before must be the next of an earlier answer"}
	}
	events, err := s.routes.ListEvents(ctx, page)
	if err != nil {
		return nil, err
	}
	out := &adminv1.ListEventsResponse{Events: make([]*adminv1.Event, len(events))}
	for i := range events {
		if out.Events[i], err = eventToWire(&events[i]); err != nil {
			return nil, err
		}
	}
	if len(events) == limit {
		out.Next = events[limit-1].Cursor().String()
	}
	return out, nil
}

func eventToWire(l *bindings.Logged) (*adminv1.Event, error) {
	out := &adminv1.Event{
		EventId: l.EventID, AtUnixMs: l.At.UnixMilli(), Source: l.Source, Kind: string(l.Kind), Effect: string(l.Effect),
		ClusterId: l.ClusterID, NodeId: string(l.NodeID), ServiceInstanceId: l.ServiceInstanceID, SandboxId: string(l.SandboxID),
		CpuMillis: orZero(l.CPUMillis), MemoryBytes: orZero(l.MemoryBytes), DiskBytes: orZero(l.DiskBytes),
	}
	if len(l.Detail) == 0 {
		return out, nil
	}
	detail, err := json.Marshal(l.Detail)
	if err != nil {
		return nil, fmt.Errorf("detail of event %d: %w", l.EventID, err)
	}
	out.DetailJson = string(detail)
	return out, nil
}

func orZero(n *int64) int64 {
	if n == nil {
		return 0
	}
	return *n
}

func pageOf(limit uint32) (int, error) {
	if limit == 0 {
		return defaultPage, nil
	}
	if limit > maxPage {
		return 0, &rpcerr.Invalid{Text: fmt.Sprintf("limit must be 1 to %d", maxPage)}
	}
	return int(limit), nil
}

func optionalNode(text string) (node.ID, error) {
	if text == "" {
		return "", nil
	}
	return node.ParseID(text)
}

func optionalSandbox(text string) (sandbox.ID, error) {
	if text == "" {
		return "", nil
	}
	return sandbox.ParseID(text)
}

func checkText(field, text string, most int) error {
	if len(text) > most {
		return &rpcerr.Invalid{Text: fmt.Sprintf("%s must be at most %d bytes", field, most)}
	}
	if node.CheckText(field, text) != nil {
		return &rpcerr.Invalid{Text: field + " has a control character or is not UTF-8"}
	}
	return nil
}
