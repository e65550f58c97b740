package auth

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/singleflight"

	"berth/pkg/pgdb"
)

// What Authenticate returns besides a caller.
var (
	ErrUnauthorized = errors.New("unauthorized")
	ErrUnavailable  = errors.New("key store unavailable")
)

// Header is the only credential of the control plane.
const Header = "X-Api-Key"

const (
	readLimit = 2 * time.Second // one read of a row, whoever waits for it
	unknownIn = time.Second     // how long a key that does not exist is remembered
	maxKnown  = 100_000         // entries; beyond, the cache starts again
	maxHeader = 512             // bytes of a key that are looked at: none is longer than 256
)

// Config says how long an answer holds without being read again.
type Config struct {
	Recheck time.Duration // zero: 30 s
}

// Keys knows who an API key belongs to. All methods may be called at the same time.
type Keys struct {
	db        *pgdb.DB
	bootstrap *Bootstrap
	recheck   time.Duration
	now       func() time.Time
	reads     singleflight.Group

	mu     sync.Mutex
	known  map[[sha256.Size]byte]entry
	change uint64 // counts Drop, so that a read that began before is not remembered
}

type entry struct {
	caller  Caller
	found   bool
	expires time.Time // zero: never; on this process's monotonic clock, from the database's interval
	checkAt time.Time // from then on it is read again if that is possible
}

// New returns the keys of db's principals and bootstrap, which may be nil.
func New(db *pgdb.DB, bootstrap *Bootstrap, cfg Config) *Keys {
	if cfg.Recheck <= 0 {
		cfg.Recheck = 30 * time.Second
	}
	return &Keys{db: db, bootstrap: bootstrap, recheck: cfg.Recheck, now: time.Now, known: map[[sha256.Size]byte]entry{}}
}

// IsKey tells whether key is one of Berth's, which no application may see. Only what has the form of our
// keys costs a look-up.
func (k *Keys) IsKey(ctx context.Context, key string) bool {
	digest := sha256.Sum256([]byte(key))
	if k.bootstrap.matches(digest) {
		return true
	}
	if !ourForm(key) {
		return false
	}
	_, err := k.Identify(ctx, key)
	return !errors.Is(err, ErrUnauthorized) // in doubt it is not shown
}

// ourForm is e2b_ and 60 hex digits: the public id and the secret.
func ourForm(key string) bool {
	digits, found := strings.CutPrefix(key, "e2b_")
	return found && len(digits) == 60 && strings.Trim(digits, "0123456789abcdef") == ""
}

// Authenticate returns who sent a request with these headers. Without exactly one key, and with one
// that is unknown, expired or disabled, the error is ErrUnauthorized; when that cannot be told
// because PostgreSQL does not answer, ErrUnavailable.
func (k *Keys) Authenticate(ctx context.Context, headers http.Header) (Caller, error) {
	values := headers[Header]
	if len(values) != 1 {
		return Caller{}, fmt.Errorf("%w: %d keys", ErrUnauthorized, len(values))
	}
	return k.Identify(ctx, values[0])
}

// Identify is Authenticate for one key.
func (k *Keys) Identify(ctx context.Context, key string) (Caller, error) {
	if len(key) > maxHeader {
		return Caller{}, fmt.Errorf("%w: key too long", ErrUnauthorized)
	}
	digest := sha256.Sum256([]byte(key))
	if k.bootstrap.matches(digest) {
		return Caller{Tenant: DefaultTenant, Key: "bootstrap", Scopes: []string{Admin}}, nil
	}
	if checkKey(key) != nil {
		return Caller{}, fmt.Errorf("%w: no key has this form", ErrUnauthorized)
	}
	held, ok := k.held(digest)
	if ok && k.now().Before(held.checkAt) {
		return held.answer()
	}
	fresh, err := k.read(ctx, digest)
	switch {
	case err == nil:
		return fresh.answer()
	case ok && held.found:
		return held.answer() // known before PostgreSQL went away
	case ctx.Err() != nil:
		return Caller{}, ctx.Err()
	}
	return Caller{}, fmt.Errorf("%w: %w", ErrUnavailable, err)
}

func (e entry) answer() (Caller, error) {
	if !e.found {
		return Caller{}, ErrUnauthorized
	}
	return e.caller, nil
}

// held returns what is remembered; an expired key is remembered as unknown.
func (k *Keys) held(digest [sha256.Size]byte) (entry, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	e, ok := k.known[digest]
	if ok && e.found && !e.expires.IsZero() && !k.now().Before(e.expires) {
		e.found = false
	}
	return e, ok
}

