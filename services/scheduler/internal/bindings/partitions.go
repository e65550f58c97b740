package bindings

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
)

const (
	partitionsEvery = time.Minute
	loopPartitions  = "event partitions"

	// partitionsAhead is how many days there are partitions for besides today: as long as every scheduler
	// may be away, or this loop may fail, before events go into the default partition.
	partitionsAhead = 7
)

// EventLoop makes the log's partitions ahead of time and drops what is older than the retention, until ctx
// ends. It begins at once: a scheduler that was away for long finds no partition of today. Where there is
// none, events are in the default partition, so no heartbeat ever waits for this or fails without it.
func (b *Bindings) EventLoop(ctx context.Context) error {
	if err := b.keepPartitions(ctx); err != nil && ctx.Err() == nil {
		b.log.WarnContext(ctx, "event partitions are not kept yet", slog.Any("error", err))
	}
	return b.db.Loop(ctx, loopPartitions, partitionsEvery, b.store.Pass(loopPartitions, b.keepPartitions), b.log)
}

func (b *Bindings) keepPartitions(ctx context.Context) error {
	return errors.Join(b.makePartitions(ctx), b.dropPartitions(ctx))
}

const selectMissingDaysSQL = `
SELECT  day::date
FROM    (SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date + ahead AS day
        FROM   generate_series(0, @ahead::int) AS ahead) AS days
WHERE   to_regclass('public.sandbox_events_' || to_char(day, 'YYYYMMDD')) IS NULL
ORDER   BY day`

const makePartitionSQL = `SELECT sandbox_events_make(@day::date)`

// makePartitions makes each day's in a transaction of its own, so that its lock is short.
func (b *Bindings) makePartitions(ctx context.Context) error {
	rows, err := b.db.Query(ctx, selectMissingDaysSQL, pgx.StrictNamedArgs{"ahead": partitionsAhead})
	if err != nil {
		return fmt.Errorf("read which days have no partition: %w", err)
	}
	days, err := pgx.CollectRows(rows, pgx.RowTo[time.Time])
	if err != nil {
		return fmt.Errorf("read which days have no partition: %w", err)
	}
	for _, day := range days {
		var made string
		err := b.db.Tx(ctx, func(tx pgx.Tx) error {
			made = ""
			if mine, err := pgdb.TryLock(ctx, tx, advisory.Loop(loopPartitions)); err != nil || !mine {
				return err
			}
			return tx.QueryRow(ctx, makePartitionSQL, pgx.StrictNamedArgs{"day": day}).Scan(&made)
		})
		if err != nil {
			return fmt.Errorf("make the partition of %s: %w", day.Format(time.DateOnly), err)
		}
		if made == "late" {
			b.log.DebugContext(ctx, "events of a day stay in the default partition", slog.String("day", day.Format(time.DateOnly)))
		}
	}
	return nil
}

const dropPartitionSQL = `SELECT sandbox_events_drop(@keep::interval)`

// dropPartitions drops one partition, or some rows of the default one, in a transaction.
func (b *Bindings) dropPartitions(ctx context.Context) error {
	for dropped := int64(1); dropped > 0; {
		err := b.db.Tx(ctx, func(tx pgx.Tx) error {
			dropped = 0
			if mine, err := pgdb.TryLock(ctx, tx, advisory.Loop(loopPartitions)); err != nil || !mine {
				return err
			}
			return tx.QueryRow(ctx, dropPartitionSQL, pgx.StrictNamedArgs{"keep": b.cfg.EventRetention}).Scan(&dropped)
		})
		if err != nil {
			return fmt.Errorf("drop old events: %w", err)
		}
	}
	return nil
}
