package isolation

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Spec says what to run. Exactly one of Argv and Builtin is set.
type Spec struct {
	ID        string
	Dir       string    // a folder of ours for this sandbox, made if missing
	Workspace string    // shown as WorkspacePath, made if missing
	Argv      []string  // the command
	Builtin   string    // the built-in program instead
	Env       []string  // NAME=value, beside and above HOME, PATH, USER; of one name the last counts
	Output    io.Writer // what the command prints
}

// Sandbox is one running sandbox. Its methods are safe for concurrent use.
type Sandbox struct {
	id      string
	pid     int      // the init, as the machine sees it
	pidfd   *os.File // the same, and never another process; nil on kernels before 5.3
	mode    Mode
	control *control
	cmd     *exec.Cmd
	freezer hierarchy
	pids    hierarchy
	done    chan struct{}

	mu     sync.Mutex // one of Pause, Resume, Kill at a time
	paused bool
}

// startText keeps the first bytes of what is printed before the command runs: bubblewrap's and the init's own complaints.
type startText struct {
	mu      sync.Mutex
	text    bytes.Buffer
	to      io.Writer
	started bool
}

func (w *startText) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.started && w.text.Len() < 4<<10 {
		w.text.Write(p)
	}
	return w.to.Write(p)
}

func (w *startText) begin() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.started = true
}

func (w *startText) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.TrimSpace(w.text.String())
}

// Start makes the sandbox and returns once its command was started. ctx bounds the start only.
func (b *Backend) Start(ctx context.Context, spec Spec) (_ *Sandbox, err error) {
	if err := b.prepareFolders(spec); err != nil {
		return nil, err
	}
	conn, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	specFile, err := b.specFile(spec)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	defer specFile.Close()
	infoRead, infoWrite, err := os.Pipe()
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("info pipe: %w", err)
	}
	defer infoRead.Close()
	defer infoWrite.Close()

	out := &startText{to: spec.Output}
	cmd := b.command(spec)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.ExtraFiles = []*os.File{theirs, specFile, infoWrite} // 3, 4, 5
	s := &Sandbox{
		id: spec.ID, mode: b.mode, control: newControl(conn), cmd: cmd,
		freezer: b.freezer, pids: b.pids, done: make(chan struct{}),
	}
	if err := cmd.Start(); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	_ = infoWrite.Close()
	_ = theirs.Close()
	go s.control.run()
	go func() {
		_ = cmd.Wait()
		_ = conn.Close()
		<-s.control.ended
		close(s.done)
		s.closePIDFD()
	}()
	defer func() {
		if err != nil {
			cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
			defer cancel()
			killErr := s.Kill(cleanup)
			if text := out.String(); text != "" {
				err = fmt.Errorf("%w: %s", err, text)
			}
			err = errors.Join(err, killErr)
		}
	}()
	if err := s.learnPID(ctx, infoRead); err != nil {
		return nil, err
	}
	if err := s.await(ctx, s.control.ready); err != nil {
		return nil, fmt.Errorf("init did not come up: %w", err)
	}
	// The init has started nothing yet, so everything that ever runs inside is in the groups.
	if err := s.enterGroups(b.cfg.MaxProcesses); err != nil {
		return nil, err
	}
	out.begin()
	if err := send(conn, message{Op: opStart}, nil); err != nil {
		return nil, err
	}
	select {
	case m := <-s.control.started:
		if m.Code != "" {
			return nil, errors.New(m.Error)
		}
		return s, nil
	case <-s.done:
		return nil, ErrGone
	case <-ctx.Done():
		return nil, fmt.Errorf("command did not start: %w", ctx.Err())
	}
}

func (b *Backend) prepareFolders(spec Spec) error {
	for _, dir := range []string{spec.Dir, spec.Workspace} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("sandbox folder: %w", err)
		}
	}
	if b.mode == Root {
		if err := os.Chown(spec.Workspace, b.cfg.UID, b.cfg.GID); err != nil {
			return fmt.Errorf("sandbox workspace: %w", err)
		}
	}
	if err := writeEtc(filepath.Join(spec.Dir, "etc"), spec.ID); err != nil {
		return fmt.Errorf("sandbox etc: %w", err)
	}
	return nil
}

