package rpcerr

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"berth/services/internal/node"
)

// details are the facts of a refusal as both transports carry them, beside its reason and its hint.
func details(r *node.Refused) map[string]string {
	out := map[string]string{}
	if r.Placement != 0 {
		out[metaPlacement] = strconv.FormatInt(r.Placement, 10)
	}
	if len(r.Reasons) > 0 {
		counted := make([]string, 0, len(r.Reasons))
		for _, reason := range slices.Sorted(maps.Keys(r.Reasons)) {
			counted = append(counted, reason+"="+strconv.Itoa(r.Reasons[reason]))
		}
		out[metaReasons] = strings.Join(counted, ",")
	}
	if r.Resource != "" {
		out[metaResource] = r.Resource
		out[metaLimit], out[metaUsed] = strconv.FormatInt(r.Limit, 10), strconv.FormatInt(r.Used, 10)
	}
	return out
}

// parseDetails is details the other way; what is absent or odd is zero. Nil where there is none.
func parseDetails(of func(key string) string) *node.Refused {
	number := func(key string) int64 {
		n, _ := strconv.ParseInt(of(key), 10, 64) // absent is 0
		return n
	}
	r := &node.Refused{Placement: number(metaPlacement), Resource: of(metaResource), Limit: number(metaLimit), Used: number(metaUsed)}
	for pair := range strings.SplitSeq(of(metaReasons), ",") {
		if reason, count, ok := strings.Cut(pair, "="); ok {
			if r.Reasons == nil {
				r.Reasons = map[string]int{}
			}
			r.Reasons[reason], _ = strconv.Atoi(count)
		}
	}
	if r.Placement == 0 && r.Resource == "" && r.Reasons == nil {
		return nil
	}
	return r
}
