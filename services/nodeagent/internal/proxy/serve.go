// Package proxy carries bytes between a request and a port inside a sandbox: the target, the headers and
// the body as they came, in both directions at once, trailers and WebSockets too.
package proxy

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Request is one exchange to carry.
type Request struct {
	Conns     *Conns // of the sandbox
	Port      int
	Target    string            // for the request line, exactly
	IsNodeKey func(string) bool // which X-API-Key values are ours and stop here
}

// Limits of an exchange with an application.
const (
	dialLimit           = 5 * time.Second
	continueAfter       = time.Second
	maxAnswerHeadBytes  = 256 << 10
	copyBytes           = 32 << 10
	flushAfter          = 10 * time.Millisecond
	closeOtherSideAfter = time.Second
)

// Error is an exchange that failed before an answer had begun; the caller answers.
type Error struct {
	Dial   bool // nothing was sent
	Client bool // the client's body could not be read
	Cause  error
}

func (e *Error) Error() string { return "exchange with the application: " + e.Cause.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Serve carries r to the application and its answer to w. A returned error is an *Error: nothing was written to w yet. An answer
// that breaks off is cut visibly: Serve panics with http.ErrAbortHandler, as handlers do.
func Serve(w http.ResponseWriter, r *http.Request, to Request) error {
	control := http.NewResponseController(w)
	_ = control.EnableFullDuplex() // HTTP/2 has it anyway

	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	early := &earlyAnswers{w: w}
	out, marked, upgrade := outgoing(ctx, early, r, to)
	transport, done := to.Conns.transport(kindOf(out, marked, upgrade))
	defer done()
	answer, err := transport.RoundTrip(out)
	early.stop()
	if err != nil {
		if body, ok := out.Body.(*requestBody); ok && body.failed.Load() {
			return &Error{Client: true, Cause: err}
		}
		if known, ok := errors.AsType[*Error](err); ok {
			return known
		}
		return &Error{Cause: err}
	}
	defer answer.Body.Close()
	if answer.StatusCode == http.StatusSwitchingProtocols {
		if !upgrade {
			return &Error{Cause: errors.New("unexpected protocol switch")}
		}
		return tunnel(w, answer)
	}
	forward(w, control, answer)
	return nil
}

// outgoing builds the application's request.
func outgoing(ctx context.Context, early *earlyAnswers, r *http.Request, to Request) (out *http.Request, marked, upgrade bool) {
	u, marked := opaque(to.Target)
	u.Host = strconv.Itoa(to.Port) // for Conns; the application gets the client's
	header, upgrade := toApplication(r, to.IsNodeKey)
	out = &http.Request{
		Method: r.Method, URL: u, Host: r.Host, Header: header,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		ContentLength: r.ContentLength,
	}
	if r.ContentLength != 0 && r.Body != nil && r.Body != http.NoBody {
		trailer := make(http.Header)
		for name := range r.Trailer {
			trailer[name] = nil // announced
		}
		if r.ContentLength < 0 {
			out.Trailer = trailer
		}
		out.Body = &requestBody{body: r.Body, in: r, out: trailer}
	}
	trace := &httptrace.ClientTrace{Got1xxResponse: early.send}
	return out.WithContext(httptrace.WithClientTrace(ctx, trace)), marked, upgrade
}

// earlyAnswers passes 1xx answers on, until the final one has come: the transport may tell of one late, from a goroutine of its
// own, when nobody may touch the answer any more.
type earlyAnswers struct {
	mu      sync.Mutex
	w       http.ResponseWriter
	stopped bool
}

func (e *earlyAnswers) send(code int, header textproto.MIMEHeader) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopped || code == http.StatusContinue { // our server sends its own 100 when the body is read
		return nil
	}
	toClient(e.w.Header(), http.Header(header))
	e.w.WriteHeader(code)
	clear(e.w.Header())
	return nil
}

func (e *earlyAnswers) stop() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stopped = true
}

