// Package pgtest gives each test a migrated PostgreSQL database of its own.
//
// The server comes from, in this order:
//
//	BERTH_TEST_DATABASE_URL    a running server and a role that may create databases there;
//	                           databases that exist are left alone
//	local binaries             of BERTH_TEST_POSTGRES_BIN, else PATH, else the distribution's folders;
//	                           one server for each test binary, on a unix socket, gone with the binary
//	a container engine         one container for each test binary (BERTH_TEST_POSTGRES_IMAGE)
//
// BERTH_TEST_POSTGRES=local or =container allows the second or third only. With none of them a test
// is skipped; with CI set it fails.
//
// All migrations run once for each version of their files, into a template that is named by their
// hash; a test's database is a copy of it. It is dropped when the test ends, and kept when the test
// failed and BERTH_TEST_KEEP is set.
//
// Advisory locks and notifications are a database's own, so tests may run in parallel. Tests that
// stop, freeze or configure a server take one of their own, by [NewServer].
package pgtest
