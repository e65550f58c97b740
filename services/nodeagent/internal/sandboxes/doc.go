// Package sandboxes is the life of each sandbox on this node.
//
// # States
//
//	creating → running ⇄ paused → (deleted)
//
// creating: the create is in the journal, the processes are not up yet. running: the processes run, or run again
// after a restart of the agent. paused: frozen, or, after a restart of the agent, not started until resumed. A deleted
// sandbox is a tombstone in the journal and nothing else.
//
// # Time
//
// A running sandbox ends at its end time: deleted, or paused if its create asked for that. The time is kept by the
// monotonic clock; across a restart of the agent only the wall clock is left, and what is over by then ends at once.
// A paused sandbox has no end.
//
// # Failures
//
//   - The agent dies: its sandboxes end with it (isolation). Restore starts them anew under their ids, in their workspaces,
//     from the template as it was; paused ones come back paused.
//   - A sandbox cannot be started again: it comes back paused, with an error in the log; a resume tries again.
//   - Everything inside a sandbox dies (out of memory): it is deleted, as if its time were over.
//   - The disk is full: creates, pauses and new end times fail, what cannot end in time is tried again; a delete works, and makes
//     room first. If the agent dies between that and the tombstone, the sandbox comes back with an empty workspace.
//   - A kill fails: the sandbox is deleted for everybody but the machine, the delete's caller gets the error, and
//     another delete tries again; a restart of the agent cleans up.
package sandboxes

import "errors"

// What callers branch on. sandbox.ErrDeleted and templates.ErrUnknown are others.
var (
	ErrNotFound = errors.New("sandbox not found")
	ErrPaused   = errors.New("sandbox is paused")
	ErrRunning  = errors.New("sandbox is running")
	ErrFull     = errors.New("node is full")
	ErrClosing  = errors.New("node is stopping")
)