// requestBody is the client's body; at its end the trailers that came go on.
type requestBody struct {
	body   io.ReadCloser
	in     *http.Request
	out    http.Header
	failed atomic.Bool
}

func (b *requestBody) Read(p []byte) (int, error) {
	n, err := b.body.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.failed.Store(true)
	}
	if errors.Is(err, io.EOF) {
		for name, values := range b.in.Trailer {
			if !strings.HasPrefix(name, reserved) {
				b.out[name] = values
			}
		}
	}
	return n, err
}

func (b *requestBody) Close() error { return nil } // the server closes it

// forward sends the answer. What is no stream may wait a moment in our buffer.
func forward(w http.ResponseWriter, control *http.ResponseController, answer *http.Response) {
	toClient(w.Header(), answer.Header)
	for name := range answer.Trailer { // announced ones are announced
		w.Header().Add("Trailer", name)
	}
	announced := len(answer.Trailer)
	for _, name := range []string{"Date", "Content-Type"} { // which the server would add
		if _, sent := w.Header()[name]; !sent {
			w.Header()[name] = nil
		}
	}
	w.WriteHeader(answer.StatusCode)

	err := copyAnswer(w, control, answer)
	for name, values := range answer.Trailer {
		if announced != len(answer.Trailer) {
			name = http.TrailerPrefix + name
		}
		w.Header()[name] = values
	}
	if err != nil {
		panic(http.ErrAbortHandler) // a cut must look like one
	}
}

func copyAnswer(w http.ResponseWriter, control *http.ResponseController, answer *http.Response) error {
	f := newFlusher(w, control, answer.ContentLength < 0 || isStream(answer.Header))
	defer f.stop()
	buf := make([]byte, copyBytes)
	for {
		n, err := answer.Body.Read(buf)
		if n > 0 {
			// At an end that is known the server flushes by itself, in one piece with the trailers.
			if err := f.write(buf[:n], errors.Is(err, io.EOF)); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func isStream(h http.Header) bool {
	kind := strings.ToLower(h.Get("Content-Type"))
	return strings.HasPrefix(kind, "text/event-stream") || strings.HasPrefix(kind, "application/grpc") ||
		strings.HasPrefix(kind, "application/connect+")
}

// tunnel joins the client's connection with the application's after a 101. When one side ends, the other is given a moment to
// say its last word.
func tunnel(w http.ResponseWriter, answer *http.Response) error {
	application, ok := answer.Body.(io.ReadWriteCloser)
	if !ok {
		return &Error{Cause: errors.New("connection cannot be taken over")}
	}
	hijacker, ok := w.(http.Hijacker)
	if !ok {
		if u, wraps := w.(interface{ Unwrap() http.ResponseWriter }); wraps {
			hijacker, ok = u.Unwrap().(http.Hijacker)
		}
	}
	if !ok {
		return &Error{Cause: errors.New("the client's connection cannot be taken over")}
	}
	client, buffered, err := hijacker.Hijack()
	if err != nil {
		return &Error{Cause: err}
	}
	defer client.Close()
	_ = client.SetDeadline(time.Time{})

	header := make(http.Header)
	toClient(header, answer.Header)
	header.Set("Connection", "Upgrade")
	header.Set("Upgrade", "websocket")
	head := &http.Response{StatusCode: http.StatusSwitchingProtocols, ProtoMajor: 1, ProtoMinor: 1, Header: header}
	if err := head.Write(buffered); err != nil {
		return nil
	}
	if err := buffered.Flush(); err != nil {
		return nil
	}
	var both sync.WaitGroup
	ended := make(chan struct{}, 2)
	both.Go(func() {
		_, _ = io.Copy(application, buffered.Reader)
		ended <- struct{}{}
	})
	both.Go(func() {
		_, _ = io.Copy(client, application)
		ended <- struct{}{}
	})
	<-ended
	wait := time.NewTimer(closeOtherSideAfter)
	defer wait.Stop()
	select {
	case <-ended:
	case <-wait.C:
	}
	_ = client.Close()
	_ = application.Close()
	both.Wait()
	return nil
}
