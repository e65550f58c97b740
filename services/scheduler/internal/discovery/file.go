package discovery

import (
	"context"
	"crypto/sha256"
	"log/slog"
	"os"
	"slices"
	"time"

	"berth/services/scheduler/internal/nodes"
)

// fileEvery is how often the file is read. Reading tells more than file events do: a ConfigMap changes by
// a link to a link, and network file systems send no events.
const fileEvery = 2 * time.Second

// File follows the static nodes of a configuration file.
type File struct {
	path    string
	load    func() ([]nodes.StaticNode, error)
	apply   func(ctx context.Context, list []nodes.StaticNode) error
	log     *slog.Logger
	metrics *Metrics

	seen    *[sha256.Size]byte // of what was loaded last, well or not; nil: nothing yet
	applied []nodes.StaticNode
	missing bool // the file cannot be read
	pending []nodes.StaticNode
	due     bool // pending is not applied yet
	failing bool // to apply
}

// Reloading says how a file becomes the static list.
type Reloading struct {
	Applied []nodes.StaticNode                                       // at the start
	Load    func() ([]nodes.StaticNode, error)                       // reads the file and checks all of it
	Apply   func(ctx context.Context, list []nodes.StaticNode) error // makes list the static nodes
}

// NewFile returns a follower of the file at path. It starts nothing: Run is the caller's to run.
func NewFile(path string, r Reloading, log *slog.Logger, metrics *Metrics) *File {
	return &File{
		path: path, load: r.Load, apply: r.Apply, applied: r.Applied,
		log: log.With(slog.String("source", sourceStatic), slog.String("file", path)), metrics: metrics,
	}
}

// Run reads the file again and again until ctx ends, then returns nil. A list that changed is applied; a
// file with a mistake anywhere changes nothing.
func (f *File) Run(ctx context.Context) error {
	for sleep(ctx, fileEvery) == nil {
		f.look(ctx)
	}
	return nil
}

func (f *File) look(ctx context.Context) {
	text, err := os.ReadFile(f.path)
	if err != nil {
		if !f.missing {
			f.refuse(ctx, err)
		}
		f.missing = true
		return
	}
	if sum := sha256.Sum256(text); f.seen == nil || sum != *f.seen || f.missing {
		f.seen, f.missing = &sum, false
		list, err := f.load()
		if err != nil {
			f.refuse(ctx, err)
			return
		}
		f.metrics.heal(sourceStatic)
		f.pending, f.due = list, !slices.Equal(list, f.applied)
	}
	if !f.due {
		return
	}
	if err := f.apply(ctx, f.pending); err != nil {
		if !f.failing && ctx.Err() == nil {
			f.log.WarnContext(ctx, "the static list cannot be written; it is tried again", slog.Any("error", err))
		}
		f.failing = true
		return
	}
	f.due, f.failing, f.applied = false, false, f.pending
	f.metrics.listed(sourceStatic, len(f.pending))
	f.log.InfoContext(ctx, "the changed static list is applied; other keys of the file are read at a start", slog.Int("nodes", len(f.pending)))
}

// refuse says what is wrong with the file, and what is kept.
func (f *File) refuse(ctx context.Context, err error) {
	f.due = false
	f.metrics.fail(sourceStatic)
	f.log.ErrorContext(ctx, "the configuration file is bad; the former static list stays",
		slog.Any("error", err), slog.Int("kept", len(f.applied)))
}
