package pgdb_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"berth/pkg/pgdb"
)

func TestALoopLogsAFailureOnceAndGoesOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo}))
		ctx, cancel := context.WithCancel(t.Context())
		results := []error{nil, errors.New("away"), errors.New("away"), &pgconn.PgError{Code: "57014"}, nil, nil}
		started := time.Now()
		var db pgdb.DB
		passes := 0
		err := db.Loop(ctx, "expire", time.Second, func(context.Context) error {
			defer func() { passes++ }()
			if passes == 0 && time.Since(started) >= time.Second {
				t.Errorf("the first pass came after %s, want within the first period", time.Since(started))
			}
			if passes == len(results)-1 {
				cancel()
			}
			return results[passes]
		}, log)
		if err != nil || passes != len(results) {
			t.Errorf("Loop = %v after %d passes, want nil after %d", err, passes, len(results))
		}
		if took := time.Since(started); took < 4*time.Second || took > 7*time.Second {
			t.Errorf("six passes took %s, want about five periods", took)
		}
		for text, want := range map[string]int{"level=WARN": 2, "pass works again": 1, "loop=expire": 3} {
			if got := strings.Count(out.String(), text); got != want {
				t.Errorf("%q is logged %d times, want %d:\n%s", text, got, want, out.String())
			}
		}
	})
}

func TestAPassThatHangsIsEnded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var db pgdb.DB
		passes := 0
		err := db.Loop(ctx, "hang", time.Second, func(pass context.Context) error {
			passes++
			if passes == 2 {
				cancel()
				return nil
			}
			<-pass.Done()
			return pass.Err()
		}, slog.New(slog.DiscardHandler))
		if err != nil || passes != 2 {
			t.Errorf("Loop = %v after %d passes, want nil after 2", err, passes)
		}
	})
}
