package listing

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// Limits of a list.
const (
	nodeLimit     = 10 * time.Second
	allLimit      = 15 * time.Second
	answerLimit   = 32 << 20
	refusalLimit  = 64 << 10
	perRequest    = 16
	perReplica    = 64
	shownMissing  = 16
	readBindingsN = 5_000 // ids of one read
	maxPages      = 1_000 // of one node
)

// Why a node is missing from a list.
const (
	reasonLease   = "lease"
	reasonDial    = "dial"
	reasonTimeout = "timeout"
	reasonStatus  = "status"
	reasonAnswer  = "answer"
)

// Nodes sends a GET to a node; target is path and query, byte for byte. unsent tells that no
// connection was made.
type Nodes interface {
	Get(ctx context.Context, id node.ID, target string, h http.Header) (resp *http.Response, unsent bool, err error)
}

// Deps are what a Lister works with.
type Deps struct {
	Store    *Store
	Nodes    Nodes
	Cursor   *Cursor
	Log      *slog.Logger
	Registry prometheus.Registerer
}

// Lister lists sandboxes. It may be used at the same time.
type Lister struct {
	Deps
	slots   chan struct{}
	missing *prometheus.CounterVec
}

// New returns a Lister.
func New(deps Deps) *Lister {
	l := &Lister{Deps: deps, slots: make(chan struct{}, perReplica), missing: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "berth_gateway_list_missing_nodes_total", Help: "Nodes missing from lists, by why.",
	}, []string{"reason"})}
	deps.Registry.MustRegister(l.missing)
	return l
}

// Ask is one list.
type Ask struct {
	Path    string // /sandboxes or /v2/sandboxes
	Query   Query
	Tenant  string
	SeesAll bool
	Header  http.Header // of the client, for the nodes
}

// Missing is a node that a list lacks.
type Missing struct {
	Node   node.ID `json:"node"`
	Reason string  `json:"reason"`
}

// Page is one page of a list.
type Page struct {
	Items   []json.RawMessage
	Next    string // token of the next page, "" if this is the last
	Missing []Missing
}

// Unavailable is a list that no node answered, or that is asked for strictly and lacks some.
type Unavailable struct{ Missing []Missing }

// Error returns the contract's text.
func (e *Unavailable) Error() string { return ErrUnavailable.Error() }

// Is makes it ErrUnavailable.
func (e *Unavailable) Is(target error) bool { return target == ErrUnavailable }

// Refused is a node's 400: the request is at fault. Body is for the client.
type Refused struct {
	Body        []byte
	ContentType string
}

// Error says who refused.
func (e *Refused) Error() string { return "a node refused the list" }

// MissingHeader is the value of Berth-Missing-Nodes.
func MissingHeader(missing []Missing) string {
	var parts []string
	for i, m := range missing {
		if i == shownMissing {
			parts = append(parts, fmt.Sprintf("+%d", len(missing)-shownMissing))
			break
		}
		parts = append(parts, fmt.Sprintf("%s;reason=%s", m.Node, m.Reason))
	}
	return strings.Join(parts, ", ")
}

