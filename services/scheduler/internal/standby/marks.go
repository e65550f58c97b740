package standby

import (
	"slices"
	"time"
)

// Log says which write-ahead log a position is in.
type Log struct {
	System   int64 // the cluster's identifier
	Database int64 // the database's oid
	Timeline int64
}

// Position is how far a server has come.
type Position struct {
	Log
	LSN        int64
	Recovering bool // it is a standby
}

// mark is a position of the primary and the moment before it was asked for.
type mark struct {
	asked time.Time
	at    Position
}

// marks are those of one log that are not older than bound, oldest first.
type marks struct {
	bound time.Duration
	held  []mark
}

// add appends what the primary said to a question of the moment asked. A position in another log, or
// behind the last one, makes all before it void.
func (m *marks) add(asked time.Time, at Position) {
	if n := len(m.held); n > 0 && (m.held[n-1].at.Log != at.Log || m.held[n-1].at.LSN > at.LSN) {
		m.held = nil
	}
	m.held = append(m.held, mark{asked, at})
	m.held = slices.DeleteFunc(m.held, func(k mark) bool { return asked.Sub(k.asked) > m.bound })
}

// covered returns the youngest moment of which at has every change that was acknowledged before it. ok is
// false where at proves nothing.
func (m *marks) covered(at Position) (asked time.Time, ok bool) {
	for _, k := range slices.Backward(m.held) {
		if k.at.Log == at.Log && k.at.LSN <= at.LSN {
			return k.asked, true
		}
	}
	return time.Time{}, false
}

// newest returns the moment of the last mark.
func (m *marks) newest() (time.Time, bool) {
	if len(m.held) == 0 {
		return time.Time{}, false
	}
	return m.held[len(m.held)-1].asked, true
}
