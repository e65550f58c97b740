// Package migrate applies numbered SQL files to a database, one process at a time, and makes the
// roles those files grant to.
//
// Any number of replicas may call Up at once: a session lock on a connection of its own lets one
// work, the others wait and then find nothing to do. Each file begins with a short lock_timeout; a
// file that meets a long reader is tried again with jitter instead of standing in everybody's way.
// Files may come out of order, for later work adds to lower ranges of numbers.
//
// Objects belong to the group role berth_migrator, whoever runs the command, so that the next
// operator may change them. The URL must lead to the server itself, not to a pooler.
package migrate
