package httpapi

import (
	"cmp"
	"encoding/base64"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"berth/services/internal/sandbox"
	"berth/services/nodeagent/internal/sandboxes"
)

// maxPage is the longest page, and the default.
const maxPage = 100

// filter is what a list was asked for.
type filter struct {
	states       map[string]bool // nil: all
	metadata     map[string]string
	startedAfter time.Time
	template     string
	ascending    bool
	limit        int // 0: all
	after        *position
}

// position is a place in the order: the last item of the page before.
type position struct {
	started time.Time
	id      sandbox.ID
}

// parseFilter reads the query of a list. paged: the list of the second version comes in pages.
func parseFilter(rawQuery string, paged bool) (filter, error) {
	var f filter
	query, err := url.ParseQuery(rawQuery)
	if err != nil {
		return f, badf("query is not valid")
	}
	for _, states := range query["state"] {
		for state := range strings.SplitSeq(states, ",") {
			if state != string(sandboxes.Running) && state != string(sandboxes.Paused) {
				return f, badf("invalid state: %.32q, want running or paused", state)
			}
			if f.states == nil {
				f.states = make(map[string]bool)
			}
			f.states[state] = true
		}
	}
	if f.metadata, err = parseMetadata(query.Get("metadata")); err != nil {
		return f, err
	}
	if text := query.Get("startedAfter"); text != "" {
		if f.startedAfter, err = time.Parse(time.RFC3339Nano, text); err != nil {
			return f, badf("invalid startedAfter: want a time as in RFC 3339")
		}
	}
	f.template = query.Get("template")
	switch order := query.Get("order"); order {
	case "", "desc":
	case "asc":
		f.ascending = true
	default:
		return f, badf("invalid order: want asc or desc")
	}
	if !paged {
		return f, nil
	}
	f.limit = maxPage
	if text := query.Get("limit"); text != "" {
		if f.limit, err = strconv.Atoi(text); err != nil || f.limit < 1 || f.limit > maxPage {
			return f, badf("invalid limit: want 1 to %d", maxPage)
		}
	}
	if text := query.Get("nextToken"); text != "" {
		if f.after, err = parseToken(text); err != nil {
			return f, err
		}
	}
	return f, nil
}

// parseMetadata reads the metadata parameter, which the SDKs encode twice: it is a query string of its own, whose keys and values are
// decoded once more.
func parseMetadata(text string) (map[string]string, error) {
	if text == "" {
		return nil, nil
	}
	pairs, err := url.ParseQuery(text)
	if err != nil {
		return nil, badf("invalid metadata: not a query string")
	}
	metadata := make(map[string]string, len(pairs))
	for key, values := range pairs {
		k, err := url.QueryUnescape(key)
		if err != nil {
			return nil, badf("invalid metadata: not encoded as a query string")
		}
		if metadata[k], err = url.QueryUnescape(values[len(values)-1]); err != nil {
			return nil, badf("invalid metadata: not encoded as a query string")
		}
	}
	return metadata, nil
}

func (p position) token() string {
	return base64.RawURLEncoding.EncodeToString([]byte(strconv.FormatInt(p.started.UnixNano(), 10) + "," + string(p.id)))
}

func parseToken(text string) (*position, error) {
	plain, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		return nil, badf("invalid next token: not one of ours")
	}
	nanos, id, found := strings.Cut(string(plain), ",")
	n, err := strconv.ParseInt(nanos, 10, 64)
	if !found || err != nil {
		return nil, badf("invalid next token: not one of ours")
	}
	return &position{started: time.Unix(0, n), id: sandbox.ID(id)}, nil
}

func (f filter) takes(v sandboxes.View) bool {
	state := sandboxes.Running
	if v.Status == sandboxes.Paused {
		state = sandboxes.Paused
	}
	if f.states != nil && !f.states[string(state)] {
		return false
	}
	for key, value := range f.metadata {
		if got, found := v.Metadata[key]; !found || got != value {
			return false
		}
	}
	if f.template != "" && f.template != v.Template.Name && f.template != v.TemplateID {
		return false
	}
	return !v.StartedAt.Before(f.startedAfter)
}

// compare is the total order of a list: by start, latest first unless ascending, then by id.
func (f filter) compare(a, b position) int {
	order := cmp.Or(-a.started.Compare(b.started), strings.Compare(string(a.id), string(b.id)))
	if f.ascending {
		return -order
	}
	return order
}

func at(v sandboxes.View) position { return position{started: v.StartedAt, id: v.ID} }

// page returns the views that pass, in order, and the token of the next page, "" when there is none.
func (f filter) page(all []sandboxes.View) (page []sandboxes.View, next string) {
	for _, v := range all {
		if f.takes(v) && (f.after == nil || f.compare(*f.after, at(v)) < 0) {
			page = append(page, v)
		}
	}
	slices.SortFunc(page, func(a, b sandboxes.View) int { return f.compare(at(a), at(b)) })
	if f.limit > 0 && len(page) > f.limit {
		page = page[:f.limit]
		next = at(page[f.limit-1]).token()
	}
	return page, next
}

// list shows sandboxes: GET /sandboxes, all of them, and GET /v2/sandboxes, in pages.
func (a *API) list(w http.ResponseWriter, r *http.Request, _ sandbox.ID) {
	_, query, _ := strings.Cut(r.RequestURI, "?")
	f, err := parseFilter(query, strings.HasPrefix(r.RequestURI, "/v2/"))
	if err != nil {
		a.refuse(w, r, "", err)
		return
	}
	page, next := f.page(a.Sandboxes.List())
	items := make([]detail, 0, len(page))
	for _, v := range page {
		items = append(items, a.detail(v))
	}
	if next != "" {
		w.Header().Set("X-Next-Token", next)
	}
	writeJSON(w, http.StatusOK, items)
}
