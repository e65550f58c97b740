// Package waittest waits for events in tests, with a bound: what never comes fails the test with a word,
// instead of hanging it until the whole run is given up.
package waittest

import (
	"sync"
	"testing"
	"time"
)

// Limit is how long an event may take. It is for slow machines under load: no test is about it.
const Limit = 2 * time.Minute

// Receive returns what comes from c, or the zero value once c is closed. Where nothing does within Limit,
// t fails and stops; what names the event. It is called by t's own goroutine.
func Receive[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	return receive(t, Limit, what, c)
}

// Done waits for all of group, as Receive does for an event.
func Done(t testing.TB, what string, group *sync.WaitGroup) {
	t.Helper()
	over := make(chan struct{})
	go func() {
		group.Wait()
		close(over)
	}()
	receive(t, Limit, what, over)
}

func receive[T any](t testing.TB, limit time.Duration, what string, c <-chan T) T {
	t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case got := <-c:
		return got
	case <-timer.C:
		t.Fatalf("%v passed without %s", limit, what)
	}
	var none T
	return none
}
