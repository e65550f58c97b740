package discovery

import (
	"context"
	"crypto/sha256"
	"io"
	"log/slog"
	"os"
	"slices"
	"time"

	"berth/services/scheduler/internal/nodes"
)

// fileEvery is how often the file is read. Reading tells more than file events do: a ConfigMap changes by
// a link to a link, and network file systems send no events.
const fileEvery = 2 * time.Second

// maxFileBytes is far above any configuration.
const maxFileBytes = 4 << 20

// File follows the static nodes of a configuration file.
type File struct {
	path    string
	load    func() ([]nodes.StaticNode, error)
	apply   func(ctx context.Context, list []nodes.StaticNode) error
	log     *slog.Logger
	metrics *Metrics

	seen    *[sha256.Size]byte // of what was loaded well; nil: load again
	refused string             // why it was refused last, so that it is told once; "": it was not
	applied []nodes.StaticNode
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
	sum, err := f.sum()
	if err != nil {
		f.refuse(ctx, err)
		return
	}
	if f.seen == nil || sum != *f.seen {
		// What was refused is loaded again with every look, for the mistake may be in another file that this one
		// names, and what is written meanwhile may be read half.
		list, err := f.load()
		if err != nil {
			f.refuse(ctx, err)
			return
		}
		f.seen, f.refused = &sum, ""
		if after, err := f.sum(); err != nil || after != sum {
			f.seen = nil // it was changed while it was loaded: what list is made of is not known
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

// sum tells one content of the file from another. No configuration is above maxFileBytes: load refuses it,
// and what is behind that need not be read.
func (f *File) sum() (sum [sha256.Size]byte, err error) {
	file, err := os.Open(f.path)
	if err != nil {
		return sum, err
	}
	defer func() { _ = file.Close() }()
	hash := sha256.New()
	if _, err := io.Copy(hash, io.LimitReader(file, maxFileBytes)); err != nil {
		return sum, err
	}
	return [sha256.Size]byte(hash.Sum(nil)), nil
}

// refuse says once what is wrong with the file, and what is kept.
func (f *File) refuse(ctx context.Context, err error) {
	f.due, f.seen = false, nil
	f.metrics.fail(sourceStatic)
	text := err.Error() // not judged: the same complaint is only not logged again
	if f.refused == text {
		return
	}
	f.refused = text
	f.log.ErrorContext(ctx, "the configuration file is bad; the former static list stays",
		slog.Any("error", err), slog.Int("kept", len(f.applied)))
}
