package pglocal

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// takeFileRights makes the current thread act on files as o. Nothing else about it changes.
func (o owner) takeFileRights() error {
	if o.self {
		return nil
	}
	if _, err := unix.SetfsgidRetGid(o.gid); err != nil {
		return fmt.Errorf("act as group %d: %w", o.gid, err)
	}
	if _, err := unix.SetfsuidRetUid(o.uid); err != nil {
		return fmt.Errorf("act as %s: %w", o.name, err)
	}
	return nil
}
