// Package e2e tests the one binary from outside: real processes, a real PostgreSQL, SIGKILL. Its tests
// know what users know: the command line, the ready file, HTTP and SQL.
package e2e
