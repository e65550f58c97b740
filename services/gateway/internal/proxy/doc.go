// Package proxy is every byte between a client and a sandbox: where a request goes, what the node
// gets, how answers stream, and what is told when something fails.
//
// An exchange is one request with its answer, or one upgraded connection. Nothing of it is repeated
// unless the node cannot have started it: the dial failed, no byte was written, or the node said so
// by 421 stale. A failure of the client's body is the client's, a failure of the node the node's.
// Bytes of path, query and body are never changed.
//
// What happens when
//
//	the dial fails          the route is read again, one more try; then 502, or 503 if its lease ended
//	the node says stale     the row is read until it shows what the node knows; one more try
//	the node goes mid-answer the client sees a cut, never an end
//	the client goes         the node's side is closed at once
//	silence                 504, 408 or a cut, by whose silence it is
package proxy
