package pgdb

import (
	"fmt"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// limitUnacknowledged ends a TCP connection whose data nobody acknowledged for userTimeout.
// Keepalives do not run while data is under way, so without it a vanished server holds a query for
// a quarter of an hour.
func limitUnacknowledged(network, _ string, raw syscall.RawConn) error {
	if !strings.HasPrefix(network, "tcp") {
		return nil
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
	}); err != nil {
		return fmt.Errorf("reach the socket: %w", err)
	}
	if failed != nil {
		return fmt.Errorf("set TCP_USER_TIMEOUT: %w", failed)
	}
	return nil
}
