package isolation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Config is what the operator asks for.
type Config struct {
	Mode         string   // "bubblewrap" or "none"
	Bubblewrap   string   // the program; empty: bwrap on PATH
	Dir          string   // a folder of ours: the copy of the binary, and the trial sandbox
	Name         string   // unique on this machine: names our cgroups
	UID, GID     int      // what the application is to the machine, in Root mode
	MaxOpenFiles uint64   // of each process
	MaxProcesses uint64   // processes and threads of a sandbox
	ReadOnly     []string // further folders shown to sandboxes
	Log          *slog.Logger
}

// Backend starts sandboxes in the way this machine allows. It is safe for concurrent use.
type Backend struct {
	cfg     Config
	mode    Mode
	noProc  bool
	bwrap   string
	self    string
	pids    hierarchy // base "": limited by rlimit
	freezer hierarchy // base "": SIGSTOP
}

// trialID names the sandbox that is tried at start.
const trialID = "trial"

// trialLimit bounds each try to run a sandbox at start.
const trialLimit = 20 * time.Second

// ErrUnavailable says that this machine, as it is, cannot isolate sandboxes. The text says why and what to do.
var ErrUnavailable = errors.New("sandboxes cannot be isolated")

// New finds out what the machine allows by running a sandbox in each way until one works, and kills what a former agent of
// the same Name left behind. It logs what it found. The error is ErrUnavailable where no way works.
func New(ctx context.Context, cfg Config) (*Backend, error) {
	cfg.limitToOwn(ctx)
	b := &Backend{cfg: cfg}
	if err := os.MkdirAll(cfg.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("isolation folder: %w", err)
	}
	var err error
	if b.self, err = copySelf(cfg.Dir); err != nil {
		return nil, err
	}
	if cfg.Mode == string(None) {
		b.mode = None
		cfg.Log.WarnContext(ctx, "ISOLATION IS OFF: sandboxes share this machine's files, network and processes; "+
			"run nothing here that you would not run yourself", slog.String("flag", "--isolation none"))
	} else if b.bwrap, err = findBubblewrap(cfg.Bubblewrap); err != nil {
		return nil, err
	}

	cgroups := readCgroupMounts()
	freezers, pids := candidates("freezer", cfg.Name, cgroups), candidates("pids", cfg.Name, cgroups)
	for _, h := range slices.Concat(freezers, pids) {
		limited, cancel := context.WithTimeout(ctx, trialLimit)
		if err := h.clear(limited); err != nil {
			cfg.Log.WarnContext(ctx, "sandboxes of a former agent are still dying", slog.Any("error", err))
		}
		cancel()
	}

	defer func() { // what is not used, or all of it where nothing works
		for _, h := range slices.Concat(freezers, pids) {
			if h != b.freezer && h != b.pids {
				_ = os.Remove(h.group(trialID))
				_ = os.Remove(h.base)
			}
		}
	}()
	trial, err := b.tryModes(ctx)
	if err != nil {
		return nil, err
	}
	b.chooseCgroups(ctx, trial, freezers, pids)
	if err := trial.Kill(ctx); err != nil {
		return nil, fmt.Errorf("end the trial sandbox: %w", err)
	}
	b.announce(ctx)
	return b, nil
}

// limitToOwn lowers the limits to what this process itself may have: nobody can give more. Of open files inits need more than
// their applications (forkExec says why), so it is half.
func (c *Config) limitToOwn(ctx context.Context) {
	for resource, most := range map[int]*uint64{unix.RLIMIT_NOFILE: &c.MaxOpenFiles, unix.RLIMIT_NPROC: &c.MaxProcesses} {
		var own unix.Rlimit
		if unix.Getrlimit(resource, &own) != nil {
			continue
		}
		if resource == unix.RLIMIT_NOFILE {
			own.Max /= 2
		}
		if own.Max < *most {
			c.Log.WarnContext(ctx, "a limit of sandboxes is lowered to what the agent's own hard limit leaves",
				slog.Uint64("asked", *most), slog.Uint64("limit", own.Max))
			*most = own.Max
		}
	}
}

func findBubblewrap(program string) (string, error) {
	if program == "" {
		program = "bwrap"
	}
	path, err := exec.LookPath(program)
	if err != nil {
		return "", fmt.Errorf("%w: %s is not installed: run apt-get install bubblewrap (or your system's like), "+
			"or start with --isolation none to run sandboxes without isolation: %w", ErrUnavailable, program, err)
	}
	return path, nil
}

// copySelf puts a copy of the running binary where sandboxes can be shown it. The path it was started from may be replaced by a
// newer build meanwhile, or may be in a folder that others cannot reach.
func copySelf(dir string) (string, error) {
	from, err := os.Open("/proc/self/exe")
	if err != nil {
		return "", fmt.Errorf("open own binary: %w", err)
	}
	defer from.Close()
	path := filepath.Join(dir, "berth")
	temporary := path + ".new"
	// While a child that was forked in this moment has the file open for writing, nobody can execute it.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	to, err := os.OpenFile(temporary, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o755)
	if err != nil {
		return "", fmt.Errorf("copy own binary: %w", err)
	}
	if _, err := io.Copy(to, from); err != nil {
		_ = to.Close()
		return "", fmt.Errorf("copy own binary: %w", err)
	}
	if err := to.Close(); err != nil {
		return "", fmt.Errorf("copy own binary: %w", err)
	}
	if err := os.Rename(temporary, path); err != nil {
		return "", fmt.Errorf("copy own binary: %w", err)
	}
	return path, nil
}

