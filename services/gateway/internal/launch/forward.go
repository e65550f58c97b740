package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/gateway/internal/proxy"
	"berth/services/internal/node"
	"berth/services/internal/route"
)

// What a gateway tells nodes that take ids, and what they tell it.
const (
	headerSandbox     = "Berth-Sandbox-Id"
	headerReservation = "Berth-Reservation"
)

// repeatPause lets a node that restarts come back before it is asked once more.
const repeatPause = 200 * time.Millisecond

// on has p's node make the sandbox and binds it. A *refusedBy means that it took nothing.
func (c *creation) on(p *placement) (*Created, error) {
	stopExtending := c.keepHold(p)
	defer stopExtending()
	a, err := c.ask(p)
	if err != nil {
		return nil, err
	}
	status := a.resp.StatusCode
	switch {
	case status >= 200 && status < 300:
	case a.full:
		a.close()
		c.metrics.attempts.WithLabelValues("node_full").Inc()
		return nil, &refusedBy{schedulerv1.ReleaseReason_RELEASE_REASON_NODE_FULL, errors.New("node says it is full")}
	default:
		c.metrics.attempts.WithLabelValues("node_error").Inc()
		c.release(p, schedulerv1.ReleaseReason_RELEASE_REASON_NODE_ERROR)
		return nil, a.refusal(p.node.ID)
	}
	ids, err := judge(a.named, p.sandbox)
	if err != nil {
		a.close()
		c.metrics.attempts.WithLabelValues("bad_answer").Inc()
		c.compensate(p, p.whatToDelete(a.named.ids), err)
		return nil, err
	}
	c.metrics.attempts.WithLabelValues("created").Inc()
	revision, err := c.bind(p, ids)
	if err != nil {
		a.close()
		c.compensate(p, p.whatToDelete(a.named.ids), err)
		return nil, fmt.Errorf("%w: %w", ErrUnrecorded, err)
	}
	if c.client.Err() != nil && !c.cfg.KeepOrphans {
		a.close()
		c.abandon(p, ids, revision)
		return nil, ErrClientGone
	}
	return &Created{Response: a.resp, Sandboxes: ids, Node: p.node.ID, Revision: revision, close: a.close}, nil
}

func (p *placement) takesIDs() bool {
	return p.sandbox != "" && p.node.Can(route.CapabilityCreateKey)
}

// whatToDelete is every id the node may have used: those it named and the one it was given.
func (p *placement) whatToDelete(named []string) []string {
	if p.sandbox != "" && !slices.Contains(named, string(p.sandbox)) {
		return append(slices.Clone(named), string(p.sandbox))
	}
	return named
}

// keepHold extends the hold of p every third of its time, until the returned function is called.
func (c *creation) keepHold(p *placement) (stop func()) {
	if p.hold <= 0 || p.reservation == "" {
		return func() {}
	}
	ctx, cancel := context.WithCancel(c.ctx)
	var extending sync.WaitGroup
	extending.Go(func() {
		ticker := time.NewTicker(max(p.hold/3, time.Millisecond))
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			_, err := c.Scheduler.extend(ctx, &schedulerv1.ExtendPlacementRequest{
				PlacementId: p.id, ReservationId: p.reservation, TtlMs: uint32(p.hold.Milliseconds()),
			})
			if errors.Is(err, node.ErrNotOpen) || errors.Is(err, node.ErrNoPlacement) {
				return // recorded by a heartbeat, or over: recording finds out
			}
			if err != nil && ctx.Err() == nil {
				c.Log.WarnContext(ctx, "hold was not extended", slog.Any("node", p.node.ID),
					slog.Int64("placement", p.id), slog.Any("error", err))
			}
		}
	})
	return func() {
		cancel()
		extending.Wait()
	}
}

// answer is what a node said to a create.
type answer struct {
	resp  *http.Response
	full  bool // the node has no room and did nothing
	named named
	close func()
}

// refusal turns an answer that is no 2xx into the error it is.
func (a *answer) refusal(from node.ID) error {
	switch status := a.resp.StatusCode; {
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		a.close()
		return fmt.Errorf("create on %s: %w with %d", from, ErrNodeKey, status)
	case status < 400:
		a.close()
		return &BadAnswer{Text: "unexpected upstream status"}
	}
	return &Refusal{Response: a.resp}
}

// lost is an answer that did not come whole although the request went out.
type lost struct{ cause error }

func (e *lost) Error() string { return "answer lost: " + e.cause.Error() }

func (e *lost) Unwrap() error { return e.cause }

