package listing

import (
	"net/url"
	"strconv"
	"strings"
	"time"

	"berth/services/gateway/internal/body"
)

// Bounds of a page.
const (
	defaultLimit = 100
	maxLimit     = 100
)

// Query is what a list was asked for: what is applied here, and the rest for the nodes.
type Query struct {
	Limit        int // 0: all
	Ascending    bool
	StartedAfter time.Time // zero: any
	Template     string    // id or alias; "": any
	Strict       bool
	Token        string // of the page before; "": the first page
	ForNodes     string // the raw query less what is applied here, byte for byte
}

// ParseQuery reads the raw query of a list. What is applied here is cut out of the text, never
// re-encoded, for nodes must see the rest as the client sent it. paged lists have a limit. A
// *body.Wrong names what is wrong.
func ParseQuery(raw string, paged bool) (Query, error) {
	var q Query
	if paged {
		q.Limit = defaultLimit
	}
	var kept []string
	for part := range strings.SplitSeq(raw, "&") {
		rawName, rawValue, _ := strings.Cut(part, "=")
		name, err := url.QueryUnescape(rawName)
		if err != nil {
			kept = append(kept, part)
			continue
		}
		value, err := url.QueryUnescape(rawValue)
		if err != nil && ours(name) {
			return Query{}, body.Wrongf("invalid %s: not a valid query value", name)
		}
		mine, err := q.set(name, value, paged)
		if err != nil {
			return Query{}, err
		}
		if !mine {
			kept = append(kept, part)
		}
	}
	q.ForNodes = strings.Join(kept, "&")
	return q, nil
}

func ours(name string) bool {
	switch name {
	case "limit", "nextToken", "strict", "order", "startedAfter", "template":
		return true
	}
	return false
}

func (q *Query) set(name, value string, paged bool) (mine bool, err error) {
	if !ours(name) {
		return false, nil
	}
	if value == "" {
		return true, nil // given without a value is not given
	}
	switch name {
	case "limit":
		n, err := strconv.Atoi(value)
		if err != nil || n < 1 || n > maxLimit {
			return true, body.Wrongf("invalid limit: a whole number from 1 to %d is wanted", maxLimit)
		}
		if paged {
			q.Limit = n
		}
	case "nextToken":
		if paged {
			q.Token = value
		}
	case "strict":
		if q.Strict = value == "true"; !q.Strict && value != "false" {
			return true, body.Wrongf("invalid strict: true or false is wanted")
		}
	case "order":
		if q.Ascending = value == "asc"; !q.Ascending && value != "desc" {
			return true, body.Wrongf("invalid order: asc or desc is wanted")
		}
	case "startedAfter":
		if q.StartedAfter, err = time.Parse(time.RFC3339, value); err != nil {
			return true, body.Wrongf("invalid startedAfter: a time like 2006-01-02T15:04:05Z is wanted")
		}
	case "template":
		q.Template = value
	}
	return true, nil
}