// specFile returns an unnamed file that says what to run: an environment may be longer than a packet or an argument, and may hold
// secrets that have no place in a process list.
func (b *Backend) specFile(spec Spec) (*os.File, error) {
	argv, home, self := spec.Argv, WorkspacePath, selfPath
	if b.mode == None {
		home, self = spec.Workspace, b.self
	}
	if spec.Builtin != "" {
		argv = []string{self, builtinArgument, spec.Builtin}
	}
	s := initSpec{
		Argv: argv, Dir: home, MaxOpenFiles: b.cfg.MaxOpenFiles, Reaper: b.mode == None,
		Env: lastWins(append([]string{"PATH=" + defaultPath, "HOME=" + home, "USER=user", "LANG=C.UTF-8", "SANDBOX_ID=" + spec.ID}, spec.Env...)),
	}
	if b.pids.base == "" {
		s.MaxProcesses = b.cfg.MaxProcesses
	}
	if b.mode == Root {
		s.MapUID, s.MapGID = b.cfg.UID, b.cfg.GID
	}
	file, err := os.CreateTemp(spec.Dir, "spec-")
	if err != nil {
		return nil, fmt.Errorf("sandbox spec: %w", err)
	}
	_ = os.Remove(file.Name())
	if err := json.NewEncoder(file).Encode(s); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("sandbox spec: %w", err)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("sandbox spec: %w", err)
	}
	return file, nil
}

// lastWins returns env with each name once, with its last value. Of a name that is there twice a program sees what its own library
// likes: C and Python the first, shells the last.
func lastWins(env []string) []string {
	at := make(map[string]int, len(env))
	kept := make([]string, 0, len(env))
	for _, e := range env {
		name, _, _ := strings.Cut(e, "=")
		if i, twice := at[name]; twice {
			kept[i] = e
			continue
		}
		at[name] = len(kept)
		kept = append(kept, e)
	}
	return kept
}

func (b *Backend) command(spec Spec) *exec.Cmd {
	var cmd *exec.Cmd
	if b.mode == None {
		cmd = exec.Command(b.self, initArgument) //nolint:noctx // it outlives its start; Kill ends it
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	} else {
		args := bwrapArguments(mounts{
			mode: b.mode, hostname: hostname(spec.ID), self: b.self, workspace: spec.Workspace, etc: filepath.Join(spec.Dir, "etc"),
			extra: b.cfg.ReadOnly, infoFD: 5, noProc: b.noProc,
		})
		cmd = exec.Command(b.bwrap, append(args, "--", selfPath, initArgument)...) //nolint:noctx // it outlives its start; Kill ends it
	}
	if b.mode == Root {
		// Without the agent's further groups, such as adm or docker: the application would keep them in its user namespace.
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(os.Getuid()), Gid: uint32(os.Getgid())}}
	}
	cmd.Env = []string{"PATH=" + defaultPath, "GOMAXPROCS=2"}
	cmd.WaitDelay = killLimit
	return cmd
}

// hostname is the sandbox's id within what the kernel takes.
func hostname(id string) string { return id[:min(len(id), 64)] }

func (s *Sandbox) learnPID(ctx context.Context, info *os.File) error {
	if s.mode == None {
		s.pid = s.cmd.Process.Pid
		return nil
	}
	if deadline, ok := ctx.Deadline(); ok {
		_ = info.SetReadDeadline(deadline)
	}
	var told struct {
		Child int `json:"child-pid"`
	}
	if err := json.NewDecoder(info).Decode(&told); err != nil || told.Child <= 0 {
		return fmt.Errorf("bubblewrap made no sandbox: %w", errors.Join(err, ErrGone))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pid = told.Child
	if fd, err := unix.PidfdOpen(s.pid, 0); err == nil {
		s.pidfd = os.NewFile(uintptr(fd), "pidfd")
	}
	return nil
}

func (s *Sandbox) closePIDFD() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pidfd != nil {
		_ = s.pidfd.Close()
		s.pidfd = nil
	}
}

