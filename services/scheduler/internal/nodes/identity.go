package nodes

import (
	"slices"
	"time"

	"berth/services/internal/node"
)

// maxRetired is how many former instances of a node are remembered.
const maxRetired = 8

// lease is a row of node_leases as a beat is judged by it.
type lease struct {
	Live              bool // neither ended nor expired when it was locked
	EndedAt           *time.Time
	ServiceInstanceID string
	Place             string
	Epoch             int64
	NodeSeq           int64
	EventSeq          int64
	Retired           []string
	FactsDigest       []byte
	RosterDigest      []byte
	Due               bool // its roster is to be compared although the digest is equal
}

// claim says who wants a node's lease.
type claim struct {
	Instance string
	Place    string // the endpoint it sent, or its address; "": not known, like no other
	Moves    bool   // it sent another endpoint than the node has
}

// succession is what a lease becomes when a claim is accepted.
type succession struct {
	Epoch    int64
	Retired  []string
	Takeover bool // another instance had the lease
	Fresh    bool // nobody had it, or not alive: what it said before means nothing now
}

// admit returns what becomes of l, nil where there is none, when c is accepted, or why it is not:
// node.ErrSuperseded, or node.ErrIDInUse, which is a conflict of two who live.
func (l *lease) admit(c claim) (succession, error) {
	if l == nil {
		return succession{Epoch: 1, Fresh: true}, nil
	}
	same := l.ServiceInstanceID == c.Instance
	switch {
	case !l.Live && same:
		return succession{Epoch: l.Epoch, Retired: l.Retired, Fresh: true}, nil
	case !l.Live:
		return l.succeed(c), nil
	case same && c.Moves:
		return succession{}, node.ErrIDInUse
	case same:
		return succession{Epoch: l.Epoch, Retired: l.Retired}, nil
	case slices.Contains(l.Retired, c.Instance):
		return succession{}, node.ErrSuperseded
	case c.Place != "" && c.Place == l.Place:
		return l.succeed(c), nil
	}
	return succession{}, node.ErrIDInUse
}

// succeed retires the instance that had the lease.
func (l *lease) succeed(c claim) succession {
	retired := slices.DeleteFunc(slices.Clone(l.Retired), func(instance string) bool {
		return instance == c.Instance || instance == l.ServiceInstanceID
	})
	retired = append(retired, l.ServiceInstanceID)
	if over := len(retired) - maxRetired; over > 0 {
		retired = retired[over:]
	}
	return succession{Epoch: l.Epoch + 1, Retired: retired, Takeover: true, Fresh: true}
}

// repeated reports whether a beat of the lease's own instance was seen before, or is older than one
// that was.
func (l *lease) repeated(p *prepared) bool {
	return l != nil && l.ServiceInstanceID == p.Instance && p.Seq != 0 && p.Seq <= l.NodeSeq
}
