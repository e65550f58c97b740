//go:build unix && !linux

package pglocal

// takeFileRights does nothing where a thread has no rights of its own.
func (o owner) takeFileRights() error { return nil }
