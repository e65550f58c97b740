package isolation

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// hoarder is a built-in program of these tests: it keeps as many descriptors on their way through sockets as its user may.
const hoarder = "hoarder"

func hoard() error {
	rights := unix.UnixRights(make([]int, 250)...) // standard input, again and again
	for {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		for err == nil {
			err = unix.Sendmsg(pair[0], []byte("x"), rights, nil, 0)
		}
		if errors.Is(err, syscall.ETOOMANYREFS) {
			_, _ = os.Stdout.WriteString("hoarded\n")
			select {}
		}
	}
}

func TestASandboxThatHoardsDescriptorsStopsNoOther(t *testing.T) {
	b := newBackend(t)
	out := newOutput()
	start(t, b, Spec{ID: "hoarder", Builtin: hoarder, Output: out})
	out.wait(t, "hoarded")
	other := start(t, b, Spec{ID: "other", Builtin: "echo"})
	conn, err := other.Dial(t.Context(), 1)
	if !errors.Is(err, ErrRefused) {
		t.Fatalf("Dial of a port nobody listens on = %v, %v, want ErrRefused", conn, err)
	}
	if got := get(t, other, 3000, "/here"); !strings.Contains(got, "/here") {
		t.Errorf("GET through a sandbox beside a hoarder = %q, want its echo", got)
	}
}

func TestAProgramThatCannotBeRunIsAnError(t *testing.T) {
	b := newBackend(t)
	dir := t.TempDir()
	_, err := b.Start(t.Context(), Spec{ID: "bad", Dir: dir, Workspace: dir + "/workspace", Argv: []string{"/etc/passwd"}, Output: newOutput()})
	if err == nil || !strings.Contains(err.Error(), "start /etc/passwd: permission denied") {
		t.Errorf("Start of a text = %v, want its name and permission denied", err)
	}
}
