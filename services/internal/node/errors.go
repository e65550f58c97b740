package node

import (
	"errors"
	"time"
)

// What callers branch on. All texts but those of ErrBadID, ErrBadTag and ErrBadRoster are part of
// scheduler.v1's contract.
var (
	ErrIDRequired         = errors.New("node_id is required")
	ErrInstanceRequired   = errors.New("node_id and service_instance_id are required")
	ErrAssignmentRequired = errors.New("node_id and endpoint are required")
	ErrBadID              = errors.New("node_id is not valid")
	ErrBadTag             = errors.New("field is not valid")
	ErrBadRoster          = errors.New("roster is not valid")
	ErrBadEndpoint        = errors.New("endpoint is not allowed")
	ErrNotListed          = errors.New("node is not in scheduler node list")
	ErrNotObserved        = errors.New("observed node not found")
	ErrIDInUse            = errors.New("node_id is in use by another instance")
	ErrSuperseded         = errors.New("service instance superseded")
	ErrInstanceMismatch   = errors.New("service instance mismatch")

	// What an operator's order meets.
	ErrUnknown        = errors.New("node not found")
	ErrOtherSource    = errors.New("node is listed by configuration or discovery")
	ErrLeaseLives     = errors.New("node's lease has not ended")
	ErrDraining       = errors.New("node is being drained")
	ErrAlreadyDrained = errors.New("node has an open drain")
	ErrNoDrain        = errors.New("drain not found")
	ErrDrainEnded     = errors.New("drain has ended")

	// Why no node takes a create.
	ErrNoneReady       = errors.New("no nodes available")
	ErrNoRoom          = errors.New("no node has room")
	ErrConstraints     = errors.New("no node satisfies the constraints")
	ErrQuota           = errors.New("tenant quota exceeded")
	ErrContended       = errors.New("placement is contended")
	ErrRequestReused   = errors.New("request_id was used for a different request")
	ErrKeyReused       = errors.New("create_key was used for a different request")
	ErrReservationOver = errors.New("reservation has ended and the node has no room")
	ErrNotOpen         = errors.New("reservation is not open")
	ErrNoPlacement     = errors.New("placement not found")
)

// Refused is a create that no node takes. It is the sentinel in Cause.
type Refused struct {
	Cause      error // ErrNoneReady, ErrNoRoom, ErrConstraints, ErrQuota or ErrContended
	Placement  int64 // 0 where none was stored
	Reasons    map[string]int
	RetryAfter time.Duration // 0: trying again does not help

	// Of ErrQuota: what the tenant would have too much of, how much it may have and has.
	Resource    string
	Limit, Used int64
}

// Error returns the contract's text; what else is known travels beside it.
func (r *Refused) Error() string { return r.Cause.Error() }

// Unwrap returns the sentinel.
func (r *Refused) Unwrap() error { return r.Cause }

// DrainOpen is a drain that may not start because another one of the node is open. It is
// ErrAlreadyDrained.
type DrainOpen struct{ ID int64 }

// Error returns the sentinel's text.
func (d *DrainOpen) Error() string { return ErrAlreadyDrained.Error() }

// Unwrap returns the sentinel.
func (d *DrainOpen) Unwrap() error { return ErrAlreadyDrained }
