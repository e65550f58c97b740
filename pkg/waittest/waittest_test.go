package waittest

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
)

// failing is a test that remembers why it failed, and goes on.
type failing struct {
	testing.TB
	why string
}

func (*failing) Helper()                          {}
func (f *failing) Fatalf(format string, a ...any) { f.why = fmt.Sprintf(format, a...) }

func TestWhatComesIsReturned(t *testing.T) {
	t.Parallel()
	c := make(chan int)
	go func() { c <- 7; close(c) }()
	if got := Receive(t, "a number", c); got != 7 {
		t.Errorf("Receive = %d, want 7", got)
	}
	if got := Receive(t, "the end", c); got != 0 {
		t.Errorf("Receive from a closed channel = %d, want 0", got)
	}
	var group sync.WaitGroup
	group.Go(func() {})
	Done(t, "the group", &group)
}

func TestWhatNeverComesFailsTheTestInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var f failing
		Receive(&f, "an answer", make(chan int))
		if want := "2m0s passed without an answer"; f.why != want {
			t.Errorf("Receive says %q, want %q", f.why, want)
		}
		var group sync.WaitGroup
		group.Add(1)
		defer group.Done()
		var late failing
		Done(&late, "the last of them", &group)
		if want := "2m0s passed without the last of them"; late.why != want {
			t.Errorf("Done says %q, want %q", late.why, want)
		}
	})
}
