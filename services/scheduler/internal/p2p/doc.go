// Package p2p answers who serves which bytes: which nodes have a peer-to-peer store, and which of them
// hold an artifact.
//
// Terms. A peer is a node whose effective status is ready and whose last heartbeat named where its store
// listens. An artifact is a key within a cluster and a backend; a holder is a node that said it has one.
//
// Who decides. Nodes own peer_endpoints and say who is ready, on the database's clock; this package reads
// them. The index, p2p_artifacts and p2p_holders, is this package's. It is a hint: whoever follows it may
// find nothing there and asks elsewhere. So it is written without waiting for the disk, and what a crash
// of PostgreSQL takes back of it is recorded again, or fetched from elsewhere once.
//
// Order of locks: the node's row, then artifacts by id, then holders. Whoever adds or removes a holder has
// locked its artifact in an earlier statement, so an artifact lives exactly as long as it has a holder.
//
// What can go wrong, and what repairs it:
//
//	a holder dies, or is drained        it is no peer, so no answer names it
//	a node unregisters or is absent     nodes forgets what it held, in the transaction that says so
//	it held more than 10,000 keys       the rest goes with the next passes; no answer names it meanwhile
//	it records while it becomes absent  one waits for the other: refused, or recorded and then forgotten
//	a holder dropped the bytes          its Forget; before that, the one who asked it asks the next
//	more keys than the capacity         a pass deletes the least recently used, each 10 s
package p2p
