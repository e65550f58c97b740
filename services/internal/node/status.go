package node

// Status is how a node is seen.
type Status int16

// The statuses, with scheduler.v1's numbers.
const (
	Unspecified Status = 0
	Ready       Status = 1
	Connecting  Status = 2
	Unhealthy   Status = 3
	Lingering   Status = 4
)

// String returns the status as people and metrics read it.
func (s Status) String() string {
	switch s {
	case Ready:
		return "ready"
	case Connecting:
		return "connecting"
	case Unhealthy:
		return "unhealthy"
	case Lingering:
		return "lingering"
	case Unspecified:
	}
	return "unspecified"
}

// Standing is what the effective status is judged by, all of it read at one moment of the
// database's clock.
type Standing struct {
	LeaseHeld bool // a lease exists, was not ended and has not expired
	Present   bool // a source of nodes lists it
	Leaving   bool // lingering, cordoned or draining
	Reported  Status
}

// Effective returns the status others may act on: the first that applies of Unhealthy, Connecting,
// Lingering and what the node said, with Unspecified read as Connecting.
func (s Standing) Effective() Status {
	switch {
	case !s.LeaseHeld:
		return Unhealthy
	case !s.Present:
		return Connecting
	case s.Leaving:
		return Lingering
	case s.Reported == Unspecified:
		return Connecting
	}
	return s.Reported
}
