// Package journal is what a node remembers of its sandboxes across its own death: one record for each
// sandbox id, in a file of its own, replaced whole and fsynced.
//
// # Terms
//
// A record is live from the moment its create was admitted, before anything was started, until the sandbox
// was deleted; then it is a tombstone and is forgotten after the retention. The answer in it is drawn up
// before the first write, so there is no moment in which a sandbox exists and its answer does not.
//
// # Who is authoritative
//
// The journal, for which ids exist on this node and for what was answered. Of the revision it is a lower
// bound: data-plane requests raise it in memory and write it later. A lost raise is harmless, for a route
// that is old is only refused later; a mutating call is written before it acts.
//
// # Failures
//
//   - Death before a write is complete: the old record, or none; nobody was answered.
//   - Death after the write of a live record and before the start: the next agent starts the sandbox, and a
//     repeated create gets the answer.
//   - Death after a delete was written: the next agent removes what is left.
//   - A file that cannot be read, or is not a record: the agent does not start, and names it. Guessing would make
//     a second sandbox under one id.
package journal
