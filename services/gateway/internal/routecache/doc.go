// Package routecache holds what a gateway knows of routes: bindings, and the nodes they name.
//
// Terms. An entry is one revision of one binding, immutable, replaced whole and only by a higher
// revision; an ended binding is an entry too (a tombstone), so that nothing late brings a dead route
// back. The cache is fresh while its feed was read to its end less than [Bound] ago. A generation is
// one identity of the database: a reset begins the next, and what was asked under an older one is
// not stored.
//
// PostgreSQL is authoritative; this is a copy with an age. What happens when
//
//	fresh                     a hit is served without I/O
//	the feed lags or hangs    entries are unconfirmed: each use re-reads its row first, at most once a second
//	PostgreSQL does not answer known routes are served, marked stale, up to the limit; unknown ones are ErrUnavailable
//	an id is missing          one read for all who wait, detached from them; "absent" is remembered a second
//	another database          everything is dropped before anything of it is applied
//	a read fails              it is asked again within its time; no entry is ever removed by a failure
package routecache