// tryModes runs the trial sandbox in each way and keeps the first that works.
func (b *Backend) tryModes(ctx context.Context) (*Sandbox, error) {
	type way struct {
		mode   Mode
		noProc bool
	}
	ways := []way{{User, false}, {User, true}}
	if os.Getuid() == 0 {
		ways = []way{{Root, false}, {User, false}, {Root, true}, {User, true}}
	}
	if b.mode == None {
		ways = []way{{None, false}}
	}
	var failures []string
	for _, w := range ways {
		b.mode, b.noProc = w.mode, w.noProc
		limited, cancel := context.WithTimeout(ctx, trialLimit)
		s, err := b.Start(limited, Spec{
			ID: trialID, Dir: filepath.Join(b.cfg.Dir, trialID), Workspace: filepath.Join(b.cfg.Dir, trialID, "workspace"),
			Builtin: "shell", Output: io.Discard,
		})
		cancel()
		if err == nil {
			return s, nil
		}
		b.cfg.Log.DebugContext(ctx, "isolation does not work in this way", slog.String("mode", string(w.mode)), slog.Bool("proc", !w.noProc), slog.Any("error", err))
		failures = append(failures, fmt.Sprintf("%s mode: %v", w.mode, err))
	}
	return nil, fmt.Errorf("%w: %s. In a container add the capability SYS_ADMIN and a seccomp and AppArmor profile that lets "+
		"processes make namespaces; on a machine allow unprivileged user namespaces; or start with --isolation none to run sandboxes "+
		"without isolation", ErrUnavailable, strings.Join(failures, "; "))
}

// chooseCgroups keeps the first hierarchy of each kind that really takes the trial sandbox.
func (b *Backend) chooseCgroups(ctx context.Context, trial *Sandbox, freezers, pids []hierarchy) {
	limited, cancel := context.WithTimeout(ctx, trialLimit)
	defer cancel()
	for _, h := range freezers {
		err := h.add(trial.id, trial.pid)
		if err == nil {
			err = h.freeze(limited, trial.id, true)
			if thawErr := h.freeze(limited, trial.id, false); err == nil {
				err = thawErr
			}
		}
		if err == nil {
			b.freezer, trial.freezer = h, h
			break
		}
		b.cfg.Log.DebugContext(ctx, "cgroup cannot freeze", slog.String("cgroup", h.base), slog.Any("error", err))
	}
	for _, h := range pids {
		err := h.add(trial.id, trial.pid)
		if err == nil {
			err = h.limitPids(trial.id, b.cfg.MaxProcesses)
		}
		if err == nil {
			b.pids, trial.pids = h, h
			break
		}
		b.cfg.Log.DebugContext(ctx, "cgroup cannot limit processes", slog.String("cgroup", h.base), slog.Any("error", err))
	}
}

// Facts says how sandboxes are isolated, in words for logs and people.
type Facts struct {
	Mode      Mode
	Processes string // what limits processes
	Pause     string // what freezes them
	Proc      bool   // sandboxes see their /proc
}

// Facts returns what New found.
func (b *Backend) Facts() Facts {
	f := Facts{Mode: b.mode, Processes: "rlimit NPROC", Pause: "SIGSTOP", Proc: !b.noProc}
	if b.pids.base != "" {
		f.Processes = b.pids.String() + " pids"
	}
	if b.freezer.base != "" {
		f.Pause = b.freezer.String() + " freezer"
	}
	return f
}

func (b *Backend) announce(ctx context.Context) {
	f := b.Facts()
	b.cfg.Log.InfoContext(ctx, "isolation ready",
		slog.String("mode", string(f.Mode)), slog.String("processes_limited_by", f.Processes), slog.Uint64("max_processes", b.cfg.MaxProcesses),
		slog.String("open_files_limited_by", "rlimit NOFILE"), slog.Uint64("max_open_files", b.cfg.MaxOpenFiles),
		slog.String("paused_by", f.Pause))
	if b.noProc {
		b.cfg.Log.WarnContext(ctx, "sandboxes have no /proc: this container hides parts of its own, so the kernel forbids a new one")
	}
	if b.mode != None && os.Getuid() == 0 && b.mode == User {
		b.cfg.Log.WarnContext(ctx, "sandboxes run as the machine's root inside a user namespace: the way with a user of their own did not work here")
	}
}

// Close removes our own empty groups. Sandboxes must have been killed before.
func (b *Backend) Close() {
	for _, h := range []hierarchy{b.freezer, b.pids} {
		if h.base != "" {
			_ = os.Remove(h.base)
		}
	}
}
