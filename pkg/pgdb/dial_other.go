//go:build !linux

package pgdb

import "syscall"

// limitUnacknowledged does nothing where the system has no such limit; keepalives remain.
func limitUnacknowledged(string, string, syscall.RawConn) error { return nil }
