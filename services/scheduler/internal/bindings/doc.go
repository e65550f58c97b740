// Package bindings remembers which node a sandbox lives on, and tells the gateways.
//
// Terms. A binding is a row of bindings, one for each sandbox id; F is the row of route_feed that is
// written in the same statement as a change of a binding's state or node; a roster is what a node
// says it runs; an event is one line of the log, told by a node or by the scheduler; an orphan is a sandbox
// that a roster lists and that may not be bound there.
//
// States. bound: the node has it. parked: its node left, and the next roster that lists it brings it
// back; what a drain parked, its own node's does only once it is not cordoned. gone: it ended; the row stays a while, so that nothing late brings it back.
//
//	none, parked, gone → bound      Record; a roster that lists it; an event: create, fork, resume
//	bound → bound on another node   Record; a roster, from a node without a live lease
//	bound → parked                  the node unregistered, or is absent and silent; its drain ran out of time
//	bound, parked → gone            Release; a roster without it, past the grace; parked too long; an event
//
// Who decides. The primary key: a sandbox has one row, and bindAll is the only way in. Record takes the
// advisory locks of its sandboxes; a transaction of many records only tries them, and who does not get his
// goes alone; existing rows are locked in the order of their ids, then reservations,
// then new rows are inserted in that order, and rows are changed last: whoever has changed one waits for
// nothing any more, for an insert of the same id waits for him. A row that appeared in between ends the
// transaction with ErrRaced, which begins anew from fresh reads. The revision is GREATEST(its own + 1,
// nextval), so it grows also for an id whose row was forgotten. A node's own transaction, by which its
// roster comes, holds advisory.Node; one by which it tells events holds advisory.Sandbox of their
// sandboxes and has locked its lease, which the roster's transaction waits for.
//
// What can go wrong, and what repairs it:
//
//	a record of a batch is in the way    it goes alone, in its caller's goroutine
//	the process ends before a commit     nothing happened; the caller or the node repeats
//	… after it, before the bell rings    gateways poll the feed ten times a second
//	a roster is older than a record      a binding younger than the grace is spared
//	an event comes before the record     the binding is there with its hold, and the record fills it in
//	an event is lost, or told too late   the next roster is the truth
//	a day has no partition of the log    its events are in the default one, and move or go with their age
//	a sandbox ended without a word       the next roster without it, past the grace
//	a roster changes very much           the rest changes with the next beats, compared in full
//	a node leaves without a word         its bindings stay and routing decides; absent, they are parked
package bindings
