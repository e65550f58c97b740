package proxy

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

const (
	bufferBytes = 32 << 10
	// flushWithin is how long bytes of an ordinary answer, or a header without bytes yet, may wait.
	flushWithin = 10 * time.Millisecond
)

var buffers = sync.Pool{New: func() any { return new([bufferBytes]byte) }} //nolint:gochecknoglobals // a pool is shared or useless

// errClientGone is a client that takes no more of its answer.
var errClientGone = errors.New("the client has left")

// streams tells whether an answer is a stream, which may be silent for long, and whether each of
// its chunks goes on as it comes. The answer decides, not what the client accepts.
func streams(resp *http.Response) (stream, eachChunk bool) {
	contentType := strings.ToLower(resp.Header.Get("Content-Type"))
	mediaType, _, _ := strings.Cut(contentType, ";")
	stream = strings.TrimSpace(mediaType) == "text/event-stream" ||
		strings.HasPrefix(contentType, "application/grpc") || strings.HasPrefix(contentType, "application/connect+")
	return stream, stream || resp.ContentLength < 0
}

// flusher writes an answer and sees that nothing waits in the server's buffer for longer than
// flushWithin. Nothing is flushed between a header and an end that is known by then.
type flusher struct {
	timer *time.Timer

	mu    sync.Mutex
	w     http.ResponseWriter
	rc    *http.ResponseController
	dirty bool
}

var flushers = sync.Pool{New: func() any { //nolint:gochecknoglobals // a pool is shared or useless
	f := &flusher{}
	f.timer = time.AfterFunc(time.Hour, f.fire)
	f.timer.Stop()
	return f
}}

func newFlusher(w http.ResponseWriter) *flusher {
	f := flushers.Get().(*flusher) //nolint:errcheck // the pool has nothing else
	f.mu.Lock()
	f.w, f.rc, f.dirty = w, http.NewResponseController(w), true
	f.mu.Unlock()
	f.timer.Reset(flushWithin)
	return f
}

func (f *flusher) fire() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.rc != nil && f.dirty {
		f.dirty = false
		_ = f.rc.Flush() // the next write tells
	}
}

// write sends p, at once if now is set.
func (f *flusher) write(p []byte, now bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.w.Write(p); err != nil {
		return errClientGone
	}
	if now {
		f.dirty = false
		return f.rc.Flush()
	}
	if !f.dirty {
		f.dirty = true
		f.timer.Reset(flushWithin)
	}
	return nil
}

// release ends the flusher's part in the answer; what waits in the server's buffer stays there
// unless cut is set.
func (f *flusher) release(cut bool) {
	f.timer.Stop()
	f.mu.Lock()
	if cut {
		_ = f.rc.Flush()
	}
	f.w, f.rc, f.dirty = nil, nil, false
	f.mu.Unlock()
	flushers.Put(f)
}

// copyAnswer copies the body of resp to w. The error is errClientGone, or that of reading it; what
// came before an error has been flushed then.
func copyAnswer(w http.ResponseWriter, resp *http.Response, x *exchange, eachChunk bool) (int64, error) {
	if resp.Body == http.NoBody {
		return 0, nil
	}
	buffer := buffers.Get().(*[bufferBytes]byte) //nolint:errcheck // the pool has nothing else
	defer buffers.Put(buffer)
	f := newFlusher(w)
	var total int64
	for {
		n, err := resp.Body.Read(buffer[:])
		if n > 0 {
			x.touch()
			total += int64(n)
			x.set(writingClient)
			failed := f.write(buffer[:n], eachChunk)
			x.touch()
			x.clear(writingClient)
			if failed != nil {
				f.release(false)
				return total, errClientGone
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			f.release(false)
			return total, nil
		case err != nil:
			f.release(true)
			return total, err
		}
	}
}
