//go:build unix

package pglocal

import (
	"fmt"
	"io"
	"os/exec"
	"strconv"
	"sync"
)

// guardScript waits for a line or for the end of its input, which comes with the end of the process
// that holds the other end, however that ends. Without a line it stops the server: $1 its process,
// $2 the signal, the rest folders to delete afterwards. A death signal would do as much for
// the server alone, but it fires when a thread ends, and would leave the folder.
const guardScript = `
if read -r line; then exit 0; fi
pid=$1
kill -s "$2" "$pid" 2>/dev/null
while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
shift 2
if [ $# -gt 0 ]; then rm -rf -- "$@"; fi`

// guard is a process that outlives this one by the moment it takes to stop a server.
type guard struct {
	cmd   *exec.Cmd
	input io.WriteCloser
}

func startGuard(o owner, pid int, signal string, folders []string) (*guard, error) {
	args := []string{"-c", guardScript, "berth-postgres-guard", strconv.Itoa(pid), signal}
	cmd := o.command("/bin/sh", append(args, folders...)...)
	input, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("make the guard's pipe: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the guard: %w", err)
	}
	g := &guard{cmd: cmd, input: input}
	guards.Store(g, true)
	return g, nil
}

// guards keeps the pipes open of servers whose handle nobody holds any more: a collected pipe is
// closed, and the guard would take that for the end of this process.
var guards sync.Map

// dismiss ends the guard; the server has ended already.
func (g *guard) dismiss() {
	if g == nil {
		return
	}
	_, _ = io.WriteString(g.input, "done\n") // a guard that was killed needs no word
	_ = g.input.Close()
	_ = g.cmd.Wait()
	guards.Delete(g)
}