// List asks every ready or leaving node with a live lease, merges what they say and returns one page
// of it. Errors: *Unavailable, *Refused, *body.Wrong for a token, and what PostgreSQL says.
func (l *Lister) List(ctx context.Context, ask Ask) (Page, error) {
	tenant := ask.Tenant
	if ask.SeesAll {
		tenant = "\x00all" // no tenant has a control character in its id
	}
	digest := ask.Query.digest(tenant, ask.Path)
	after, err := l.Cursor.open(ask.Query, digest)
	if err != nil {
		return Page{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, allLimit)
	defer cancel()
	nodes, err := l.Store.askable(ctx)
	if err != nil {
		return Page{}, err
	}
	items, missing, err := l.gather(ctx, nodes, ask)
	if err != nil {
		return Page{}, err
	}
	for _, m := range missing {
		l.missing.WithLabelValues(m.Reason).Inc()
	}
	if len(missing) == len(nodes) || ask.Query.Strict && len(missing) > 0 {
		return Page{}, &Unavailable{Missing: missing}
	}
	owner, err := l.owners(ctx, items, ask)
	if err != nil {
		return Page{}, err
	}
	chosen, more := ask.Query.merge(items, owner, after)
	page := Page{Items: make([]json.RawMessage, len(chosen)), Missing: missing}
	for i, item := range chosen {
		page.Items[i] = item.Raw
	}
	if more {
		page.Next = l.Cursor.seal(ask.Query, digest, chosen[len(chosen)-1])
	}
	return page, nil
}

// owners reads whose the items are.
func (l *Lister) owners(ctx context.Context, items []Item, ask Ask) (func(Item) (bool, node.ID), error) {
	ids := make([]sandbox.ID, len(items))
	for i, item := range items {
		ids[i] = item.ID
	}
	slices.Sort(ids)
	owners := map[sandbox.ID]bound{}
	for chunk := range slices.Chunk(slices.Compact(ids), readBindingsN) {
		found, err := l.Store.bound(ctx, chunk)
		if err != nil {
			return nil, err
		}
		maps.Copy(owners, found)
	}
	return func(item Item) (bool, node.ID) {
		b, known := owners[item.ID]
		visible := ask.SeesAll || known && b.TenantID != "" && b.TenantID == ask.Tenant
		return visible, b.NodeID
	}, nil
}

// gather asks the nodes, a limited number at once. The order of items follows the nodes'.
func (l *Lister) gather(ctx context.Context, nodes []askable, ask Ask) ([]Item, []Missing, error) {
	type result struct {
		items  []Item
		reason string
		err    error
	}
	results := make([]result, len(nodes))
	turns := make(chan struct{}, perRequest)
	var asking sync.WaitGroup
	for i, n := range nodes {
		if !n.LeaseHeld || n.Status == node.Unhealthy {
			results[i].reason = reasonLease
			continue
		}
		asking.Go(func() {
			if !take(ctx, turns) {
				results[i].reason = reasonTimeout
				return
			}
			defer func() { <-turns }()
			if !take(ctx, l.slots) {
				results[i].reason = reasonTimeout
				return
			}
			defer func() { <-l.slots }()
			r := &results[i]
			r.items, r.reason, r.err = l.one(ctx, n.NodeID, ask)
		})
	}
	asking.Wait()
	var (
		items   []Item
		missing []Missing
		refused *Refused
	)
	for i, r := range results {
		if r.err != nil && !errors.As(r.err, &refused) {
			l.Log.WarnContext(ctx, "node is missing from a list", slog.Any("node", nodes[i].NodeID),
				slog.String("reason", r.reason), slog.Any("error", r.err))
		}
		if r.reason != "" {
			missing = append(missing, Missing{Node: nodes[i].NodeID, Reason: r.reason})
		}
		items = append(items, r.items...)
	}
	if refused != nil {
		return nil, nil, refused
	}
	return items, missing, nil
}

func take(ctx context.Context, slots chan struct{}) bool {
	select {
	case slots <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// one asks one node, page after page if it answers in pages. reason is why it is missing, "" if it is
// not.
func (l *Lister) one(ctx context.Context, id node.ID, ask Ask) (items []Item, reason string, err error) {
	ctx, cancel := context.WithTimeout(ctx, nodeLimit)
	defer cancel()
	query, total := ask.Query.ForNodes, 0
	for range maxPages {
		target := ask.Path
		if query != "" {
			target += "?" + query
		}
		page, reason, err := l.page(ctx, id, target, ask.Header)
		if err != nil {
			return nil, reason, err
		}
		if total += page.size; total > answerLimit {
			return nil, reasonAnswer, errors.New("answer too large")
		}
		items = append(items, page.items...)
		if page.next == "" {
			return items, "", nil
		}
		query = "nextToken=" + url.QueryEscape(page.next)
		if ask.Query.ForNodes != "" {
			query = ask.Query.ForNodes + "&" + query
		}
	}
	return nil, reasonAnswer, errors.New("pages without end")
}

// nodePage is one page of one node.
type nodePage struct {
	items []Item
	next  string
	size  int
}

func (l *Lister) page(ctx context.Context, id node.ID, target string, h http.Header) (page nodePage, reason string, err error) {
	resp, unsent, err := l.Nodes.Get(ctx, id, target, h)
	switch {
	case err != nil && ctx.Err() != nil:
		return page, reasonTimeout, err
	case err != nil && unsent:
		return page, reasonDial, err
	case err != nil:
		return page, reasonAnswer, err
	}
	defer func() { _ = resp.Body.Close() }()
	switch {
	case resp.StatusCode == http.StatusBadRequest:
		text, err := io.ReadAll(io.LimitReader(resp.Body, refusalLimit))
		if err != nil {
			return page, reasonAnswer, err
		}
		return page, "", &Refused{Body: text, ContentType: resp.Header.Get("Content-Type")}
	case resp.StatusCode != http.StatusOK:
		return page, reasonStatus, fmt.Errorf("node answered %d", resp.StatusCode)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, answerLimit+1))
	switch {
	case err != nil && ctx.Err() != nil:
		return page, reasonTimeout, err
	case err != nil:
		return page, reasonAnswer, err
	}
	page.size, page.next = len(text), resp.Header.Get("X-Next-Token")
	if page.items, err = parseItems(text, id); err != nil {
		return page, reasonAnswer, err
	}
	return page, "", nil
}
