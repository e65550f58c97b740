package standby

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"berth/pkg/pgdb"
	"berth/services/internal/sandbox"
	"berth/services/scheduler/internal/bindings"
)

const (
	// askLimit is the longest wait for a standby's answer, or for the primary's position.
	askLimit = time.Second

	// Marks are made four times in a bound, so that a standby in step is never behind it by that.
	marksPerBound = 4
	markEvery     = time.Second // at the latest
)

// Config says where the standby is and how old its answers may be.
type Config struct {
	// Open opens the standby's pool. It is asked again until it works.
	Open func(ctx context.Context) (*pgdb.DB, error)

	// MaxStaleness is the bound: no answer lacks a change that was acknowledged longer ago.
	MaxStaleness time.Duration
}

// Reader looks sandboxes up. Its methods may be called at once; MarkLoop and ProbeLoop are the caller's
// to run, and until they have, the primary answers everything.
type Reader struct {
	primary  *pgdb.DB
	bindings *bindings.Bindings // the primary's
	cfg      Config
	log      *slog.Logger
	metrics  metrics

	mu      sync.Mutex
	marks   marks
	standby *pgdb.DB  // nil until it has been opened
	reached time.Time // the moment the standby was last proved to cover; zero: never
	usable  bool      // the last probe proved enough
}

// New returns a Reader that asks at for what no standby answers; primary is the pool of its database.
func New(primary *pgdb.DB, at *bindings.Bindings, cfg Config, log *slog.Logger, reg prometheus.Registerer) *Reader {
	r := &Reader{primary: primary, bindings: at, cfg: cfg, log: log, marks: marks{bound: cfg.MaxStaleness}}
	r.metrics = newMetrics(reg, cfg.MaxStaleness, r.staleness)
	return r
}

// Close closes the standby's pool.
func (r *Reader) Close() {
	r.mu.Lock()
	db := r.standby
	r.standby, r.usable = nil, false
	r.mu.Unlock()
	if db != nil {
		db.Close()
	}
}

// Ready returns nil while look-ups can be answered within the bound: the primary was there lately, or is
// now. A standby alone proves nothing, and without one the primary answers.
func (r *Reader) Ready(ctx context.Context) error {
	if since, known := r.sinceMark(); known && since <= r.cfg.MaxStaleness {
		return nil
	}
	if r.mark(ctx) == nil { // the loop was late, on a busy machine
		return nil
	}
	since, known := r.sinceMark()
	if !known {
		return fmt.Errorf("the primary has not said yet how far it is: no answer is known to be within the bound of staleness, %v", r.cfg.MaxStaleness)
	}
	return fmt.Errorf("the primary has not answered for %v: no answer is within the bound of staleness, %v", since.Round(time.Millisecond), r.cfg.MaxStaleness)
}

func (r *Reader) sinceMark() (since time.Duration, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	last, known := r.marks.newest()
	return time.Since(last), known
}

// staleness returns how old the standby's answers may be now; known is false before it proved anything.
func (r *Reader) staleness() (age time.Duration, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return time.Since(r.reached), !r.reached.IsZero()
}

// every is the pause between two marks, and between two probes.
func (r *Reader) every() time.Duration { return min(r.cfg.MaxStaleness/marksPerBound, markEvery) }

// MarkLoop asks the primary how far it is, until ctx ends.
func (r *Reader) MarkLoop(ctx context.Context) error {
	return r.primary.Loop(ctx, "mark the primary", r.every(), r.mark, r.log)
}

