// Package standby answers look-ups from a streaming standby without letting its lag show: an answer is
// never older than a bound, and what the standby cannot prove is asked of the primary.
//
// Terms. A position is how far a server's write-ahead log reaches: the primary's flushed end, a standby's
// replayed end, with the identity of the log (system, database, timeline). A mark is a position of the
// primary and the moment, on this process's monotonic clock, before it was asked for. A standby whose
// position covers a mark has replayed every change that was acknowledged before that moment, for an
// acknowledged commit has been flushed, and a replayed one is visible before the position moves.
//
// So each look-up on the standby reads the position first and the row in a later statement of the same
// connection: the row's snapshot is younger than the position. It is answered only if that position covers
// a mark not older than the bound when the answer is there. The time is this process's alone; two machines'
// clocks are never compared, and an idle primary makes no standby look old, as its last replayed commit
// would. Any number of standbys may be behind the address: each answer brings its own proof.
//
// Authoritative is the primary. A standby's "no such row" is never an answer.
//
// Failures, one line each:
//
//   - the standby lags, hangs or is gone: the primary is asked; a probe says so, and then nobody waits for it
//   - the primary is away: the standby answers until the last mark is older than the bound, then nothing does
//   - another database, or a restored copy with another timeline: its positions cover nothing
//   - failover: the new primary's timeline makes the marks before void. A standby counts again once its own
//     control file names that timeline, with its next restartpoint; CHECKPOINT there does it at once
//   - the primary's address leads to a standby: no marks, and the replica is not ready
package standby
