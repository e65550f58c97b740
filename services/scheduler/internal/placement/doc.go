// Package placement finds a node for a create and holds room on it until the sandbox is there.
//
// Terms. A placement is the decision for one create, kept with the reasons why nodes were refused. A
// hold, a row of reservations, is room that the node's own report does not show yet: open until it
// expires, or confirmed, which names its sandbox. The room of a node is its report and the sum over its
// holds; no counter exists that could drift.
//
// States of a placement: reserved → confirmed | released | expired, and refused. A new try of one
// request id takes any of the last three back to reserved.
//
// Who decides. Whoever adds a hold has the advisory lock Node of that node and has read report and holds
// in a later statement than the one that locked. Turning an open hold into a confirmed one leaves the
// sum as it was, and deleting one lowers it, so neither needs the lock. A hold is deleted once, by
// whoever deletes its row, so its room comes back once.
//
// Create keys. A key of a tenant stands for one create. Whoever asks first claims it with the hold of its
// placement and extends that hold while the node works; others wait a little, then hear that it is
// pending. Past the hold's expiry the next caller takes the claim over, under a new reservation id, if the
// node was given the sandbox's id and so makes it at most once. Two heartbeat periods later the claim
// ends: on such a node as expired, unless a roster has confirmed it; on a node that draws its own ids
// bindings settles it by what the node has made since. Only a recorded create keeps its key.
//
// What can go wrong, and what repairs it:
//
//	the process ends before its commit     the transaction and its locks end with the connection
//	… after it, before the answer          the same request id gets the same placement; else the hold expires
//	the caller never confirms              the expire loop of any replica, a second after expires_at
//	a confirmed sandbox never comes up     the node's roster, once the hold is older than the grace
//	a gateway dies with a create key       the next caller takes over; else the key is settled and free
//	its record comes after the takeover    it names the same sandbox, so it confirms the renewed hold
//	its record comes after the key is free the sandbox is bound, and the key stays with whoever has it
//	two replicas choose one node           one has its lock; the other takes its next candidate, or waits
package placement
