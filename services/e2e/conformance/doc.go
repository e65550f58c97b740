// Package conformance plays an unmodified AgentENV node and an unmodified AgentENV gateway against real
// scheduler processes and a real PostgreSQL.
//
// Its clients know nothing of Berth's code: their messages are made, while the tests run, from a table
// that says what AgentENV's contract had when nodes and gateways were built against it. The node speaks
// bare HTTP/2 as a tonic channel does, the gateway uses grpc-go, scripts use Twirp. What they do is what
// the contract says that AgentENV's processes do, periods of minutes scaled to seconds.
package conformance
