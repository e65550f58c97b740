package dev

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

const (
	tailLines    = 15
	maxLineBytes = 64 << 10
	maxFileBytes = 8 << 20 // a longer log is put aside at the next start
	nameWidth    = 11      // "scheduler-1"
)

// prefixColors are ANSI colours by kind of process.
var prefixColors = map[kind]string{scheduler: "\x1b[36m", gateway: "\x1b[32m", nodeagent: "\x1b[33m"}

// logs takes the lines of all processes: into a file each, and with their name in front to out.
type logs struct {
	dir   string
	color bool

	mu    sync.Mutex
	out   io.Writer // may be nil
	files map[string]*os.File
	last  map[string][]string
	order []string
}

func newLogs(dir string, out io.Writer, color bool) (*logs, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of logs: %w", err)
	}
	return &logs{dir: dir, out: out, color: color, files: map[string]*os.File{}, last: map[string][]string{}}, nil
}

// writer returns where a process writes. Each Write may hold any part of lines.
func (l *logs) writer(k kind, name string) (*lineWriter, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.files[name] == nil {
		path := filepath.Join(l.dir, name+".log")
		if info, err := os.Stat(path); err == nil && info.Size() > maxFileBytes {
			if err := os.Rename(path, path+".1"); err != nil {
				return nil, fmt.Errorf("put a long log aside: %w", err)
			}
		}
		file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return nil, fmt.Errorf("open log: %w", err)
		}
		l.files[name] = file
		l.order = append(l.order, name)
	}
	return &lineWriter{logs: l, kind: k, name: name}, nil
}

func (l *logs) line(k kind, name string, line []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if file := l.files[name]; file != nil {
		// A full disk must not stop the stack; the terminal still has the line.
		_, _ = fmt.Fprintf(file, "%s\n", line)
	}
	last := append(l.last[name], string(line))
	l.last[name] = last[max(0, len(last)-tailLines):]
	if l.out == nil {
		return
	}
	prefix := fmt.Sprintf("%-*s | ", nameWidth, name)
	if l.color {
		prefix = prefixColors[k] + prefix + "\x1b[0m"
	}
	_, _ = fmt.Fprintf(l.out, "%s%s\n", prefix, line)
}

// tailOf returns the last lines of one process, indented.
func (l *logs) tailOf(name string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.last[name]) == 0 {
		return "  (it wrote nothing)"
	}
	return "  " + strings.Join(l.last[name], "\n  ")
}

func (l *logs) tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b strings.Builder
	for _, name := range l.order {
		for _, line := range l.last[name] {
			fmt.Fprintf(&b, "%-*s | %s\n", nameWidth, name, line)
		}
	}
	return b.String()
}

func (l *logs) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, file := range l.files {
		errs = append(errs, file.Close())
	}
	l.files = nil
	return errors.Join(errs...)
}

// lineWriter cuts what a process writes into lines. One process, one goroutine.
type lineWriter struct {
	logs *logs
	kind kind
	name string
	rest []byte
}

// Write never fails: a process must not die of its log.
func (w *lineWriter) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	for {
		line, rest, found := bytes.Cut(w.rest, []byte("\n"))
		if !found {
			break
		}
		w.logs.line(w.kind, w.name, line)
		w.rest = rest
	}
	if len(w.rest) > maxLineBytes {
		w.flush()
	}
	return len(p), nil
}

// flush writes an unfinished line.
func (w *lineWriter) flush() {
	if len(w.rest) > 0 {
		w.logs.line(w.kind, w.name, w.rest)
		w.rest = nil
	}
}
