//go:build unix

package pglocal

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// owner is the user a server runs as. self: this process's own.
type owner struct {
	uid, gid int
	name     string
	self     bool
}

// chooseOwner returns this process's user, or where that is root, which PostgreSQL refuses: the
// owner of a data folder that exists, else the user postgres, else nobody.
func chooseOwner(data string) (owner, error) {
	if os.Geteuid() != 0 {
		return owner{uid: os.Geteuid(), gid: os.Getegid(), name: userName(os.Geteuid()), self: true}, nil
	}
	if info, err := os.Stat(data); err == nil {
		if stat, ok := info.Sys().(*syscall.Stat_t); ok && stat.Uid != 0 {
			return owner{uid: int(stat.Uid), gid: int(stat.Gid), name: userName(int(stat.Uid))}, nil
		}
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.Atoi(u.Uid)
		gid, gidErr := strconv.Atoi(u.Gid)
		if err := errors.Join(uidErr, gidErr); err != nil {
			return owner{}, fmt.Errorf("read user %s: %w", name, err)
		}
		return owner{uid: uid, gid: gid, name: name}, nil
	}
	return owner{}, errors.New("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody: " +
		"create one (useradd --system postgres), or run this as another user")
}

func userName(uid int) string {
	if u, err := user.LookupId(strconv.Itoa(uid)); err == nil {
		return u.Username
	}
	return strconv.Itoa(uid)
}

// command returns a command that runs as the owner, in a group of its own: Ctrl-C in a terminal is
// for the parent, which then stops the server in order.
func (o owner) command(path string, args ...string) *exec.Cmd {
	cmd := exec.Command(path, args...) //nolint:noctx // a server outlives the context of its start
	cmd.Dir = "/"
	cmd.Env = []string{"LC_ALL=C", "TZ=UTC", "PATH=/usr/local/bin:/usr/bin:/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if !o.self {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(o.uid), Gid: uint32(o.gid)}
	}
	return cmd
}

// mkdir makes a private folder of the owner; one that exists is given to it.
func (o owner) mkdir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make folder: %w", err)
	}
	if o.self {
		return nil
	}
	if err := os.Chown(dir, o.uid, o.gid); err != nil {
		return fmt.Errorf("give folder to %s: %w", o.name, err)
	}
	return nil
}

// reaches returns nil if the owner can get into every folder above path, and otherwise an error that
// names the first it cannot, and what to do.
func (o owner) reaches(path string) error {
	if o.self {
		return nil
	}
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil {
			return fmt.Errorf("look at %s: %w", dir, err)
		}
		if !o.enters(info) {
			return fmt.Errorf("PostgreSQL runs as user %s here, who cannot get into %s (mode %04o): "+
				"use another folder (--data), or chmod o+x %s", o.name, dir, info.Mode().Perm(), dir)
		}
		if dir == filepath.Dir(dir) {
			return nil
		}
	}
}

func (o owner) enters(info fs.FileInfo) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	mode := info.Mode().Perm()
	switch {
	case ok && int(stat.Uid) == o.uid:
		return mode&0o100 != 0
	case ok && int(stat.Gid) == o.gid:
		return mode&0o010 != 0
	}
	return mode&0o001 != 0
}
