package bindings

// OrphanReason says why a sandbox may not be bound where a roster lists it.
type OrphanReason string

// The reasons, as the rows spell them.
const (
	OrphanDeleted    OrphanReason = "deleted"        // it was deleted or suspended: the node must end it
	OrphanSuperseded OrphanReason = "superseded"     // another incarnation of it lives: the node must end it
	OrphanHeld       OrphanReason = "held_elsewhere" // another node that is alive has it
)
