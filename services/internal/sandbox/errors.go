package sandbox

import "errors"

// What callers branch on. The texts of ErrIDRequired, ErrNotFound, ErrInUse, ErrChanged and
// ErrDeleted are part of scheduler.v1's contract.
var (
	ErrIDRequired = errors.New("sandbox_id is required")
	ErrBadID      = errors.New("sandbox_id is not valid")
	ErrNotFound   = errors.New("sandbox assignment not found")
	ErrInUse      = errors.New("sandbox_id is in use")
	ErrChanged    = errors.New("binding has changed")
	ErrDeleted    = errors.New("sandbox was deleted")
)
