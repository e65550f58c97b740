// Package rpcerr is the one table between domain errors and RPC codes, both ways. Handlers return
// domain errors; the interceptors here give them a code, a reason and the public text. What has no
// row leaves as "internal error" with its cause in the log only.
package rpcerr

import (
	"context"
	"errors"

	"github.com/twitchtv/twirp"
	"google.golang.org/grpc/codes"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// What has no place in a domain package: it is about the call itself.
var (
	ErrUnavailable     = errors.New("binding store unavailable")
	ErrUnauthenticated = errors.New("token is missing or wrong")
	ErrDenied          = errors.New("caller's role does not allow this")
	ErrInternal        = errors.New("internal error")
)

// Invalid is bad input: Text names the field and what is wrong with it, for the caller to read.
type Invalid struct{ Text string }

// Error returns the text.
func (e *Invalid) Error() string { return e.Text }

// NotImplemented is an RPC that this build does not serve.
type NotImplemented struct{ RPC string }

// Error returns the contract's text.
func (e *NotImplemented) Error() string { return "method " + e.RPC + " not implemented" }

type row struct {
	cause  error
	reason string
	twirp  twirp.ErrorCode
	grpc   codes.Code
}

// table has a row for each sentinel that may reach a caller; the sentinel's text is the public
// text. The first row that matches decides.
var table = []row{ //nolint:gochecknoglobals // the table is the package
	{sandbox.ErrIDRequired, "sandbox_id_required", twirp.InvalidArgument, codes.InvalidArgument},
	{sandbox.ErrBadID, "sandbox_id_invalid", twirp.InvalidArgument, codes.InvalidArgument},
	{sandbox.ErrNotFound, "unknown_sandbox", twirp.NotFound, codes.NotFound},
	{sandbox.ErrInUse, "sandbox_in_use", twirp.AlreadyExists, codes.AlreadyExists},
	{sandbox.ErrChanged, "binding_changed", twirp.FailedPrecondition, codes.FailedPrecondition},
	{sandbox.ErrDeleted, "sandbox_deleted", twirp.FailedPrecondition, codes.FailedPrecondition},

	{node.ErrIDRequired, "node_id_required", twirp.InvalidArgument, codes.InvalidArgument},
	{node.ErrInstanceRequired, "instance_required", twirp.InvalidArgument, codes.InvalidArgument},
	{node.ErrAssignmentRequired, "node_required", twirp.InvalidArgument, codes.InvalidArgument},
	{node.ErrBadID, "node_id_invalid", twirp.InvalidArgument, codes.InvalidArgument},
	{node.ErrBadTag, "field_invalid", twirp.InvalidArgument, codes.InvalidArgument},
	{node.ErrBadRoster, "roster_invalid", twirp.InvalidArgument, codes.InvalidArgument},
	{node.ErrBadEndpoint, "endpoint_refused", twirp.InvalidArgument, codes.InvalidArgument},
	{route.ErrNotAllowed, "endpoint_refused", twirp.InvalidArgument, codes.InvalidArgument},
	{node.ErrNotListed, "node_not_listed", twirp.InvalidArgument, codes.InvalidArgument},
	{node.ErrNotObserved, "unknown_node", twirp.NotFound, codes.NotFound},
	{node.ErrIDInUse, "node_id_in_use", twirp.AlreadyExists, codes.AlreadyExists},
	{node.ErrSuperseded, "instance_superseded", twirp.FailedPrecondition, codes.FailedPrecondition},
	{node.ErrInstanceMismatch, "instance_mismatch", twirp.FailedPrecondition, codes.FailedPrecondition},

	{node.ErrUnknown, "no_such_node", twirp.NotFound, codes.NotFound},
	{node.ErrOtherSource, "node_of_other_source", twirp.FailedPrecondition, codes.FailedPrecondition},
	{node.ErrLeaseLives, "lease_lives", twirp.FailedPrecondition, codes.FailedPrecondition},
	{node.ErrDraining, "node_draining", twirp.FailedPrecondition, codes.FailedPrecondition},
	{node.ErrAlreadyDrained, "drain_open", twirp.AlreadyExists, codes.AlreadyExists},
	{node.ErrNoDrain, "unknown_drain", twirp.NotFound, codes.NotFound},
	{node.ErrDrainEnded, "drain_ended", twirp.FailedPrecondition, codes.FailedPrecondition},

	{node.ErrNoneReady, "no_ready_node", twirp.Unavailable, codes.Unavailable},
	{node.ErrNoRoom, "capacity", twirp.ResourceExhausted, codes.ResourceExhausted},
	{node.ErrConstraints, "constraints", twirp.FailedPrecondition, codes.FailedPrecondition},
	{node.ErrQuota, "quota", twirp.ResourceExhausted, codes.ResourceExhausted},
	{node.ErrContended, "contended", twirp.Unavailable, codes.Unavailable},
	{node.ErrRequestReused, "request_reused", twirp.AlreadyExists, codes.AlreadyExists},
	{node.ErrKeyReused, "key_reused", twirp.AlreadyExists, codes.AlreadyExists},
	{node.ErrReservationOver, "reservation_over", twirp.FailedPrecondition, codes.FailedPrecondition},
	{node.ErrNotOpen, "reservation_not_open", twirp.FailedPrecondition, codes.FailedPrecondition},
	{node.ErrNoPlacement, "unknown_placement", twirp.NotFound, codes.NotFound},

	{ErrUnauthenticated, "unauthenticated", twirp.Unauthenticated, codes.Unauthenticated},
	{ErrDenied, "denied", twirp.PermissionDenied, codes.PermissionDenied},
	{ErrUnavailable, "store_unavailable", twirp.Unavailable, codes.Unavailable},
	{context.Canceled, "canceled", twirp.Canceled, codes.Canceled},
	{context.DeadlineExceeded, "deadline", twirp.DeadlineExceeded, codes.DeadlineExceeded},
}

// find returns the row and the public text of err, and whether it has one.
func find(err error) (row, string, bool) {
	if invalid, ok := errors.AsType[*Invalid](err); ok {
		return row{invalid, "invalid", twirp.InvalidArgument, codes.InvalidArgument}, invalid.Text, true
	}
	if missing, ok := errors.AsType[*NotImplemented](err); ok {
		return row{missing, "not_implemented", twirp.Unimplemented, codes.Unimplemented}, missing.Error(), true
	}
	for _, r := range table {
		if errors.Is(err, r.cause) {
			return r, r.cause.Error(), true
		}
	}
	// A context that ended inside the driver is the caller's; every other lost connection is ours.
	if pgdb.Unavailable(err) {
		return row{ErrUnavailable, "store_unavailable", twirp.Unavailable, codes.Unavailable}, ErrUnavailable.Error(), true
	}
	return row{ErrInternal, "internal", twirp.Internal, codes.Internal}, ErrInternal.Error(), false
}
