package dev

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// kind is the kind of a process: the service's name on the command line.
type kind string

const (
	scheduler kind = "scheduler"
	gateway   kind = "gateway"
	nodeagent kind = "nodeagent"
)

const (
	firstPause = 250 * time.Millisecond
	maxPause   = 10 * time.Second
	goodLife   = 30 * time.Second // after so long a life the pauses begin anew
	outputWait = time.Second      // for what a dead process's own children still write
)

// process is one service of the stack, through all its restarts.
type process struct {
	kind kind
	name string // "gateway-1"; of a node, its id
	args []string
	env  []string
	ops  string // address of /readyz

	twirp, grpc, public string // what it serves; "" where it does not

	mu      sync.Mutex
	pid     int           // 0: it does not run
	ended   chan struct{} // closed when the present one has ended; nil before the first
	stop    chan struct{} // closed to end restarts
	stopped bool
	over    chan struct{} // closed when no more will be started
}

// spawner starts children from one thread that lives as long as the stack: the kernel kills a child
// whose Pdeathsig is set when the *thread* that made it ends, not only with the process.
type spawner struct {
	jobs chan func()
	done chan struct{}
}

func newSpawner() *spawner {
	s := &spawner{jobs: make(chan func()), done: make(chan struct{})}
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		defer close(s.done)
		for job := range s.jobs {
			job()
		}
	}()
	return s
}

// start is cmd.Start on the spawner's thread.
func (s *spawner) start(cmd *exec.Cmd) error {
	result := make(chan error, 1)
	s.jobs <- func() { result <- cmd.Start() }
	return <-result
}

// stop ends the thread, and with it every child that still lives.
func (s *spawner) stop() {
	close(s.jobs)
	<-s.done
}

// launch starts p and keeps it running until it is stopped.
func (s *Stack) launch(p *process) error {
	p.stop, p.over = make(chan struct{}), make(chan struct{})
	s.mu.Lock()
	s.processes = append(s.processes, p)
	s.mu.Unlock()
	cmd, err := s.exec(p)
	if err != nil {
		close(p.over)
		return err
	}
	go s.keep(p, cmd)
	return nil
}

// exec starts p once.
func (s *Stack) exec(p *process) (*exec.Cmd, error) {
	out, err := s.logs.writer(p.kind, p.name)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(s.o.Binary, p.args...) //nolint:noctx // it outlives the start's ctx; stopAll ends it
	cmd.Env = append(os.Environ(), p.env...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.WaitDelay = outputWait
	// A group of its own: Ctrl-C in the terminal is for this process, which stops the others in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return nil, errStopped
	}
	if err := s.spawn.start(cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	p.pid, p.ended = cmd.Process.Pid, make(chan struct{})
	return cmd, nil
}

var errStopped = errors.New("stopped")

// keep waits for p's process and starts it again until p is stopped.
func (s *Stack) keep(p *process, cmd *exec.Cmd) {
	defer close(p.over)
	pause := firstPause
	for {
		begun := time.Now()
		err := cmd.Wait()
		if out, ok := cmd.Stdout.(*lineWriter); ok {
			out.flush()
		}
		p.mu.Lock()
		p.pid = 0
		close(p.ended)
		stopped := p.stopped
		p.mu.Unlock()
		if stopped {
			return
		}
		if time.Since(begun) > goodLife {
			pause = firstPause
		}
		log := s.o.Log.With(slog.String("process", p.name), slog.String("end", endOf(err)))
		if s.o.NoRestart {
			log.Warn("process ended by itself; it stays down, as --no-restart asks")
			return
		}
		log.Warn("process ended by itself; starting it again", slog.Duration("in", pause))
		if cmd = s.again(p, &pause); cmd == nil {
			return
		}
		if err := s.writeReadyFile(); err != nil {
			s.o.Log.Error("ready file is out of date", slog.Any("error", err))
		}
	}
}

// again starts p after a pause, which grows; nil when p was stopped meanwhile.
func (s *Stack) again(p *process, pause *time.Duration) *exec.Cmd {
	for {
		timer := time.NewTimer(*pause)
		select {
		case <-p.stop:
			timer.Stop()
			return nil
		case <-timer.C:
		}
		*pause = min(2**pause, maxPause)
		cmd, err := s.exec(p)
		if err == nil {
			return cmd
		}
		if errors.Is(err, errStopped) {
			return nil
		}
		s.o.Log.Error("process does not start", slog.String("process", p.name), slog.Any("error", err))
	}
}

func endOf(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

// stopAll ends all processes of a kind at once and waits for them; those that take too long are killed.
func (s *Stack) stopAll(ctx context.Context, k kind) error {
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	var stopping []*process
	s.mu.Lock()
	for _, p := range s.processes {
		if p.kind == k {
			stopping = append(stopping, p)
		}
	}
	s.mu.Unlock()
	for _, p := range stopping {
		p.signal(syscall.SIGTERM)
	}
	var errs []error
	for _, p := range stopping {
		select {
		case <-p.over:
			continue
		case <-ctx.Done():
		}
		p.signal(syscall.SIGKILL)
		<-p.over
		errs = append(errs, fmt.Errorf("%s did not stop within %v and was killed", p.name, stopTimeout))
	}
	return errors.Join(errs...)
}

// signal marks p as stopped and signals its process, if it has one.
func (p *process) signal(signal syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.stopped {
		p.stopped = true
		close(p.stop)
	}
	if p.pid != 0 {
		_ = syscall.Kill(p.pid, signal) // it may have ended this moment
	}
}

// present returns the pid of p's process, 0 if there is none, and a channel that closes at its end.
func (p *process) present() (int, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pid, p.ended
}