// ask forwards the create, and once more with the same id if the answer is lost and the node takes ids:
// it then returns what it made.
func (c *creation) ask(p *placement) (*answer, error) {
	a, err := c.askOnce(p)
	gone, isLost := errors.AsType[*lost](err)
	if !isLost {
		return a, c.unsent(err)
	}
	c.metrics.attempts.WithLabelValues("lost").Inc()
	if p.takesIDs() && pause(c.ctx, repeatPause) {
		c.Log.InfoContext(c.ctx, "create asked once more", slog.Any("node", p.node.ID), slog.Any("sandbox", p.sandbox), slog.Any("error", gone))
		if a, err = c.askOnce(p); err == nil {
			return a, nil
		}
	}
	// The hold stays: the node may have the sandbox, and its roster will say.
	c.Log.WarnContext(c.ctx, "create outcome unknown", slog.Any("node", p.node.ID), slog.Any("sandbox", p.sandbox),
		slog.Int64("placement", p.id), slog.Any("error", err))
	if errors.Is(err, errTooLarge) {
		return nil, fmt.Errorf("%w: %w", ErrUnknown, &BadAnswer{Text: errTooLarge.Error()})
	}
	return nil, fmt.Errorf("%w: %w", ErrUnknown, err)
}

// unsent turns a dial that failed into the wish for another node.
func (c *creation) unsent(err error) error {
	if err == nil {
		return nil
	}
	c.metrics.attempts.WithLabelValues("dial_failed").Inc()
	return &refusedBy{schedulerv1.ReleaseReason_RELEASE_REASON_DIAL_FAILED, err}
}

// askOnce sends the create to p's node. An error says that nothing was sent, or is *lost.
func (c *creation) askOnce(p *placement) (*answer, error) {
	call := proxy.NodeCall{
		Node: p.node, Method: http.MethodPost, Target: c.Raw, Client: c.Client, Raw: c.Raw, Body: c.Body, Header: http.Header{},
		Fresh: true,
	}
	if p.takesIDs() {
		call.Header.Set(headerSandbox, string(p.sandbox))
		call.Header.Set(headerReservation, p.reservation)
	}
	ctx, cancel := context.WithCancelCause(c.ctx)
	silence := time.AfterFunc(c.cfg.HeaderLimit, func() { cancel(ErrSilent) })
	end := func() {
		silence.Stop()
		cancel(nil)
	}
	resp, err := c.Nodes.Do(ctx, call)
	if err != nil {
		defer end()
		if proxy.NothingSent(err) {
			return nil, err
		}
		return nil, &lost{because(ctx, err)}
	}
	// From here on the limit is on the silence between two reads.
	body := &heard{ReadCloser: resp.Body, reset: func() { silence.Reset(c.cfg.HeaderLimit) }, end: end}
	resp.Body = body
	a := &answer{resp: resp.Response, full: resp.Full, close: func() { _ = body.Close() }}
	if resp.StatusCode < 200 || resp.StatusCode >= 300 {
		return a, nil
	}
	if err := c.name(a); err != nil {
		a.close()
		return nil, &lost{because(ctx, err)}
	}
	return a, nil
}

// because prefers why ctx was cancelled to the error that this led to.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); errors.Is(cause, ErrSilent) {
		return cause
	}
	return err
}

// heard is a node's body: each read starts the limit on silence anew, closing it ends the request.
type heard struct {
	io.ReadCloser
	reset, end func()
}

func (h *heard) Close() error {
	err := h.ReadCloser.Close()
	h.end()
	return err
}

func (h *heard) Read(p []byte) (int, error) {
	n, err := h.ReadCloser.Read(p)
	h.reset()
	return n, err
}

// name finds the ids of a 2xx: in its header, then the body stays unread; else in its body, which is
// then held whole.
func (c *creation) name(a *answer) error {
	if ids := headerIDs(a.resp.Header); len(ids) > 0 {
		a.named = named{ids: ids, byHeader: true}
		return nil
	}
	text, err := readAll(a.resp.Body, c.cfg.AnswerLimit)
	if err != nil {
		return err
	}
	a.resp.Body = struct {
		io.Reader
		io.Closer
	}{bytes.NewReader(text), a.resp.Body}
	readable, err := plain(text, a.resp.Header, c.cfg.AnswerLimit)
	if err != nil {
		c.Log.WarnContext(c.ctx, "create answer is not readable", slog.Any("error", err))
		return nil // names nothing: judged as such
	}
	a.named.ids = bodyIDs(readable)
	return nil
}
