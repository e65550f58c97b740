package proxy

import (
	"net/http"
	"sync"
	"time"
)

// flusher writes an answer's body so that nothing waits long in the server's buffer: a stream's chunks not at all, the rest at most
// flushAfter, and the head too, for an event stream may be silent after it.
type flusher struct {
	w       http.ResponseWriter
	control *http.ResponseController
	eager   bool

	mu      sync.Mutex
	stopped bool
	timer   *time.Timer
	armed   bool
}

func newFlusher(w http.ResponseWriter, control *http.ResponseController, eager bool) *flusher {
	f := &flusher{w: w, control: control, eager: eager, armed: true}
	f.timer = time.AfterFunc(flushAfter, f.late)
	return f
}

func (f *flusher) late() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stopped || !f.armed {
		return
	}
	f.armed = false
	_ = f.control.Flush() // a client that is gone shows in the next write
}

// write writes p. last: the end is known and follows, so that there is nothing to hurry.
func (f *flusher) write(p []byte, last bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.w.Write(p); err != nil {
		return err
	}
	switch {
	case last:
		f.armed = false
	case f.eager:
		f.armed = false
		return f.control.Flush()
	case !f.armed:
		f.armed = true
		f.timer.Reset(flushAfter)
	}
	return nil
}

// stop ends the timer; nothing touches the answer afterwards.
func (f *flusher) stop() {
	f.timer.Stop()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stopped = true
}
