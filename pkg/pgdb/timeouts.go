package pgdb

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// ErrTimeouts is returned by Open when a role's timeouts are off or longer than they may be.
var ErrTimeouts = errors.New("the role's timeouts are too long")

// Timeouts are PostgreSQL's limits for one role. Zero: off, and as a limit: not looked at.
type Timeouts struct {
	Statement         time.Duration // statement_timeout
	Lock              time.Duration // lock_timeout
	IdleInTransaction time.Duration // idle_in_transaction_session_timeout
	IdleSession       time.Duration // idle_session_timeout
}

// The timeouts of Berth's roles. They are settings of the role, which survive a pooler.
var (
	// ReadTimeouts are those of berth_gateway.
	ReadTimeouts = Timeouts{Statement: 2 * time.Second, Lock: 200 * time.Millisecond, IdleInTransaction: 2 * time.Second}
	// WriteTimeouts are those of berth_scheduler, berth_sessions, berth_history and berth_dispatcher.
	WriteTimeouts = Timeouts{Statement: 5 * time.Second, Lock: time.Second, IdleInTransaction: 5 * time.Second}
	// ConsoleTimeouts are those of berth_console.
	ConsoleTimeouts = Timeouts{
		Statement: 10 * time.Second, Lock: 200 * time.Millisecond,
		IdleInTransaction: 5 * time.Second, IdleSession: 5 * time.Minute,
	}
	// MigratorTimeouts are those of berth_migrator: DDL waits briefly and is tried again.
	MigratorTimeouts = Timeouts{Lock: 50 * time.Millisecond, IdleInTransaction: time.Minute, IdleSession: 10 * time.Second}
)

// Setting is one parameter of PostgreSQL and its value.
type Setting struct {
	Name  string
	Value time.Duration
}

// Settings returns the four parameters in a fixed order, those that are off included.
func (t Timeouts) Settings() []Setting {
	return []Setting{
		{"statement_timeout", t.Statement},
		{"lock_timeout", t.Lock},
		{"idle_in_transaction_session_timeout", t.IdleInTransaction},
		{"idle_session_timeout", t.IdleSession},
	}
}

// readTimeoutsSQL reads what holds for this session, in milliseconds, whoever set it.
const readTimeoutsSQL = `
SELECT  name, setting::bigint AS millis
FROM    pg_settings
WHERE   name = ANY (@names::text[])`

// checkTimeouts returns an error that is ErrTimeouts, naming every setting to change, unless each
// timeout is on and at most as long as in limits.
func (db *DB) checkTimeouts(ctx context.Context, limits Timeouts) error {
	wanted := map[string]time.Duration{}
	var names []string
	for _, s := range limits.Settings() {
		if s.Value > 0 {
			wanted[s.Name] = s.Value
			names = append(names, s.Name)
		}
	}
	rows, err := db.Query(ctx, readTimeoutsSQL, pgx.StrictNamedArgs{"names": names})
	if err != nil {
		return fmt.Errorf("read the role's timeouts: %w", err)
	}
	held := map[string]time.Duration{}
	var name string
	var millis int64
	if _, err := pgx.ForEachRow(rows, []any{&name, &millis}, func() error {
		held[name] = time.Duration(millis) * time.Millisecond
		return nil
	}); err != nil {
		return fmt.Errorf("read the role's timeouts: %w", err)
	}
	user := pgx.Identifier{db.Config().ConnConfig.User}.Sanitize()
	var wrong []error
	for _, name := range names {
		if have, limit := held[name], wanted[name]; have == 0 || have > limit {
			wrong = append(wrong, fmt.Errorf("%s is %s, may be at most %s: ALTER ROLE %s SET %s = '%dms'",
				name, have, limit, user, name, limit.Milliseconds()))
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	return fmt.Errorf("%w; settings of a group are not inherited by its logins: %w", ErrTimeouts, errors.Join(wrong...))
}