func (r *Reader) mark(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	asked := time.Now()
	at, err := readPosition(ctx, r.primary)
	if err != nil {
		return err
	}
	if at.Recovering {
		return errors.New("the primary's URL leads to a standby: add target_session_attrs=read-write to it")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.marks.add(asked, at)
	return nil
}

// ProbeLoop follows the standby, until ctx ends: it opens it, and says whether it keeps up.
func (r *Reader) ProbeLoop(ctx context.Context) error {
	return r.primary.Loop(ctx, "probe the standby", r.every(), r.probe, r.log)
}

// errBehind is a standby that is older than the bound, or of another log.
var errBehind = errors.New("the standby is behind the bound of staleness, or follows another primary")

func (r *Reader) probe(ctx context.Context) error {
	err := r.probeOnce(ctx)
	r.mu.Lock()
	r.usable = err == nil
	r.mu.Unlock()
	return err
}

func (r *Reader) probeOnce(ctx context.Context) error {
	r.mu.Lock()
	db := r.standby
	r.mu.Unlock()
	if db == nil {
		opened, err := r.cfg.Open(ctx)
		if err != nil {
			return fmt.Errorf("open the standby: %w", err)
		}
		r.mu.Lock()
		r.standby, db = opened, opened
		r.mu.Unlock()
	}
	ctx, cancel := context.WithTimeout(ctx, r.askLimit())
	defer cancel()
	at, err := readPosition(ctx, db)
	if err != nil {
		return fmt.Errorf("ask the standby how far it is: %w", err)
	}
	if !r.proves(at) {
		return errBehind
	}
	return nil
}

// askLimit: an answer that comes later than the bound is too old whatever it says.
func (r *Reader) askLimit() time.Duration { return min(r.cfg.MaxStaleness, askLimit) }

// proves reports whether what was read after at was reached is younger than the bound now.
func (r *Reader) proves(at Position) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	covered, ok := r.marks.covered(at)
	if ok && covered.After(r.reached) {
		r.reached = covered
	}
	return ok && time.Since(covered) <= r.cfg.MaxStaleness
}

// Lookup returns the node of a bound sandbox as bindings.Lookup does, with every change in it that was
// acknowledged longer than the bound ago.
func (r *Reader) Lookup(ctx context.Context, id sandbox.ID) (bindings.Found, error) {
	found, how := r.fromStandby(ctx, id)
	r.metrics.lookups.WithLabelValues(how).Inc()
	if how == fromStandby {
		return found, nil
	}
	return r.bindings.Lookup(ctx, id)
}

func (r *Reader) fromStandby(ctx context.Context, id sandbox.ID) (bindings.Found, string) {
	r.mu.Lock()
	db, usable := r.standby, r.usable
	r.mu.Unlock()
	if db == nil || !usable {
		return bindings.Found{}, primaryUnusable
	}
	ctx, cancel := context.WithTimeout(ctx, r.askLimit())
	defer cancel()
	conn, err := db.Acquire(ctx)
	if err != nil {
		return bindings.Found{}, primaryFailed
	}
	defer conn.Release()
	// The position first: the snapshot of the next statement has at least what it covers.
	at, err := readPosition(ctx, conn)
	if err != nil {
		return bindings.Found{}, primaryFailed
	}
	rows, err := bindings.LookupOn(ctx, conn, []sandbox.ID{id})
	found, bound := rows[id]
	switch {
	case err != nil:
		return bindings.Found{}, primaryFailed
	case !bound:
		return bindings.Found{}, primaryMiss // it may have been bound since
	case !r.proves(at):
		return bindings.Found{}, primaryStale
	}
	return found, fromStandby
}

// readPositionSQL asks a server how far it is, whichever sort it is. A standby's timeline is that of its
// last restartpoint: it lags behind a switch, never ahead of one.
const readPositionSQL = `
SELECT  (SELECT system_identifier FROM pg_control_system()) AS system,
        (SELECT oid::bigint FROM pg_database WHERE datname = current_database()) AS database,
        CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id::bigint FROM pg_control_checkpoint())
             ELSE ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint END AS timeline,
        pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                             ELSE pg_current_wal_flush_lsn() END, '0/0')::bigint AS lsn,
        pg_is_in_recovery() AS recovering`

func readPosition(ctx context.Context, on bindings.Reads) (Position, error) {
	rows, err := on.Query(ctx, readPositionSQL)
	if err != nil {
		return Position{}, fmt.Errorf("read the log's position: %w", err)
	}
	at, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Position])
	if err != nil {
		return Position{}, fmt.Errorf("read the log's position: %w", err)
	}
	return at, nil
}
