// Package lifecycle starts and stops the long-lived parts of a process in a fixed order.
//
// A process is a list of parts. Run starts them one after the other, reports ready, and waits for the
// first of two events: its context ends, or a part fails. Then, and in this order: readiness goes off,
// DrainDelay passes so that balancers notice, and the parts stop in reverse, each within what is left
// of StopTimeout. A part that does not stop in time costs an error, never a hang.
//
// Failures, one line each:
//
//   - a part does not start: those before it are stopped, Run returns its error
//   - a part ends by itself: the others are stopped, Run returns its error
//   - a stop runs out of time: the rest is stopped with an expired context, Run returns that error
//   - a second signal: Main gives the signal back to the system, and the process ends at once
package lifecycle
