// Package routefeed follows the route feed of PostgreSQL into a cache.
//
// A position is the snapshot of the last poll: a poll returns what is visible now and was not
// visible then, so a transaction that commits late is never skipped, whatever order commits come in.
// An identity is which database answers: system, database, timeline, epoch. The doorbell only says
// that there is something to read; without it a poll finds it a little later.
//
// The feed's rows are authoritative for changes, the tables for everything else. What happens when
//
//	a connection ends           a new one reads again from ten seconds back: a crash may hand transaction ids out twice
//	a poll takes over a second  the connection is closed; nobody waits without a limit
//	the identity changes        the cache is emptied before a row of the new database is applied
//	retention passed the reader the cache is emptied and filled anew
//	a row is of an unknown kind it is counted and skipped: a newer version wrote it
package routefeed
