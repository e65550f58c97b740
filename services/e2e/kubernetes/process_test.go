//go:build kubernetes

package kubernetes

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	// waitLimit is far above what anything here takes, on a machine that does much else.
	waitLimit = 3 * time.Minute
	stopLimit = 30 * time.Second
	pollEvery = 50 * time.Millisecond
	logBytes  = 8 << 10
)

// process is a program that is ended when the test ends. What it said last is shown where the test failed.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	ended  chan struct{}
	abrupt bool // its end is not judged: it is killed

	mu  sync.Mutex
	log bytes.Buffer
}

func run(t *testing.T, path string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(path, args...), ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = p, p
	// What runs this test may itself be in a cluster, or have one.
	p.cmd.Env = slices.DeleteFunc(os.Environ(), func(pair string) bool {
		return strings.HasPrefix(pair, "KUBECONFIG=") || strings.HasPrefix(pair, "KUBERNETES_") || strings.HasPrefix(pair, "BERTH_SCHEDULER_")
	})
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("start %s: %v", path, err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in its log
		close(p.ended)
	}()
	t.Cleanup(func() {
		if p.abrupt {
			p.kill()
		}
		p.signal(syscall.SIGCONT)
		p.signal(syscall.SIGTERM)
		select {
		case <-p.ended:
		case <-time.After(stopLimit):
			t.Errorf("%s did not end at SIGTERM", path)
			p.kill()
		}
		if t.Failed() {
			t.Logf("%s said last:\n%s", path, p.last())
		}
	})
	return p
}

// Write keeps what the process says.
func (p *process) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(text)
}

func (p *process) last() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	text := p.log.String()
	return text[max(0, len(text)-logBytes):]
}

func (p *process) said(text string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Contains(p.log.String(), text)
}

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) } // it may have ended

// kill ends it at once and waits until it is gone.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.ended
}

// await returns once ok says so.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	late := time.NewTimer(waitLimit)
	defer late.Stop()
	for !ok() {
		select {
		case <-late.C:
			t.Fatalf("%s: not within %v", what, waitLimit)
		case <-tick.C:
		}
	}
}

// freeAddr is a loopback address that nobody listens on.
func freeAddr(t *testing.T) string {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

// wire is a way to a server that can be cut.
type wire struct {
	to       string
	listener net.Listener

	mu    sync.Mutex
	open  bool
	conns map[net.Conn]bool
}

func newWire(t *testing.T, to string) *wire {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{to: to, listener: l, open: true, conns: map[net.Conn]bool{}}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			running.Go(func() { w.carry(in) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		w.cut()
		running.Wait()
	})
	return w
}

func (w *wire) addr() string { return w.listener.Addr().String() }

func (w *wire) carry(in net.Conn) {
	defer func() { _ = in.Close() }()
	var dialer net.Dialer
	out, err := dialer.Dial("tcp", w.to)
	if err != nil {
		return
	}
	defer func() { _ = out.Close() }()
	if !w.keep(in, out) {
		return
	}
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
		both.Go(func() {
			_, err := io.Copy(way[0], way[1])
			if err == nil || !errors.Is(err, net.ErrClosed) {
				_ = in.Close()
				_ = out.Close()
			}
		})
	}
	both.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.conns, in)
	delete(w.conns, out)
}

func (w *wire) keep(conns ...net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range conns {
		w.conns[c] = true
	}
	return w.open
}

// cut ends every connection and refuses new ones until mend.
func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open = false
	for c := range w.conns {
		_ = c.Close()
	}
}

func (w *wire) mend() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open = true
}
