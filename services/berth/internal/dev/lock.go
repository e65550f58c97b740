package dev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// lockFolder takes dir for this process until the returned file is closed or the process ends, however
// it ends. Somebody else's folder is an error that names the process.
func lockFolder(dir string) (*os.File, error) {
	path := filepath.Join(dir, "lock")
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("take the data folder: %w; it belongs to another user: choose another folder with --data", err)
	}
	if err != nil {
		return nil, fmt.Errorf("take the data folder: %w", err)
	}
	err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		text, readErr := os.ReadFile(path)
		holder := strings.TrimSpace(string(text))
		if readErr != nil || holder == "" {
			holder = "unknown"
		}
		return nil, errors.Join(fmt.Errorf("%s is in use by another berth dev (process %s); stop that, or choose another folder with --data",
			dir, holder), file.Close())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("take the data folder: %w", err), file.Close())
	}
	if err := errors.Join(file.Truncate(0), writeAt(file, strconv.Itoa(os.Getpid())+"\n")); err != nil {
		return nil, errors.Join(fmt.Errorf("take the data folder: %w", err), file.Close())
	}
	return file, nil
}

func writeAt(file *os.File, text string) error {
	_, err := file.WriteAt([]byte(text), 0)
	return err
}
