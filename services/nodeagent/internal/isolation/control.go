package isolation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
)

// Operations on the control socket. The agent sends start and dial, the init answers ready, started,
// dialed and exited. One message is one packet of JSON; dialed carries a socket as SCM_RIGHTS.
const (
	opStart   = "start"
	opDial    = "dial"
	opReady   = "ready"
	opStarted = "started"
	opDialed  = "dialed"
	opExited  = "exited"
)

// maxMessageBytes is far above any message; a longer one is cut and then fails to decode.
const maxMessageBytes = 16 << 10

// Codes of a failed dial: what the agent must tell apart.
const (
	codeRefused = "refused"
	codeFailed  = "failed"
)

type message struct {
	Op     string `json:"op"`
	N      uint64 `json:"n,omitempty"`
	Port   int    `json:"port,omitempty"`
	Code   string `json:"code,omitempty"`
	Error  string `json:"error,omitempty"`
	Status int    `json:"status,omitempty"`
}

// socketPair returns the agent's end as a connection and the init's end as a file to inherit.
func socketPair() (*net.UnixConn, *os.File, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("control socket: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "control"), os.NewFile(uintptr(fds[1]), "control")
	conn, err := net.FileConn(ours)
	_ = ours.Close() // FileConn has its own copy
	if err != nil {
		_ = theirs.Close()
		return nil, nil, fmt.Errorf("control socket: %w", err)
	}
	unix, ok := conn.(*net.UnixConn)
	if !ok { // cannot be: it was made as one
		_ = theirs.Close()
		return nil, nil, fmt.Errorf("control socket: %w", errors.Join(errors.ErrUnsupported, conn.Close()))
	}
	return unix, theirs, nil
}

func send(conn *net.UnixConn, m message, rights []byte) error {
	text, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode %s: %w", m.Op, err)
	}
	if _, _, err := conn.WriteMsgUnix(text, rights, nil); err != nil {
		return fmt.Errorf("send %s: %w", m.Op, err)
	}
	return nil
}

// receive reads one message and the descriptor that came with it, nil if none did. More than one
// descriptor is not ours: all are closed.
func receive(conn *net.UnixConn, buf []byte) (message, *os.File, error) {
	oob := make([]byte, syscall.CmsgSpace(4*8))
	n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
	if err != nil {
		return message{}, nil, err
	}
	file := onlyDescriptor(oob[:oobn])
	if n == 0 {
		if file != nil {
			_ = file.Close()
		}
		return message{}, nil, net.ErrClosed // the other end is gone
	}
	var m message
	if err := json.Unmarshal(buf[:n], &m); err != nil {
		if file != nil {
			_ = file.Close()
		}
		return message{}, nil, fmt.Errorf("decode control message: %w", err)
	}
	return m, file, nil
}

func onlyDescriptor(oob []byte) *os.File {
	controls, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	var fds []int
	for _, c := range controls {
		if got, err := syscall.ParseUnixRights(&c); err == nil {
			fds = append(fds, got...)
		}
	}
	if len(fds) == 1 {
		syscall.CloseOnExec(fds[0])
		return os.NewFile(uintptr(fds[0]), "passed")
	}
	for _, fd := range fds {
		_ = syscall.Close(fd)
	}
	return nil
}

// ErrRefused says that nobody listens on the port.
var ErrRefused = errors.New("connection refused inside the sandbox")

// ErrGone says that the sandbox has ended.
var ErrGone = errors.New("sandbox has ended")

// control is the agent's end: it numbers dials and hands each answer to who asked.
type control struct {
	conn    *net.UnixConn
	ready   chan struct{} // closed by the first ready
	started chan message  // one started
	exited  chan struct{} // closed when the application ended
	ended   chan struct{} // closed when the socket ended
	status  int           // the application's, valid after exited

	mu      sync.Mutex
	n       uint64
	waiting map[uint64]chan dialed
}

type dialed struct {
	conn net.Conn
	err  error
}

func newControl(conn *net.UnixConn) *control {
	return &control{
		conn:  conn,
		ready: make(chan struct{}), started: make(chan message, 1),
		exited: make(chan struct{}), ended: make(chan struct{}),
		waiting: make(map[uint64]chan dialed),
	}
}

// run reads until the socket ends; then everybody who waits is told so.
func (c *control) run() {
	defer close(c.ended)
	defer c.conn.Close()
	buf := make([]byte, maxMessageBytes)
	var isReady, isStarted, hasExited bool
	for {
		m, file, err := receive(c.conn, buf)
		if err != nil {
			c.failAll()
			return
		}
		switch {
		case m.Op == opReady && !isReady:
			isReady = true
			close(c.ready)
		case m.Op == opStarted && !isStarted:
			isStarted = true
			c.started <- m
		case m.Op == opExited && !hasExited:
			hasExited = true
			c.status = m.Status
			close(c.exited)
		case m.Op == opDialed:
			c.answer(m, file)
			file = nil
		}
		if file != nil {
			_ = file.Close()
		}
	}
}

func (c *control) answer(m message, file *os.File) {
	c.mu.Lock()
	wait, found := c.waiting[m.N]
	delete(c.waiting, m.N)
	c.mu.Unlock()
	if file != nil {
		defer file.Close()
	}
	if !found {
		return
	}
	switch {
	case m.Code == codeRefused:
		wait <- dialed{err: ErrRefused}
	case m.Code != "" || file == nil:
		wait <- dialed{err: fmt.Errorf("connect inside the sandbox: %s", m.Error)}
	default:
		conn, err := net.FileConn(file)
		wait <- dialed{conn: conn, err: err}
	}
}

func (c *control) failAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n, wait := range c.waiting {
		delete(c.waiting, n)
		wait <- dialed{err: ErrGone}
	}
}

// dial asks for a connection to port. The answer that comes after ctx has ended is closed.
func (c *control) dial(ctx context.Context, port int) (net.Conn, error) {
	wait := make(chan dialed, 1)
	c.mu.Lock()
	c.n++
	n := c.n
	c.waiting[n] = wait
	c.mu.Unlock()

	if err := send(c.conn, message{Op: opDial, N: n, Port: port}, nil); err != nil {
		c.forget(n, wait)
		return nil, fmt.Errorf("%w: %w", ErrGone, err)
	}
	select {
	case d := <-wait:
		return d.conn, d.err
	case <-c.ended:
		c.forget(n, wait)
		return nil, ErrGone
	case <-ctx.Done():
		c.forget(n, wait)
		return nil, fmt.Errorf("connect inside the sandbox: %w", ctx.Err())
	}
}

func (c *control) forget(n uint64, wait chan dialed) {
	c.mu.Lock()
	_, pending := c.waiting[n]
	delete(c.waiting, n)
	c.mu.Unlock()
	if pending {
		return // whoever answers now finds nobody, and closes
	}
	if d := <-wait; d.conn != nil { // an answer is on its way or there
		_ = d.conn.Close()
	}
}
