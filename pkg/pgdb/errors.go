package pgdb

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/puddle/v2"
)

var (
	// ErrUnknown is returned when the connection was lost during COMMIT: the transaction may have
	// taken effect or not. Only what carries a caller's key is asked again, and reads back.
	ErrUnknown = errors.New("commit result is unknown")

	// ErrPoolWait is returned when no connection became free in time.
	ErrPoolWait = errors.New("no database connection became free in time")
)

// unavailableCodes are answers of a server that cannot do the work now, whatever the work.
var unavailableCodes = map[string]bool{
	"57014": true, // query_canceled: the statement's timeout
	"57P01": true, // admin_shutdown
	"57P02": true, // crash_shutdown
	"57P03": true, // cannot_connect_now
	"57P05": true, // idle_session_timeout
	"25P03": true, // idle_in_transaction_session_timeout
	"25006": true, // read_only_sql_transaction: a standby, while a failover is under way
	"40001": true, // serialization_failure, after all tries
	"40P01": true, // deadlock_detected, after all tries
	"55P03": true, // lock_not_available, after all tries
}

// Unavailable tells whether err means that the store cannot answer now, and the same question may
// be asked again later: the connection was refused or lost, the server stops, is out of connections
// or other resources, a timeout of its own or a deadline passed, or no connection became free. A
// caller that went away by itself (context.Canceled) is not that.
func Unavailable(err error) bool {
	if err == nil {
		return false
	}
	if answered, ok := errors.AsType[*pgconn.PgError](err); ok {
		return unavailableCodes[answered.Code] || strings.HasPrefix(answered.Code, "08") ||
			strings.HasPrefix(answered.Code, "53") || fatal(answered)
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrPoolWait) || errors.Is(err, puddle.ErrClosedPool) {
		return true
	}
	if errors.Is(err, context.Canceled) {
		return false
	}
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return true
	}
	if _, ok := errors.AsType[*net.OpError](err); ok {
		return true
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, pgconn.ErrConnClosed) || errors.Is(err, ErrUnknown) || pgconn.SafeToRetry(err)
}

// fatal tells whether the server ended the connection with this answer.
func fatal(e *pgconn.PgError) bool {
	return e.SeverityUnlocalized == "FATAL" || e.SeverityUnlocalized == "PANIC"
}

// Constraint returns the name of the constraint that err is about, and "" when it is about none.
func Constraint(err error) string {
	if answered, ok := errors.AsType[*pgconn.PgError](err); ok {
		return answered.ConstraintName
	}
	return ""
}

// Code returns the SQLSTATE of err, and "" when PostgreSQL did not answer.
func Code(err error) string {
	if answered, ok := errors.AsType[*pgconn.PgError](err); ok {
		return answered.Code
	}
	return ""
}
