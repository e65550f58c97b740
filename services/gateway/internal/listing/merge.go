package listing

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

// Item is one sandbox of a list. Raw is all that its node said, fields nobody here knows included.
type Item struct {
	ID      sandbox.ID
	Started time.Time
	Node    node.ID
	Raw     json.RawMessage

	template, alias string
}

// parseItems reads the list of one node. An item without id or time makes the whole answer nonsense,
// for then nobody knows what is missing.
func parseItems(text []byte, from node.ID) ([]Item, error) {
	var raws []json.RawMessage
	if err := json.Unmarshal(text, &raws); err != nil || raws == nil {
		return nil, errors.New("answer is no list")
	}
	items := make([]Item, 0, len(raws))
	for _, raw := range raws {
		var fields struct {
			SandboxID  string    `json:"sandboxID"`
			StartedAt  time.Time `json:"startedAt"`
			TemplateID string    `json:"templateID"`
			Alias      string    `json:"alias"`
		}
		if err := json.Unmarshal(raw, &fields); err != nil {
			return nil, fmt.Errorf("item of a list: %w", err)
		}
		id, err := sandbox.ParseID(fields.SandboxID)
		if err != nil {
			return nil, fmt.Errorf("item of a list: %w", err)
		}
		if fields.StartedAt.IsZero() {
			return nil, errors.New("item of a list: no start time")
		}
		items = append(items, Item{
			ID: id, Started: fields.StartedAt, Node: from, Raw: raw, template: fields.TemplateID, alias: fields.Alias,
		})
	}
	return items, nil
}

// order compares by start, newest first, then by id; ascending turns both.
func (q Query) order(a, b Item) int {
	c := cmp.Or(b.Started.Compare(a.Started), strings.Compare(string(a.ID), string(b.ID)))
	if q.Ascending {
		return -c
	}
	return c
}

// merge returns the page of items that q asks for and whether more follow. owner tells whether the
// caller may see an item, and which node it is bound to. One item is left for an id: the binding's
// node's, else the first. after is the last item of the page before, nil for the first page.
func (q Query) merge(items []Item, owner func(Item) (visible bool, boundTo node.ID), after *Item) (page []Item, more bool) {
	chosen := map[sandbox.ID]Item{}
	for _, item := range items {
		visible, boundTo := owner(item)
		switch {
		case !visible,
			!q.StartedAfter.IsZero() && item.Started.Before(q.StartedAfter),
			q.Template != "" && item.template != q.Template && item.alias != q.Template,
			after != nil && q.order(item, *after) <= 0:
			continue
		}
		if _, twice := chosen[item.ID]; twice && item.Node != boundTo {
			continue
		}
		chosen[item.ID] = item
	}
	page = make([]Item, 0, len(chosen))
	for _, item := range chosen {
		page = append(page, item)
	}
	slices.SortFunc(page, q.order)
	if q.Limit > 0 && len(page) > q.Limit {
		return page[:q.Limit], true
	}
	return page, false
}
