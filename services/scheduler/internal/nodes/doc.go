// Package nodes remembers which nodes there are and which of them are alive.
//
// Terms. A node is a row of nodes: what sources of nodes and its own heartbeats say about it, when
// that changes. A lease is a row of node_leases: who the node is, until when it counts as alive, and
// its load; a plain heartbeat writes that row and nothing else. A beat is one heartbeat. The fast path
// renews many leases in one statement; the slow path is a transaction for one node.
//
// States of a lease: live; expired, when its node was silent for the TTL; ended, when it unregistered.
// A process of a node is an instance: another one takes an expired or ended lease, or a live one from
// the same place, which is a restart. The one it took it from is retired and never comes back while
// the lease lives.
//
// States of a drain: closing, until no open hold is left on its node; draining, until nothing is; done,
// expired, canceled. Its order and a cordon's are answered under advisory.Node, under which placements decide,
// so nothing is placed after the answer. The row says where a drain is; what is left is counted each time.
//
// A cluster's CPU template is made of what its nodes sent, under advisory.Template, after the heartbeat that
// changed it and before the answer. template_sent in the lease says which one its instance was told; the fast
// path leaves out whoever was not told the one there is.
//
// Who decides. The database's clock judges every lease. Whoever changes who a node is, whether it is
// there, or what is bound to it holds advisory.Node and has locked it in an earlier statement; the fast
// path does neither, for its statement renews only what is live and unchanged.
//
// What can go wrong, and what repairs it:
//
//	the process ends before a commit    the node repeats its heartbeat, to any replica
//	a beat comes twice, or late         its seq is not above the stored one: nothing is written
//	two processes have one node id      the second is refused while the first lives; bindings stay
//	the replica that moves a drain dies any other one's pass goes on from the row
//	an event comes twice, or late       its seq is not above the stored one, or its instance has no lease:
//	                                    the log has it, and nothing else changes
//	an answer with a template is lost   a Berth node is told until it echoes it; an AgentENV node after its
//	                                    restart, or when the template changes
//	a roster was missed                 the next one is compared with the rows, not with the last roster
//	a delta was computed from a roster  it is used only where the row still has that roster's digest,
//	that another replica replaced       and every FullReconcile all is compared
package nodes
