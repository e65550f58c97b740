package isolation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The hidden arguments under which the binary is the init of a sandbox, or one of its built-in programs.
const (
	initArgument    = "berth-sandbox-init"
	builtinArgument = "berth-sandbox-builtin"
)

// Descriptors the init inherits.
const (
	controlFD = 3
	specFD    = 4
)

// dialLimit bounds a connect inside the sandbox: on a loopback only a listener with a full queue is slow.
const dialLimit = 5 * time.Second

// initSpec is what the init is told to run.
type initSpec struct {
	Argv         []string `json:"argv"`
	Env          []string `json:"env"`
	Dir          string   `json:"dir"`
	MaxOpenFiles uint64   `json:"maxOpenFiles"`
	MaxProcesses uint64   `json:"maxProcesses"` // 0: a cgroup limits them
	MapUID       int      `json:"mapUID"`       // > 0: a user namespace of its own, where UserID is this user of the machine
	MapGID       int      `json:"mapGID"`
	Reaper       bool     `json:"reaper"` // not pid 1: adopt what the application leaves behind
}

// UserID is the user and group the application is inside its sandbox.
const UserID = 1000

// MaybeInit does the work of a sandbox's init or of a built-in program if this process was started as
// one, and reports whether it was. It is called first thing in main; when it returns true there is nothing
// left to do. builtin runs the named built-in program until it ends.
func MaybeInit(builtin func(name string) error) bool {
	if len(os.Args) < 2 {
		return false
	}
	var err error
	switch os.Args[1] {
	case initArgument:
		err = runInit()
	case execArgument:
		runExec()
	case builtinArgument:
		err = errors.New("which built-in program?")
		if len(os.Args) == 3 {
			err = builtin(os.Args[2])
		}
	default:
		return false
	}
	if err != nil {
		_, _ = io.WriteString(os.Stderr, os.Args[1]+": "+err.Error()+"\n")
	}
	return true
}

func runInit() error {
	// Not even a process of the same user may look into, or trace, the one that holds the control socket.
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	debug.SetGCPercent(20) // many of these run on one machine
	// The application gets no descriptor but its three, whatever the agent or bubblewrap were started with.
	closeOnExec(controlFD)

	file := os.NewFile(controlFD, "control")
	generic, err := net.FileConn(file)
	_ = file.Close()
	if err != nil {
		return fmt.Errorf("no control socket, only the node agent starts this: %w", err)
	}
	conn, ok := generic.(*net.UnixConn)
	if !ok {
		return errors.New("no control socket, only the node agent starts this")
	}
	defer conn.Close()

	var spec initSpec
	specFile := os.NewFile(specFD, "spec")
	err = json.NewDecoder(specFile).Decode(&spec)
	_ = specFile.Close()
	if err != nil {
		return fmt.Errorf("read what to run: %w", err)
	}
	if spec.Reaper {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("become reaper: %w", err)
		}
		defer killDescendants(os.Getpid())
	}
	// A terminal's or a supervisor's signal is not the agent's word; the control socket is. They are caught and dropped, for what is
	// ignored here the application and all it starts would ignore, too.
	dropped := make(chan os.Signal, 1)
	signal.Notify(dropped, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer signal.Stop(dropped)
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	defer signal.Stop(children)

	return serveControl(conn, spec, children)
}

// serveControl answers the agent until its end of the socket closes: then the agent is gone, and this
// returns, which ends the sandbox.
func serveControl(conn *net.UnixConn, spec initSpec, children <-chan os.Signal) error {
	if err := send(conn, message{Op: opReady}, nil); err != nil {
		return err
	}
	type incoming struct {
		m   message
		err error
	}
	messages := make(chan incoming)
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		buf := make([]byte, maxMessageBytes)
		for {
			m, file, err := receive(conn, buf)
			if file != nil {
				_ = file.Close()
			}
			select {
			case messages <- incoming{m, err}:
			case <-stop:
				return
			}
			if err != nil {
				return
			}
		}
	}()

	application := 0
	for {
		select {
		case <-children:
			if status, ended := reap(application); ended {
				application = 0
				if err := send(conn, message{Op: opExited, Status: status}, nil); err != nil {
					return nil
				}
			}
		case in := <-messages:
			if in.err != nil {
				return nil
			}
			switch in.m.Op {
			case opStart:
				pid, err := startApplication(spec)
				answer := message{Op: opStarted}
				if err != nil {
					answer.Code, answer.Error = codeFailed, err.Error()
				}
				application = pid
				if err := send(conn, answer, nil); err != nil {
					return nil
				}
			case opDial:
				go dialInside(conn, in.m)
			}
		}
	}
}

