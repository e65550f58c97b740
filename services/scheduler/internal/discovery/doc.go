// Package discovery finds nodes: in the configuration file, which may change while the process runs, and
// in Kubernetes, by the EndpointSlices of one Service.
//
// Terms. A source is static or kubernetes. Its list is what it says now; nodes writes lists into rows, and
// keeps each source to its own. A view is what the API server told: slices, and the Pods of two selectors.
// The writer is the replica whose list becomes rows.
//
// Who decides. Every replica watches and makes the same list of the same view: Config.List is a function
// of its arguments, and the order in which things arrive is none of them. One writes: it has the lease in
// discovery_writer, and the database checks the lease's fence in each write. The file of the replica that
// applied one last decides about static nodes.
//
// What can go wrong, and what repairs it:
//
//	the file is changed to a bad one     the former list stays; a log line and a gauge say so
//	what made it bad is repaired          it is loaded again, also where the file itself stayed as it was
//	two Pods have one name               the API server is asked which is the newer, again until it says so
//	the API server is away               what was last heard stays; nothing is applied before a first whole view
//	a watch is cut, or is too far behind  client-go lists again
//	the writer dies                      another replica takes the lease when its 15 s are over
//	the writer hangs, then goes on       its fence is an earlier one: it writes nothing
//	the writer hears nothing any more    it gives the lease to a replica that does
//	a row differs from the list          the writer compares them every 5 s
package discovery
