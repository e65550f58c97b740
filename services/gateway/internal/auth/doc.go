// Package auth turns the API key of a request into a caller: a tenant and scopes.
//
// Keys are rows of principals, found by the SHA-256 of the whole key; the bootstrap key comes from
// the environment and is never stored. A key that was read is remembered until the route feed says
// that it changed, it expires by the database's clock, or Config.Recheck has passed and the row can
// be read again. So each failure has one answer:
//
//   - a key was revoked: every replica drops it with the feed's row, at the latest after Recheck
//   - PostgreSQL is gone: remembered keys and the bootstrap key work, an unknown key is ErrUnavailable
//   - the answer raced with a change: it is used once and not remembered
package auth
