package sandbox

// Revision is a binding's number; every change a gateway must see raises it. Of two answers about
// one sandbox the higher revision is the truth.
type Revision int64

// Incarnation is which start of a sandbox is meant; it grows when the sandbox is placed again.
type Incarnation int64

// Fence is the number a mutating call must carry; a runtime refuses any below the highest it saw.
type Fence int64

// State is what a binding is.
type State string

// The states of a binding, as the rows spell them.
const (
	Bound  State = "bound"  // the node has it
	Parked State = "parked" // its node left; the next roster that lists it brings it back
	Gone   State = "gone"   // ended; kept a while so that nothing late brings it back
)

// Ending says why a binding is not bound any more.
type Ending string

// The endings of a binding, as the rows spell them.
const (
	EndedByDelete     Ending = "deleted"
	EndedBySuspend    Ending = "suspended"
	EndedByEvent      Ending = "event"
	EndedByRoster     Ending = "roster"
	EndedByUnregister Ending = "unregistered"
	EndedByNodeGone   Ending = "node_gone"
	EndedByDrain      Ending = "drain"
)

// Origin says who told of a binding first.
type Origin string

// The origins of a binding, as the rows spell them.
const (
	Recorded  Origin = "recorded"
	FromEvent Origin = "event"
	Adopted   Origin = "adopted"
)

// Size is what one sandbox takes of a node.
type Size struct {
	CPUMillis   int64 // thousandths of a core
	MemoryBytes int64
}
