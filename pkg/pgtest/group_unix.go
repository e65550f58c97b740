//go:build unix

package pgtest

import (
	"os/exec"
	"syscall"
)

// ownGroup keeps a terminal's Ctrl-C, which ends the tests, from ending their guard.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }
