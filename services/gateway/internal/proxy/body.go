package proxy

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

const (
	// keepBytes of a client's body are kept until the answer begins, so that it can be sent again to
	// another node.
	keepBytes = 64 << 10
	// continueWait is how long a node is waited for to ask for a body the client holds back.
	continueWait = time.Second
	// lingerFor is how long what is left of an unwanted body is taken.
	lingerFor = 500 * time.Millisecond
)

var (
	errUnsent    = errors.New("the node answered before it asked for the body")
	errTaken     = errors.New("another attempt has taken the body over")
	errForgotten = errors.New("the body is not kept any more")
)

// clientBody is the body of a client's request, read once and sent at most twice. Each attempt
// reads it through a reader of its own; a later reader takes it over from an earlier one and begins
// again with what was kept.
type clientBody struct {
	src     io.Reader
	request *http.Request // its trailers are known once src has ended
	x       *exchange
	limit   int64 // 0: none
	expect  bool  // the client waits to be asked

	asked    chan struct{} // closed when the node asks for the body
	askOnce  sync.Once
	answered chan struct{} // closed when a final answer came
	over     chan struct{} // closed when the exchange ends

	reading sync.Mutex // held while src is read: an attempt that was given up may still be in it

	mu      sync.Mutex // of what follows; never held while src is read
	attempt int
	kept    []byte
	lost    bool // more was read than is kept
	size    int64
	err     error // of src, io.EOF included
}

func newClientBody(r *http.Request, x *exchange) *clientBody {
	return &clientBody{
		src: r.Body, request: r, x: x, expect: hasToken(r.Header["Expect"], "100-continue"),
		asked: make(chan struct{}), answered: make(chan struct{}), over: make(chan struct{}),
	}
}

// ask says that the node wants the body.
func (b *clientBody) ask() { b.askOnce.Do(func() { close(b.asked) }) }

// failed returns the client's own failure to send its body, nil if there was none.
func (b *clientBody) failed() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err == nil || errors.Is(b.err, io.EOF) || b.x.unreadUsed.Load() {
		return nil
	}
	return b.err
}

// repeatable tells whether another attempt can send all of the body.
func (b *clientBody) repeatable() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.lost
}

// forget ends the keeping: an answer has begun.
func (b *clientBody) forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.size > 0 {
		b.lost = true
	}
	b.kept = nil
}

// reader returns the body from its beginning, for the next attempt. trailer gets the client's
// trailers before the reader ends.
func (b *clientBody) reader(trailer http.Header) (io.ReadCloser, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.lost {
		return nil, errForgotten
	}
	b.attempt++
	return &attemptBody{b: b, attempt: b.attempt, trailer: trailer}, nil
}

// attemptBody is what one attempt reads.
type attemptBody struct {
	b       *clientBody
	attempt int
	at      int // in kept
	trailer http.Header
}

// Close does nothing: the client's body outlives an attempt.
func (a *attemptBody) Close() error { return nil }

func (a *attemptBody) Read(p []byte) (int, error) {
	if a.b.expect && !a.b.mayRead() {
		return 0, errUnsent
	}
	a.b.reading.Lock()
	defer a.b.reading.Unlock()
	if n, err, done := a.fromKept(p); done {
		return n, err
	}
	return a.fromClient(p)
}

// fromKept reads what is known already: bytes that were kept, and how the body ended.
func (a *attemptBody) fromKept(p []byte) (n int, err error, done bool) {
	b := a.b
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case a.attempt != b.attempt:
		return 0, errTaken, true
	case a.at < len(b.kept):
		n = copy(p, b.kept[a.at:])
		a.at += n
		return n, nil, true
	case b.err != nil:
		if errors.Is(b.err, io.EOF) {
			a.takeTrailers()
		}
		return 0, b.err, true
	}
	return 0, nil, false
}

// fromClient reads on from the client and keeps what came. b.reading is held.
func (a *attemptBody) fromClient(p []byte) (int, error) {
	b := a.b
	b.x.set(readingClient)
	if b.x.noMoreReads() {
		b.x.clear(readingClient)
		return 0, errNodeGone
	}
	n, err := b.src.Read(p)
	b.x.clear(readingClient)

	b.mu.Lock()
	defer b.mu.Unlock()
	if n > 0 {
		b.x.touch()
		b.size += int64(n)
		switch {
		case b.limit > 0 && b.size > b.limit:
			n, err = 0, errTooLarge
		case b.lost:
		case b.size > keepBytes:
			b.lost, b.kept = true, nil
		default:
			b.kept = append(b.kept, p[:n]...)
		}
	}
	if err != nil {
		b.err = err
		if errors.Is(err, io.EOF) {
			b.x.set(bodySent)
			b.x.touch()
		}
	}
	switch {
	case a.attempt != b.attempt:
		return 0, errTaken
	case n > 0:
		a.at += n
		return n, nil // how it ended is told by the next read
	}
	if errors.Is(err, io.EOF) {
		a.takeTrailers()
	}
	return 0, err
}

// leave ends the exchange's part in the body. Where it was not read to its end, its connection
// serves no other request: what is on its way is taken for a moment, so that the client sees its
// answer and not a reset, and no longer, for a client may send nothing for ever.
func (b *clientBody) leave(rc *http.ResponseController) {
	close(b.over)
	b.x.over.Store(true)
	if b.x.state.Load()&bodySent != 0 || b.request.ProtoMajor != 1 {
		return
	}
	// An attempt may still be reading. The server would interrupt it, and take the deadline off with that.
	if rc.SetReadDeadline(time.Unix(1, 0)) == nil {
		b.reading.Lock()
		defer b.reading.Unlock()
	}
	_ = rc.SetReadDeadline(time.Now().Add(lingerFor))
}

// takeTrailers hands on the client's trailers, announced or not.
func (a *attemptBody) takeTrailers() {
	if a.b.request == nil || a.trailer == nil {
		return
	}
	for name, values := range a.b.request.Trailer {
		if !forbiddenTrailer(name) {
			a.trailer[name] = values
		}
	}
}

// mayRead waits until a body that the client holds back is wanted: the node asks, or says nothing
// for a while. A final answer that comes first means never.
func (b *clientBody) mayRead() bool {
	select {
	case <-b.asked:
		return true
	default:
	}
	patience := time.NewTimer(continueWait)
	defer patience.Stop()
	select {
	case <-b.asked:
		return true
	case <-patience.C:
		b.ask()
		return true
	case <-b.over:
		return false
	case <-b.answered:
	}
	// An error now would close the connection under the answer that is being read from it.
	<-b.over
	return false
}

// fixedBody is a body that is known whole: each attempt reads it from its beginning.
func fixedBody(body []byte) io.ReadCloser { return io.NopCloser(bytes.NewReader(body)) }
