package isolation

import (
	"os"
	"path/filepath"
	"strconv"
)

// Mode is how the namespaces are made.
type Mode string

// The modes, in the order in which they are tried.
const (
	Root Mode = "root" // bubblewrap as root, the application in a user namespace inside
	User Mode = "user" // bubblewrap in a user namespace
	None Mode = "none" // no isolation at all
)

// Places inside a sandbox.
const (
	WorkspacePath = "/workspace"
	selfPath      = "/.berth/berth"
)

// etcFiles are the parts of /etc that programs need and that tell nothing about the machine's users.
var etcFiles = []string{
	"/etc/alternatives", "/etc/ca-certificates", "/etc/ca-certificates.conf", "/etc/ld.so.cache", "/etc/ld.so.conf",
	"/etc/ld.so.conf.d", "/etc/localtime", "/etc/mime.types", "/etc/nsswitch.conf", "/etc/protocols", "/etc/services",
	"/etc/ssl", "/etc/bash.bashrc", "/etc/profile", "/etc/python3", "/etc/java-11-openjdk", "/etc/java-17-openjdk",
}

// mounts describes what bubblewrap shall make.
type mounts struct {
	mode      Mode
	hostname  string
	self      string   // this binary
	workspace string   // the sandbox's own folder
	etc       string   // folder with passwd, group, hosts
	extra     []string // further folders shown read-only
	infoFD    int      // where bubblewrap tells the pid of the init
	noProc    bool     // a container that hides parts of its /proc forbids a new one
}

// bwrapArguments returns bubblewrap's arguments up to the command. It asks the file system only what the machine's system folders
// are: links on merged-usr systems, folders elsewhere.
func bwrapArguments(m mounts) []string {
	args := []string{
		"--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
		"--new-session", "--die-with-parent", "--as-pid-1",
		"--hostname", m.hostname, "--info-fd", strconv.Itoa(m.infoFD),
	}
	if m.mode == User {
		id := strconv.Itoa(UserID)
		args = append(args, "--unshare-user", "--uid", id, "--gid", id)
	} else {
		// What it takes to start one process in a new user namespace; given up right after. SYS_ADMIN is for machines
		// that restrict user namespaces of processes without it.
		args = append(args, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SYS_ADMIN")
	}
	// Made by hand: parents that bubblewrap makes on the way only its own user may enter.
	args = append(args, "--dir", "/etc", "--dir", "/var", "--dir", "/.berth", "--ro-bind", "/usr", "/usr")
	for _, dir := range []string{"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"} {
		info, err := os.Lstat(dir)
		if err != nil {
			continue
		}
		if info.Mode()&os.ModeSymlink != 0 {
			if target, err := os.Readlink(dir); err == nil {
				args = append(args, "--symlink", target, dir)
			}
			continue
		}
		args = append(args, "--ro-bind", dir, dir)
	}
	for _, file := range etcFiles {
		args = append(args, "--ro-bind-try", file, file)
	}
	for _, name := range etcOwn {
		args = append(args, "--ro-bind", filepath.Join(m.etc, name), "/etc/"+name)
	}
	for _, dir := range m.extra {
		args = append(args, "--ro-bind", dir, dir)
	}
	if !m.noProc {
		args = append(args, "--proc", "/proc")
	}
	return append(args,
		"--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm",
		"--perms", "1777", "--tmpfs", "/tmp", "--perms", "1777", "--tmpfs", "/run",
		"--perms", "1777", "--tmpfs", "/var/tmp", "--ro-bind", m.self, selfPath,
		"--bind", m.workspace, WorkspacePath, "--chdir", WorkspacePath, "--remount-ro", "/")
}

var etcOwn = []string{"passwd", "group", "hosts", "hostname"}

// writeEtc writes the files of /etc that are a sandbox's own.
func writeEtc(dir, hostname string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	id := strconv.Itoa(UserID)
	for name, text := range map[string]string{
		"passwd":   "root:x:0:0:root:/:/usr/sbin/nologin\nuser:x:" + id + ":" + id + "::" + WorkspacePath + ":/bin/sh\n",
		"group":    "root:x:0:\nuser:x:" + id + ":\n",
		"hosts":    "127.0.0.1 localhost " + hostname + "\n::1 localhost ip6-localhost\n",
		"hostname": hostname + "\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}