// Drop forgets the key with this public id, all keys for "", and every key that was unknown: it may be
// known now.
func (k *Keys) Drop(publicID string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.change++
	for digest, e := range k.known {
		if publicID == "" || !e.found || e.caller.Key == publicID {
			delete(k.known, digest)
		}
	}
}

// read asks PostgreSQL, once for all who wait for the same key, and remembers the answer unless a
// key changed meanwhile.
func (k *Keys) read(ctx context.Context, digest [sha256.Size]byte) (entry, error) {
	result := k.reads.DoChan(string(digest[:]), func() (any, error) {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), readLimit)
		defer cancel()
		k.mu.Lock()
		began := k.change
		k.mu.Unlock()
		e, err := k.load(limited, digest)
		if err != nil {
			return entry{}, err
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.change == began {
			if len(k.known) >= maxKnown {
				clear(k.known)
			}
			k.known[digest] = e
		}
		return e, nil
	})
	select {
	case r := <-result:
		if r.Err != nil {
			return entry{}, r.Err
		}
		return r.Val.(entry), nil //nolint:errcheck // the function above returns nothing else
	case <-ctx.Done():
		return entry{}, ctx.Err()
	}
}

// readKeySQL judges expiry on the database's clock, and gives what is left of the key's life as an
// interval, so that nobody compares two clocks.
const readKeySQL = `
SELECT  coalesce(p.tenant_id, '') AS tenant,
        p.public_id,
        p.scopes,
        p.key_sha256,
        CASE WHEN p.expires_at < 'infinity'
             THEN extract(epoch FROM p.expires_at - clock_timestamp()) END::float8 AS seconds_left
FROM    principals AS p
WHERE   p.key_sha256 = @digest
AND     p.role IN ('client', 'operator')
AND     p.disabled_at IS NULL
AND     (p.expires_at IS NULL OR p.expires_at > clock_timestamp())`

type keyRow struct {
	Tenant      string
	PublicID    string
	Scopes      []string
	KeySHA256   []byte `db:"key_sha256"`
	SecondsLeft *float64
}

func (k *Keys) load(ctx context.Context, digest [sha256.Size]byte) (entry, error) {
	asked := k.now() // before the question leaves, so that the interval ends too soon rather than too late
	rows, err := k.db.Query(ctx, readKeySQL, pgx.StrictNamedArgs{"digest": digest[:]})
	if err != nil {
		return entry{}, fmt.Errorf("read a key: %w", err)
	}
	row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[keyRow])
	if errors.Is(err, pgx.ErrNoRows) {
		return entry{checkAt: asked.Add(unknownIn)}, nil
	}
	if err != nil {
		return entry{}, fmt.Errorf("read a key: %w", err)
	}
	if !equal(row.KeySHA256, digest[:]) {
		return entry{checkAt: asked.Add(unknownIn)}, nil
	}
	slices.Sort(row.Scopes)
	e := entry{
		caller:  Caller{Tenant: row.Tenant, Key: row.PublicID, Scopes: row.Scopes},
		found:   true,
		checkAt: asked.Add(k.recheck),
	}
	if row.SecondsLeft != nil {
		e.expires = asked.Add(time.Duration(min(*row.SecondsLeft, maxSeconds) * float64(time.Second)))
	}
	return e, nil
}

// maxSeconds keeps a far expiry inside a time.Duration.
const maxSeconds = 100 * 365 * 24 * 3600

// anyKeySQL tells whether somebody could call at all.
const anyKeySQL = `
SELECT EXISTS (
SELECT  FROM principals
WHERE   key_sha256 IS NOT NULL
AND     role IN ('client', 'operator')
AND     disabled_at IS NULL
AND     (expires_at IS NULL OR expires_at > clock_timestamp()))`

// ErrNoKey is returned by Check when no key exists anywhere.
var ErrNoKey = errors.New("no API key: set BERTH_API_KEY (32 to 256 characters of A-Z a-z 0-9 . _ ~ -), " +
	"put one into " + SecretFile + ", or make one in the database")

// Check returns nil if some key would be taken, ErrNoKey if none, or why that cannot be told.
func (k *Keys) Check(ctx context.Context) error {
	if k.bootstrap != nil {
		return nil
	}
	var exists bool
	if err := k.db.QueryRow(ctx, anyKeySQL).Scan(&exists); err != nil {
		return fmt.Errorf("look for API keys: %w", err)
	}
	if !exists {
		return ErrNoKey
	}
	return nil
}

func equal(a, b []byte) bool { return subtle.ConstantTimeCompare(a, b) == 1 }
