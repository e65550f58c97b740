package isolation

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// The application's limits are set by a process that becomes the application, not by the init, which would have to keep them itself:
// the kernel bounds the descriptors that a user has on their way through sockets by the sender's limit of open files. In user mode
// all sandboxes are one user, so one application that keeps as many on their way as it may would stop the inits of all sandboxes
// from handing connections out. An init that is not limited also keeps its threads when the application has used up its processes.

// execArgument is the hidden argument under which the binary becomes the application.
const execArgument = "berth-sandbox-exec"

// Descriptors it inherits beside the application's three.
const (
	execSpecFD  = 3
	execErrorFD = 4 // gets the text of what went wrong; closed without a word when the application runs
)

// execSpec is what it becomes. The environment is in here and not its own, for it is the client's.
type execSpec struct {
	Path         string   `json:"path"`
	Argv         []string `json:"argv"`
	Env          []string `json:"env"`
	MaxOpenFiles uint64   `json:"maxOpenFiles"`
	MaxProcesses uint64   `json:"maxProcesses"` // 0: not limited here
}

// runExec returns only if it failed, and has told so already.
func runExec() {
	closeOnExec(execSpecFD)
	problem := os.NewFile(execErrorFD, "problem")
	_, _ = io.WriteString(problem, become(os.NewFile(execSpecFD, "spec")).Error()) // the init is gone: so are we, soon
}

func become(file *os.File) error {
	var spec execSpec
	if err := json.NewDecoder(file).Decode(&spec); err != nil {
		return fmt.Errorf("read what to run: %w", err)
	}
	// Setting it by hand also keeps Go from giving the application the limit it found at its own start.
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: spec.MaxOpenFiles, Max: spec.MaxOpenFiles}); err != nil {
		return fmt.Errorf("limit open files to %d: %w", spec.MaxOpenFiles, err)
	}
	_ = syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{})
	if spec.MaxProcesses > 0 {
		if err := syscall.Setrlimit(unix.RLIMIT_NPROC, &syscall.Rlimit{Cur: spec.MaxProcesses, Max: spec.MaxProcesses}); err != nil {
			return fmt.Errorf("limit processes to %d: %w", spec.MaxProcesses, err)
		}
	}
	return fmt.Errorf("start %s: %w", spec.Argv[0], syscall.Exec(spec.Path, spec.Argv, spec.Env))
}

// forkExec starts spec as a child with attr, whose Files and Env it sets. It returns when the application itself runs.
func forkExec(spec execSpec, attr *syscall.ProcAttr) (pid int, err error) {
	fd, err := unix.MemfdCreate("spec", unix.MFD_CLOEXEC) // what may be longer than a pipe holds
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	file := os.NewFile(uintptr(fd), "spec")
	defer file.Close()
	if err := json.NewEncoder(file).Encode(spec); err != nil {
		return 0, fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return 0, fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	problems, theirs, err := os.Pipe()
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	defer problems.Close()
	attr.Files = []uintptr{0, 1, 2, file.Fd(), theirs.Fd()}
	pid, err = syscall.ForkExec(os.Args[0], []string{os.Args[0], execArgument}, attr)
	_ = theirs.Close()
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	text, err := io.ReadAll(problems)
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	if len(text) > 0 { // reap collects it
		return 0, errors.New(string(text))
	}
	return pid, nil
}

// closeOnExec keeps every descriptor from first on from the programs this process starts or becomes.
func closeOnExec(first int) {
	if err := unix.CloseRange(uint(first), math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil { // before Linux 5.11
		for fd := first; fd < 1024; fd++ {
			unix.CloseOnExec(fd)
		}
	}
}
