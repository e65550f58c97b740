package sandboxes

import (
	"fmt"
	"os"
	"sync"
)

// maxOutputBytes is how much of what a sandbox prints is kept, twice: the file, and the one before it.
const maxOutputBytes = 1 << 20

// output is a log file that a chatty sandbox cannot fill the disk with. A write never fails: the sandbox's command must not die of
// our full disk.
type output struct {
	mu   sync.Mutex
	path string
	file *os.File
	size int64
}

func openOutput(path string) (*output, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("sandbox output: %w", err)
	}
	info, err := file.Stat()
	if err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("sandbox output: %w", err)
	}
	return &output{path: path, file: file, size: info.Size()}, nil
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.size+int64(len(p)) > maxOutputBytes {
		o.turn()
	}
	if o.file != nil {
		n, _ := o.file.Write(p[:min(len(p), maxOutputBytes)])
		o.size += int64(n)
	}
	return len(p), nil
}

func (o *output) turn() {
	if o.file != nil {
		_ = o.file.Close()
	}
	_ = os.Rename(o.path, o.path+".1")
	o.size = 0
	file, err := os.OpenFile(o.path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		file = nil
	}
	o.file = file
}

func (o *output) Close() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file == nil {
		return nil
	}
	err := o.file.Close()
	o.file = nil
	return err
}
