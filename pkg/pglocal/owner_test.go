package pglocal

import (
	"io/fs"
	"syscall"
)

// fileOwner returns whose a file is; -1 where the system does not say.
func fileOwner(info fs.FileInfo) int {
	if info == nil {
		return -1
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		return int(stat.Uid)
	}
	return -1
}
