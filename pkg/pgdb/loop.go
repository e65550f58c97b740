package pgdb

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"
)

// passLimit ends a pass that hangs; the next one starts afresh.
const passLimit = time.Minute

// Loop runs pass again and again until ctx ends, then returns nil. The first pass starts at a random
// moment of the first period, later ones a period apart, give or take a tenth, so that replicas
// spread out. An error is logged when it first appears or changes its SQLSTATE, and the loop goes
// on; so does a pass over a minute, whose context ends. Replicas run the same loop at once: pass
// takes TryLock of class 64 and the loop's name in each transaction where two must not meet.
func (db *DB) Loop(ctx context.Context, name string, every time.Duration, pass func(ctx context.Context) error, log *slog.Logger) error {
	log = log.With(slog.String("loop", name))
	failing, code := false, ""
	next := rand.N(every)
	for pause(ctx, next) == nil {
		next = every - every/10 + rand.N(every/5+1)
		started := time.Now()
		err := runPass(ctx, pass)
		took := slog.Duration("took", time.Since(started))
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // the end of ctx is a clean stop, whatever the pass made of it
		case err != nil && (!failing || code != Code(err)):
			log.WarnContext(ctx, "pass failed", slog.Any("error", err), took)
		case err != nil:
			log.DebugContext(ctx, "pass failed again", slog.Any("error", err), took)
		case failing:
			log.InfoContext(ctx, "pass works again", took)
		}
		failing, code = err != nil, Code(err)
	}
	return nil
}

func runPass(ctx context.Context, pass func(ctx context.Context) error) error {
	limited, cancel := context.WithTimeout(ctx, passLimit)
	defer cancel()
	return pass(limited)
}
