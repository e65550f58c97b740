// Package pgdb is PostgreSQL as Berth uses it: a pool with its settings, transactions that may run
// again, advisory locks with an order, errors by kind, and the gate a service passes before it works.
//
// Transactions are READ COMMITTED. A lock is taken in one statement and what it guards is read in a
// later one, for a statement's snapshot is older than a lock it waited for. A function given to
// [DB.Tx] may run more than once, so it has no effect but its SQL.
//
// What can go wrong, and what comes back:
//
//	serialization failure, deadlock, lock timeout   the function runs again, at most three times more
//	connection lost before COMMIT was sent          the same, or an error that is Unavailable
//	connection lost during COMMIT                   ErrUnknown: only a caller with a key may ask again
//	no connection free within two seconds           ErrPoolWait, which is Unavailable
//	a constraint                                    the error of PostgreSQL; ask Constraint for its name
package pgdb
