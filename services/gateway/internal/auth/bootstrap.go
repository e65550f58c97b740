package auth

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
)

// SecretFile is where container platforms mount the bootstrap key.
const SecretFile = "/run/secrets/api-key"

// Lengths of a bootstrap key, and of a file that holds one with a line ending.
const (
	minKeyBytes  = 32
	maxKeyBytes  = 256
	maxFileBytes = maxKeyBytes + len("\r\n")
)

// bootstrapVariables are asked in this order.
var bootstrapVariables = []string{"BERTH_API_KEY", "AENV_API_KEY"} //nolint:gochecknoglobals // a constant list

// Bootstrap is the key that works before any was made: tenant default, all scopes, never stored.
type Bootstrap struct {
	key    string
	digest [sha256.Size]byte
}

// Key returns the key itself, for the node key that defaults to it.
func (b *Bootstrap) Key() string { return b.key }

// matches compares in constant time, for both digests have one length and say nothing of the key.
func (b *Bootstrap) matches(digest [sha256.Size]byte) bool {
	return b != nil && equal(digest[:], b.digest[:])
}

// NewBootstrap returns key as the bootstrap key, or an error that says what a key must be and never
// shows it. source names where it came from.
func NewBootstrap(source, key string) (*Bootstrap, error) {
	if err := checkKey(key); err != nil {
		return nil, fmt.Errorf("%s: %w", source, err)
	}
	return &Bootstrap{key: key, digest: sha256.Sum256([]byte(key))}, nil
}

// FindBootstrap returns the key of the first source that is present: the variable BERTH_API_KEY,
// AENV_API_KEY, then file (SecretFile outside tests). A variable that is present counts even if it
// is empty: then, and whenever the key is not valid, the error says so. Nil, nil: there is none.
func FindBootstrap(lookup func(string) (string, bool), file string) (*Bootstrap, error) {
	for _, name := range bootstrapVariables {
		if key, present := lookup(name); present {
			return NewBootstrap(name, key)
		}
	}
	key, err := readSecret(file)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil //nolint:nilnil // no source is no error: SQL may have keys
	}
	if err != nil {
		return nil, err
	}
	return NewBootstrap(file, key)
}

// readSecret returns the text of a regular file less one trailing line feed and then one carriage
// return. A link to a regular file is one, for that is how secrets are mounted.
func readSecret(path string) (string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("read the API key: %w", err)
	}
	if !info.Mode().IsRegular() {
		return "", fmt.Errorf("read the API key: %s is no regular file", path)
	}
	file, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("read the API key: %w", err)
	}
	defer func() { _ = file.Close() }()
	text, err := io.ReadAll(io.LimitReader(file, int64(maxFileBytes)+1))
	if err != nil {
		return "", fmt.Errorf("read the API key: %w", err)
	}
	if len(text) > maxFileBytes {
		return "", fmt.Errorf("read the API key: %s is longer than %d bytes", path, maxFileBytes)
	}
	text = bytes.TrimSuffix(text, []byte("\n"))
	return string(bytes.TrimSuffix(text, []byte("\r"))), nil
}

// checkKey refuses what is no key, without a word of what it is.
func checkKey(key string) error {
	if len(key) < minKeyBytes || len(key) > maxKeyBytes {
		return fmt.Errorf("the key has %d characters, %d to %d are wanted; unset it or set a valid one", len(key), minKeyBytes, maxKeyBytes)
	}
	for i := range len(key) {
		if !keyByte(key[i]) {
			return fmt.Errorf("character %d of the key is not one of A-Z a-z 0-9 . _ ~ -; unset it or set a valid one", i+1)
		}
	}
	return nil
}

func keyByte(c byte) bool {
	switch {
	case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		return true
	}
	return c == '.' || c == '_' || c == '~' || c == '-'
}