// reap collects every ended child and reports the application's status if it is among them: its exit code, or 128
// and the signal that ended it.
func reap(application int) (status int, ended bool) {
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return status, ended
		}
		if pid == application && application != 0 {
			ended = true
			status = ws.ExitStatus()
			if ws.Signaled() {
				status = 128 + int(ws.Signal())
			}
		}
	}
}

func startApplication(spec initSpec) (pid int, err error) {
	path, err := lookPath(spec.Argv[0], spec.Env)
	if err != nil {
		return 0, err
	}
	attr := &syscall.ProcAttr{Dir: spec.Dir, Sys: &syscall.SysProcAttr{Setsid: true}}
	if spec.MapUID > 0 {
		attr.Sys.Cloneflags = syscall.CLONE_NEWUSER
		attr.Sys.UidMappings = []syscall.SysProcIDMap{{ContainerID: UserID, HostID: spec.MapUID, Size: 1}}
		attr.Sys.GidMappings = []syscall.SysProcIDMap{{ContainerID: UserID, HostID: spec.MapGID, Size: 1}}
		attr.Sys.Credential = &syscall.Credential{Uid: UserID, Gid: UserID, NoSetGroups: true}
	}
	pid, err = forkExec(execSpec{
		Path: path, Argv: spec.Argv, Env: spec.Env, MaxOpenFiles: spec.MaxOpenFiles, MaxProcesses: spec.MaxProcesses,
	}, attr)
	if err != nil {
		return 0, err
	}
	if spec.MapUID > 0 {
		dropAll()
	}
	return pid, nil
}

// dropAll gives up the init's capabilities once the application runs. It needs none to connect, to reap, or to be the
// reason the namespace ends. Where the runtime cannot do it on all threads (cgo), they stay: the application cannot reach
// the init, which is another user's process outside its user namespace.
func dropAll() {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	allThreadsCapset(&header, &none)
}

// lookPath finds name as a shell would, with the application's own PATH.
func lookPath(name string, env []string) (string, error) {
	if strings.ContainsRune(name, '/') {
		return name, nil
	}
	path := defaultPath
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok {
			path = v
		}
	}
	for _, dir := range filepath.SplitList(path) {
		full := filepath.Join(dir, name)
		if info, err := os.Stat(full); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
			return full, nil
		}
	}
	return "", fmt.Errorf("start %s: not found in %s", name, path)
}

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

func dialInside(conn *net.UnixConn, m message) {
	answer := message{Op: opDialed, N: m.N}
	tcp, err := connectLoopback(m.Port)
	if err != nil {
		answer.Code, answer.Error = codeFailed, err.Error()
		if errors.Is(err, syscall.ECONNREFUSED) {
			answer.Code = codeRefused
		}
		_ = send(conn, answer, nil) // the agent is gone: so are we, soon
		return
	}
	defer tcp.Close()
	raw, err := tcp.SyscallConn()
	if err == nil {
		var sendErr error
		err = raw.Control(func(fd uintptr) { sendErr = send(conn, answer, syscall.UnixRights(int(fd))) })
		err = errors.Join(err, sendErr)
	}
	if err != nil { // also a socket that may not be passed: without an answer the agent would wait
		answer.Code, answer.Error = codeFailed, err.Error()
		_ = send(conn, answer, nil)
	}
}

// connectLoopback tries IPv4 first; a server that listens on IPv6 only refuses there.
func connectLoopback(port int) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dialLimit)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if errors.Is(err, syscall.ECONNREFUSED) {
		six, sixErr := d.DialContext(ctx, "tcp6", net.JoinHostPort("::1", strconv.Itoa(port)))
		if sixErr == nil {
			conn, err = six, nil
		}
	}
	if err != nil {
		return nil, err
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return nil, errors.Join(errors.ErrUnsupported, conn.Close())
	}
	return tcp, nil
}
