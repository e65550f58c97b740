// Package launch runs one create from end to end: place, forward, record. No 201 leaves before the
// binding is committed.
//
// A create is a placement with a hold on a node until it is recorded. From the moment the node was
// chosen it runs to its end whether or not the client stays. What each failure leads to:
//
//   - the dial fails, or the node says it is full: the hold is released, the next candidate is asked,
//     at most four nodes and 30 s in all
//   - the node answers 4xx or 5xx: the hold is released, its answer is the client's
//   - the node is lost after the request went out: one that takes ids is asked once more with the same
//     id; if that fails too the hold is kept, for the node may have it, and the outcome is unknown
//   - the answer has no usable id: what there is is deleted, the hold released
//   - recording fails: the sandbox is deleted on the node, the hold released
//   - the client has left: recorded, then deleted, for nobody knows the id
//   - this process dies: the hold expires, or the node's roster brings the sandbox up
//
// Not yet here: the unversioned path for AgentENV nodes without /v2 (a Berth node has it), create
// keys, token hashes.
package launch
