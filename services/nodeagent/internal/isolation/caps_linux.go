package isolation

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// allThreadsCapset sets the capabilities of every thread of this process. In a cgo binary the runtime does not know all
// threads and says so with ENOTSUP: then nothing changes.
func allThreadsCapset(header *unix.CapUserHeader, data *[2]unix.CapUserData) {
	_, _, _ = syscall.AllThreadsSyscall(syscall.SYS_CAPSET,
		uintptr(unsafe.Pointer(header)), uintptr(unsafe.Pointer(&data[0])), 0)
}
