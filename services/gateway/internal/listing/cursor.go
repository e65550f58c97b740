package listing

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"berth/services/gateway/internal/body"
	"berth/services/internal/sandbox"
)

// Layout of a token before base64url: version, order, start in nanoseconds, digest of tenant and
// filters, id, and at the end an HMAC over all of it.
const (
	tokenVersion = 1
	digestBytes  = 16
	macBytes     = 16
	headBytes    = 1 + 1 + 8 + digestBytes
)

// Cursor seals the place where a page ended into a token that only gateways of one cluster can make.
type Cursor struct{ keys [][]byte }

// NewCursor returns the cursor of a cluster; the first secret seals, all of them open.
func NewCursor(secrets []string) (*Cursor, error) {
	if len(secrets) == 0 {
		return nil, errors.New("no secret for list tokens")
	}
	c := &Cursor{}
	for _, secret := range secrets {
		key, err := hkdf.Key(sha256.New, []byte(secret), nil, "berth list token", sha256.Size)
		if err != nil {
			return nil, fmt.Errorf("derive the key of list tokens: %w", err)
		}
		c.keys = append(c.keys, key)
	}
	return c, nil
}

// digest binds a token to whose list it is and what it was filtered by; the limit may change.
func (q Query) digest(tenant, path string) []byte {
	h := sha256.New()
	for _, text := range []string{tenant, path, q.ForNodes, q.Template, q.StartedAfter.UTC().Format(time.RFC3339Nano)} {
		var length [8]byte
		binary.BigEndian.PutUint64(length[:], uint64(len(text)))
		h.Write(length[:])
		h.Write([]byte(text))
	}
	return h.Sum(nil)[:digestBytes]
}

// seal returns the token of the page that ended with last.
func (c *Cursor) seal(q Query, digest []byte, last Item) string {
	order := byte(0)
	if q.Ascending {
		order = 1
	}
	text := append(make([]byte, 0, 96), tokenVersion, order)
	text = binary.BigEndian.AppendUint64(text, uint64(last.Started.UnixNano()))
	text = append(text, digest...)
	text = append(text, last.ID...)
	return base64.RawURLEncoding.EncodeToString(append(text, mac(c.keys[0], text)...))
}

// open returns the item that q's token points behind; nil without a token. A *body.Wrong says why a
// token is none: altered, of another tenant, or with other filters.
func (c *Cursor) open(q Query, digest []byte) (*Item, error) {
	if q.Token == "" {
		return nil, nil //nolint:nilnil // the first page
	}
	text, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(q.Token, "="))
	if err != nil || len(text) < headBytes+macBytes+1 || len(text) > headBytes+macBytes+sandbox.MaxIDBytes {
		return nil, body.Wrongf("invalid next token: not one of ours")
	}
	text, sum := text[:len(text)-macBytes], text[len(text)-macBytes:]
	if !c.sealed(text, sum) || text[0] != tokenVersion {
		return nil, body.Wrongf("invalid next token: not one of ours")
	}
	if !hmac.Equal(text[headBytes-digestBytes:headBytes], digest) || (text[1] == 1) != q.Ascending {
		return nil, body.Wrongf("invalid next token: it belongs to another list")
	}
	id, err := sandbox.ParseID(string(text[headBytes:]))
	if err != nil {
		return nil, body.Wrongf("invalid next token: not one of ours")
	}
	return &Item{ID: id, Started: time.Unix(0, int64(binary.BigEndian.Uint64(text[2:])))}, nil
}

func (c *Cursor) sealed(text, sum []byte) bool {
	ok := false
	for _, key := range c.keys {
		ok = hmac.Equal(mac(key, text), sum) || ok
	}
	return ok
}

func mac(key, text []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write(text)
	return h.Sum(nil)[:macBytes]
}