func (s *Sandbox) await(ctx context.Context, event <-chan struct{}) error {
	select {
	case <-event:
		return nil
	case <-s.done:
		return ErrGone
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *Sandbox) enterGroups(maxProcesses uint64) error {
	if s.freezer.base != "" {
		if err := s.freezer.add(s.id, s.pid); err != nil {
			return err
		}
	}
	if s.pids.base == "" {
		return nil
	}
	if s.pids != s.freezer {
		if err := s.pids.add(s.id, s.pid); err != nil {
			return err
		}
	}
	return s.pids.limitPids(s.id, maxProcesses)
}

// Dial connects to the port inside the sandbox: ErrRefused when nobody listens, ErrGone when the sandbox has ended. A paused
// sandbox does not answer; its callers must not ask.
func (s *Sandbox) Dial(ctx context.Context, port int) (net.Conn, error) {
	return s.control.dial(ctx, port)
}

// PID is the init's process id as the machine sees it.
func (s *Sandbox) PID() int { return s.pid }

// Done is closed when everything in the sandbox has ended.
func (s *Sandbox) Done() <-chan struct{} { return s.done }

// Exited is closed when the command has ended by itself; Status is then its exit code, or 128 plus a signal's number.
func (s *Sandbox) Exited() <-chan struct{} { return s.control.exited }

// Status is valid once Exited is closed.
func (s *Sandbox) Status() int { return s.control.status }

// pauseLimit bounds a freeze: a process that is deep in the kernel answers late.
const pauseLimit = 10 * time.Second

// Pause freezes every process of the sandbox and returns when all of them stand still. A paused sandbox may be paused again. What
// could not be frozen whole is thawed again.
func (s *Sandbox) Pause(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.paused {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, pauseLimit)
	defer cancel()
	if s.freezer.base != "" {
		if err := s.freezer.freeze(limited, s.id, true); err != nil {
			s.thawAnyway(ctx)
			return fmt.Errorf("pause %s: %w", s.id, err)
		}
		s.paused = true
		return nil
	}
	if err := stopAll(limited, s.pid); err != nil {
		s.thawAnyway(ctx)
		return fmt.Errorf("pause %s: %w", s.id, err)
	}
	s.paused = true
	return nil
}

// Resume thaws it. A running sandbox may be resumed.
func (s *Sandbox) Resume(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.paused {
		return nil
	}
	if err := s.thaw(ctx); err != nil {
		return fmt.Errorf("resume %s: %w", s.id, err)
	}
	s.paused = false
	return nil
}

func (s *Sandbox) thaw(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, pauseLimit)
	defer cancel()
	if s.freezer.base != "" {
		return s.freezer.freeze(limited, s.id, false)
	}
	return continueAll(s.pid)
}

func (s *Sandbox) thawAnyway(ctx context.Context) { _ = s.thaw(context.WithoutCancel(ctx)) }

// killLimit bounds the end of a sandbox: pid 1 dies at once, the kernel then takes the rest.
const killLimit = 10 * time.Second

// Kill ends everything in the sandbox and returns when it is gone. It may be called again.
func (s *Sandbox) Kill(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	limited, cancel := context.WithTimeout(ctx, killLimit)
	defer cancel()
	select {
	case <-s.done:
	default:
		s.signalAll(limited)
	}
	select {
	case <-s.done:
	case <-limited.Done():
		return fmt.Errorf("end %s: %w", s.id, limited.Err())
	}
	if s.pids == s.freezer {
		return s.freezer.remove(limited, s.id)
	}
	return errors.Join(s.freezer.remove(limited, s.id), s.pids.remove(limited, s.id))
}

// signalAll kills pid 1 before it thaws, so that nothing inside runs once more; a v1 freezer lets signals through only when thawed.
func (s *Sandbox) signalAll(ctx context.Context) {
	if s.mode == None {
		killDescendants(s.pid)
	}
	switch {
	case s.pidfd != nil:
		_ = unix.PidfdSendSignal(int(s.pidfd.Fd()), unix.SIGKILL, nil, 0)
	case s.pid > 0:
		_ = syscall.Kill(s.pid, syscall.SIGKILL)
	default: // it never told its pid; the parent-death signal does the rest
		_ = s.cmd.Process.Kill()
	}
	if s.paused {
		_ = s.thaw(ctx)
		s.paused = false
	}
}
